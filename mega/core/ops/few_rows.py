"""Ops of a decoding step for few tokens, fused into few kernels.

A decoding step is limited by memory bandwidth, so each weight is read only once, and the operations before and after a
GEMM are fused into the GEMM.

    linear      x [n, in] -> norm of x, GEMM, bias, then an activation, or the sum with the residual
    norm_heads  apply an RMSNorm to each query and key head of a fused projection
    place       rotate query and key of a fused projection, and store keys and values in the cache

`Ops.few_rows` is an implementation or None; the implementation for CUDA is in kernels/few_rows.py. PLAIN is the
reference, and `trusted` compares an implementation with PLAIN before it is used. This module does not depend on layers,
sequences or ranks.
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
from mega.core.ops.trial import Agree, alone, error_of, passes


class NormOf(NamedTuple):
    """A norm of rows [n, in], which is LayerNorm if it has a bias, otherwise RMSNorm."""

    weight: torch.Tensor  # [in]
    bias: torch.Tensor | None  # [in]
    eps: float
    form: NormForm = USUAL


Place = Callable[[torch.Tensor, Rotary | None, torch.Tensor, torch.Tensor, int], None]


NormHeads = Callable[[torch.Tensor, NormOf, NormOf, int], None]


@dataclass(frozen=True)
class FewRows:
    """An implementation of the ops for few tokens."""

    takes: Callable[[int, Factor], bool]
    """takes(rows, factor) -> whether `linear` supports this number of rows with this weight."""
    linear: Callable[[torch.Tensor, Factor, NormOf | None, str | None, torch.Tensor | None], torch.Tensor]
    """linear(x, factor, norm, activation, into) -> [n, out] in the dtype of the weight; for fp8 weights, in the dtype
    of the norm or x. If `into` ([n, out] in any dtype) is given, the result is added to `into`, which is returned.
    With swiglu, the number of outputs is halved."""
    place: Place
    """place(fused, rotary, rows, at, heads): rotate the query heads in fused [n, heads + 2 kv_heads, d] in place, and
    store rotated keys and values in rows[at]. rows: [slots of the cache, 2 kv_heads, d]. rotary: cos and sin, each fp32
    [n, R / 2], or None. Any number of rows is supported."""
    norm_heads: NormHeads
    """norm_heads(fused, q, k, heads): apply the RMSNorm `q` to each query head and the RMSNorm `k` to each key head of
    fused [n, heads + 2 kv_heads, d], in place. Both norms have a weight [d]. Any number of rows is supported."""


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
        rotated = fused[:, : (heads + fused.shape[1]) // 2]
        rotated.copy_(rotate(rotated, *rotary))
    rows.index_copy_(0, at, fused[:, heads:])


def plain_norm_heads(fused: torch.Tensor, q: NormOf, k: NormOf, heads: int) -> None:
    last_key = (heads + fused.shape[1]) // 2
    for part, norm in ((fused[:, :heads], q), (fused[:, heads:last_key], k)):
        part.copy_(add_norm(part, None, None, None, *norm)[1])


PLAIN = FewRows(lambda rows, factor: True, plain_linear, plain_place, plain_norm_heads)


def trusted(
    few: FewRows | None, dtype: torch.dtype, device: torch.device, widths: Sequence[int], agree: Agree = alone
) -> FewRows | None:
    """Return `few` if, on all ranks that call `agree`, its results equal those of PLAIN for inputs of the given widths;
    otherwise return None. A rank whose results differ logs a warning."""
    if few is None:
        return None

    def error() -> float:
        return max(_trial_error(few, width, dtype, device, narrow) for width in widths for narrow in (False, True))

    return few if passes(error, dtype, "steps of few tokens take the plain kernels: ours", agree) else None


def _trial_error(few: FewRows, width: int, dtype: torch.dtype, device: torch.device, narrow: bool) -> float:
    """Return the largest relative error of each op for one row."""

    def some(*shape: int) -> torch.Tensor:
        """Return values between 0 and 1, so that sums have no cancellation and relative errors stay small."""
        count = torch.Size(shape).numel()
        return (torch.arange(count, device=device, dtype=torch.float32) * 0.618).frac().view(shape).to(dtype)

    weight, bias, scale = some(64, width), some(64), some(64).float() * (4 / width)
    factor = Factor(weight.to(FORWARD), None, scale) if narrow else Factor(weight * (4 / width), bias)
    x, norm, results = some(1, width), NormOf(some(width), None if narrow else some(width), 1e-5), []
    for one in (few, PLAIN):
        fused, rows = some(1, 4, 32), torch.zeros(3, 2, 32, dtype=dtype, device=device)
        angles = some(1, 8).float()
        one.norm_heads(fused, NormOf(some(32), None, 1e-5), NormOf(some(32) * 2, None, 1e-5), 2)
        one.place(fused, (angles, angles * 0.5), rows, torch.tensor([1], device=device), 2)
        results.append(
            [
                one.linear(x, factor, norm, "swiglu" if narrow else "gelu", None),
                one.linear(x, factor, None, None, some(1, 64)),
                fused[:, :2],
                rows,
            ]
        )
    return error_of(*results)
