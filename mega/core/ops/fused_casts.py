"""Casts to fp8 that are fused with the op before them, and the conventions between ops and linear layers.

    largest magnitude   an op measures its output, so that a cast with one scale per tensor needs only one pass
    gradient            the output of a linear layer carries `FusedCasts`, if the layer's backward pass accepts the
                        gradient in fp8; the op that computes this gradient then does not store it in 16 bits

A gradient that exists only in fp8 is represented by a stand-in, which has the gradient's shape but occupies no memory.
Its elements are NaN, so an op that reads them by mistake does not go unnoticed. Only `prepared` reads the fp8 form.
Results are bitwise equal to those of separate casts. This module does not depend on kernels or layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch


class FusedCasts(NamedTuple):
    """Kernels that compute a gradient and cast it. They return the form that `Matmuls.prepare` returns, or None if they
    do not support their arguments."""

    heads_gradient: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
    """The gradient of the fused projection of query, key and value, for the gradients of q, k and v [tokens, heads, d]
    after rotation, cos and sin."""
    gate_gradient: Callable[[torch.Tensor, torch.Tensor, int], object] | None = None
    """The gradient of x [n, 2f], for x, the gradient [n, f] of the gated activation of x, and the kind of its gate."""


def accepting(y: torch.Tensor, casts: FusedCasts | None) -> torch.Tensor:
    """Declare that the linear layer that computed y accepts the gradient of y from `casts`."""
    if casts is not None:
        y.gradient_casts = casts  # type: ignore[attr-defined]
    return y


def gradient_casts(y: torch.Tensor) -> FusedCasts | None:
    """Return the casts from `accepting`, or None if the gradient of y must not be cast."""
    return getattr(y, "gradient_casts", None)


def stand_in(shape: tuple[int, ...], like: torch.Tensor, form: object) -> torch.Tensor:
    """Return a stand-in for a tensor that has this shape, the dtype and device of `like`, and this fp8 form."""
    tensor = _nan(like.device, like.dtype).expand(shape)
    tensor.fp8_form = form  # type: ignore[attr-defined]
    return tensor


@cache
def _nan(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


def prepared(x: torch.Tensor) -> object:
    """Return the fp8 form of a stand-in, or None for any other tensor."""
    return getattr(x, "fp8_form", None)


def with_largest(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Attach the largest magnitude of x to x. largest: fp32, of which the maximum is the largest magnitude."""
    if not x.is_inference():
        x.largest = largest, x._version  # type: ignore[attr-defined]
    return x


def largest_of(x: torch.Tensor) -> torch.Tensor | None:
    """Return the result of `with_largest`, or None if x has none or was changed in place since, for example by
    autograd, which may add gradients in place."""
    largest, version = getattr(x, "largest", (None, -1))
    return None if largest is None or version != x._version else largest
