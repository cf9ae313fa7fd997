"""Grouped GEMMs for experts, which compute y = x W_e^T for the rows of every expert e.

    x [rows, in], sorted by expert        rows of expert 0 | rows of expert 1 | ...
    ends [E]                                               ^ ends[0]          ^ ends[1]
    W [E x out, in]                       the experts' matrices, stacked along dim 0

The reference is a loop over experts. If torch has a grouped GEMM for the device, a single call computes all experts
without synchronising with the host. This module does not depend on ranks or layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from mega.core.ops import total
from mega.core.ops.matmuls import Matmuls
from mega.core.ops.operand import Input


class GroupedRows(NamedTuple):
    """Gradients of the experts' outputs."""

    rows: torch.Tensor  # [rows, out]
    ends: torch.Tensor  # int32 [E], end of each expert's rows


class GroupedMatmuls(Matmuls):
    """The GEMMs of linear layers for several experts. Output gradients are passed as `GroupedRows`. accumulate:
    function that adds a gradient to a main_grad."""

    words = "a loop over experts"

    def __init__(self, accumulate: Callable[[torch.Tensor, torch.Tensor], None] = total.accumulate):
        self._add = accumulate

    def prepare(self, grad: Any) -> Any:
        return grad

    def grouped(self, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute the forward GEMMs: [rows, in] -> [rows, out]."""
        matrices = weight.unflatten(0, (len(ends), -1))
        if fast(x, matrices):
            return torch._grouped_mm(x, matrices.transpose(1, 2), offs=ends)
        if x.is_meta:  # the cost does not depend on the distribution of rows over experts
            return F.linear(x, matrices[0])
        out = x.new_empty(len(x), matrices.shape[1])
        for matrix, rows in zip(matrices, _runs(ends), strict=True):
            torch.mm(x[rows], matrix.t(), out=out[rows])
        return out

    def grouped_dgrad(self, grad: GroupedRows, weight: torch.Tensor) -> torch.Tensor:
        """Compute the gradients of the inputs: [rows, out] -> [rows, in]."""
        matrices = weight.unflatten(0, (len(grad.ends), -1))
        if fast(grad.rows, matrices):
            return torch._grouped_mm(grad.rows, matrices, offs=grad.ends)
        if grad.rows.is_meta:
            return grad.rows @ matrices[0]
        out = grad.rows.new_empty(len(grad.rows), matrices.shape[2])
        for matrix, rows in zip(matrices, _runs(grad.ends), strict=True):
            torch.mm(grad.rows[rows], matrix, out=out[rows])
        return out

    def wgrad(self, grad: GroupedRows, x: Input) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        shape = (len(grad.ends), grad.rows.shape[1], x.shape[1])
        if fast(x, grad.rows):
            return torch._grouped_mm(grad.rows.t(), x, offs=grad.ends).flatten(0, 1)
        out = x.new_zeros(shape)
        self._accumulate(out, grad, x)
        return out.flatten(0, 1)

    def accumulate_wgrad(self, main_grad: torch.Tensor, grad: GroupedRows, x: Input) -> None:
        assert isinstance(x, torch.Tensor)
        if fast(x, grad.rows) or x.is_meta:
            self._add(main_grad, self.wgrad(grad, x))
        else:
            self._accumulate(main_grad.unflatten(0, (len(grad.ends), -1)), grad, x)

    def _accumulate(self, out: torch.Tensor, grad: GroupedRows, x: torch.Tensor) -> None:
        """Add the gradients of all matrices to out [E, out, in]."""
        if x.is_meta:
            out[0].add_(grad.rows.t() @ x)
            return
        for into, rows in zip(out, _runs(grad.ends), strict=True):
            if rows.start == rows.stop:
                continue
            if into.dtype == x.dtype:
                into.addmm_(grad.rows[rows].t(), x[rows])
            else:
                into.add_(grad.rows[rows].t() @ x[rows])


def fast(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether torch's grouped GEMM supports these operands: bf16 on CUDA, with row sizes that are multiples of 16
    bytes."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return x.shape[1] % 8 == 0 and all(size % 8 == 0 for size in other.shape[1:])


def _runs(ends: torch.Tensor) -> Iterator[slice]:
    begin = 0
    for end in ends.tolist():
        yield slice(begin, end)
        begin = end
