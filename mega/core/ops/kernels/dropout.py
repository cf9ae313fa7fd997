"""Dropout of residual branches, inside the kernels that add branches and as a separate kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mega.core.ops import norm
from mega.core.ops.autograd import FunctionContext, deliver
from mega.core.ops.counter import RULE
from mega.core.ops.dropout import Dropout
from mega.core.ops.kernels.counter import kept_elements, row_keys
from mega.core.ops.kernels.language import cdiv, jit, launch, tl

BLOCK = 1024


class Values(NamedTuple):
    """A `Dropout` as a kernel argument."""

    keys: torch.Tensor
    site: int
    threshold: int  # an element is dropped with probability threshold / 2^32
    scale: float  # factor by which surviving elements are multiplied


def values_of(drop: Dropout | None) -> Values | None:
    """Return the kernel argument for a dropout, or None if dropout is off."""
    if drop is None:
        return None
    return Values(drop.keys.contiguous(), drop.site, drop.threshold << 16, 1.0 / drop.keep)


@jit
def dropped(x, drop, row, elements):
    """Apply dropout to elements of one row: scale elements that survive, and set all others to 0."""
    key = row_keys(tl.load(drop.keys + row), drop.site, tl.cast(0, tl.int64))
    return tl.where(kept_elements(key, elements, drop.threshold), x * drop.scale, 0.0)


@jit
def _added(
    x_at, branch_at, bias_at, y_at, drop, width,
    RESIDUAL: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    offset = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offset < width
    y = tl.load(branch_at + row * width + offset, mask, 0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_at + offset, mask, 0.0).to(tl.float32)
    y = dropped(y, drop, row, offset)
    if RESIDUAL:
        y += tl.load(x_at + row * width + offset, mask, 0.0).to(tl.float32)
    tl.store(y_at + row * width + offset, y.to(y_at.dtype.element_ty), mask)


def _launch(
    x: torch.Tensor | None, branch: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, drop: Dropout
) -> torch.Tensor:
    rows, width = branch.shape
    launch(
        _added, (rows * cdiv(width, BLOCK),), branch if x is None else x, branch, bias, y, values_of(drop), width,
        RESIDUAL=x is not None, BIAS=bias is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return y


_AddState = tuple[torch.Tensor | None, Dropout, bool, torch.dtype]
"""State for the backward pass: (bias, dropout, whether there is a residual, dtype of the branch)."""


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[_AddState],
        x: torch.Tensor | None,
        branch: torch.Tensor,
        bias: torch.Tensor | None,
        drop: Dropout,
    ) -> torch.Tensor:
        ctx.state = bias, drop, x is not None, branch.dtype
        return _launch(x, branch, bias, torch.empty_like(branch if x is None else x), drop)

    @staticmethod
    def backward(ctx: FunctionContext[_AddState], grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, (bias, drop, residual, dtype) = grad.contiguous(), ctx.state
        grad_branch = _launch(None, grad, None, torch.empty_like(grad, dtype=dtype), drop)
        grad_bias = None if bias is None else deliver(bias, grad_branch.sum(0, dtype=torch.float32))
        return grad if residual else None, grad_branch, grad_bias, None


def added(
    x: torch.Tensor | None, branch: torch.Tensor | None, branch_bias: torch.Tensor | None, drop: Dropout | None
) -> torch.Tensor:
    """Compute `ops.norm.added`, with a kernel if there is dropout."""
    if branch is None or drop is None or drop.rule != RULE:
        return norm.added(x, branch, branch_bias, drop)
    return _Added.apply(None if x is None else x.contiguous(), branch.contiguous(), branch_bias, drop)  # type: ignore[no-any-return]
