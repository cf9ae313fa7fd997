"""What a step of few tokens computes between its attentions, in few passes: memory gives the pace, so weights are read
once, and what lies around a product of theirs is done by the same pass.

    linear    x [n, in] -> norm of x, times a weight, plus its bias, through an activation or added to the residual
    place     query and key of a fused product turned by their positions, keys and values put into the cache

`Ops.few_rows` is an implementation, or None where there is none (kernels/few_rows.py is for CUDA). PLAIN says what it
computes, and `trusted` tries one before it is used. They know no layers, no sequences and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mega.core.ops.activation import activate
from mega.core.ops.fp8 import FORWARD
from mega.core.ops.heads import Rotary
from mega.core.ops.matmuls import Factor
from mega.core.ops.norm import USUAL, NormForm, add_norm
from mega.core.ops.rotary import rotate
from mega.core.ops.trial import error_of, passes


class NormOf(NamedTuple):
    """RMSNorm, or LayerNorm where there is a bias, of rows [n, in]; weight and bias [in]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    form: NormForm = USUAL


Place = Callable[[torch.Tensor, Rotary | None, torch.Tensor, torch.Tensor, int], None]


@dataclass(frozen=True)
class FewRows:
    """One implementation.

    takes(rows, factor) -> whether `linear` takes so many rows by this weight.
    linear(x, factor, norm, activation, into): [n, out] in the weight's dtype; where that is fp8, in the norm's or x's.
        `into`, [n, out] in any dtype, is what the product is added to instead, and returned. swiglu halves the outputs.
    place(fused, rotary, rows, at, heads): of fused [n, heads + 2 kv_heads, d] the first heads are turned where they
        lie; keys, turned, and values go to rows[at], rows [slots of the cache, 2 kv_heads, d]. rotary: cos and sin,
        fp32 [n, R / 2], or None. Any number of rows.
    """

    takes: Callable[[int, Factor], bool]
    linear: Callable[[torch.Tensor, Factor, NormOf | None, str | None, torch.Tensor | None], torch.Tensor]
    place: Place


def plain_linear(
    x: torch.Tensor, factor: Factor, norm: NormOf | None, activation: str | None, into: torch.Tensor | None
) -> torch.Tensor:
    if norm is not None:
        x = add_norm(x, None, None, None, *norm)[1]
    y = x @ factor.weight.to(x.dtype).t()
    if factor.scale is not None:
        y = (y * factor.scale).to(x.dtype)
    if activation is not None:
        y = activate(y, factor.bias, activation)
    elif factor.bias is not None:
        y = y + factor.bias
    return y if into is None else into.add_(y)


def plain_place(
    fused: torch.Tensor,
    rotary: Rotary | None,
    rows: torch.Tensor,
    at: torch.Tensor,
    heads: int,
) -> None:
    if rotary is not None:
        turned = fused[:, : (heads + fused.shape[1]) // 2]
        turned.copy_(rotate(turned, *rotary))
    rows.index_copy_(0, at, fused[:, heads:])


PLAIN = FewRows(lambda rows, factor: True, plain_linear, plain_place)


def trusted(few: FewRows | None, dtype: torch.dtype, device: torch.device, widths: Sequence[int]) -> FewRows | None:
    """It, where it agrees with PLAIN about inputs of these widths; else None, and a line says why."""
    if few is None:
        return None

    def off() -> float:
        return max(_off(few, width, dtype, device, narrow) for width in widths for narrow in (False, True))

    return few if passes(off, dtype, "steps of few tokens take the plain kernels: ours") else None


def _off(few: FewRows, width: int, dtype: torch.dtype, device: torch.device, narrow: bool) -> float:
    """The largest relative error of a product and of a place of one row."""

    def some(*shape: int) -> torch.Tensor:
        """Between 0 and 1, so that no sum is the small rest of large numbers."""
        count = torch.Size(shape).numel()
        return (torch.arange(count, device=device, dtype=torch.float32) * 0.618).frac().view(shape).to(dtype)

    weight, bias, scale = some(64, width), some(64), some(64).float() * (4 / width)
    factor = Factor(weight.to(FORWARD), None, scale) if narrow else Factor(weight * (4 / width), bias)
    x, norm, found = some(1, width), NormOf(some(width), None if narrow else some(width), 1e-5), []
    for one in (few, PLAIN):
        fused, rows = some(1, 4, 32), torch.zeros(3, 2, 32, dtype=dtype, device=device)
        angles = some(1, 8).float()
        one.place(fused, (angles, angles * 0.5), rows, torch.tensor([1], device=device), 2)
        found.append(
            [
                one.linear(x, factor, norm, "swiglu" if narrow else "gelu", None),
                one.linear(x, factor, None, None, some(1, 64)),
                fused[:, :2],
                rows,
            ]
        )
    return error_of(*found)
