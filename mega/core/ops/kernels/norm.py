"""Residual addition and norm in Triton, with one kernel for the forward pass and one for the backward pass.

In the forward pass, a program handles one row. In the backward pass, a program handles every n-th row and sums the
gradients of weight, bias and branch bias over these rows. Each program writes its sums to one row of small tables,
which are summed at the end.
"""

from __future__ import annotations

import torch

from mega.core.device import multiprocessors
from mega.core.ops import norm
from mega.core.ops.autograd import FunctionContext
from mega.core.ops.counter import RULE
from mega.core.ops.dropout import Dropout
from mega.core.ops.fused_casts import with_largest
from mega.core.ops.kernels.dropout import dropped, values_of
from mega.core.ops.kernels.fp8 import MAXIMA, new_largest, update_largest
from mega.core.ops.kernels.language import jit, launch, next_power_of_2, tl
from mega.core.ops.kernels.sums import deliver_sums

STAGES = 3
"""Number of rows whose loads are in flight in the backward pass while one row is computed."""


@jit
def _norm_forward(
    x_at, branch_at, branch_bias_at, weight_at, bias_at, sum_at, normed_at, mean_at, rstd_at, largest_at, drop, width,
    eps,
    BRANCH: tl.constexpr, BRANCH_BIAS: tl.constexpr, CENTRED: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
    KEPT: tl.constexpr, OFFSET: tl.constexpr, MEASURES: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Add the branch and normalise one row. KEPT: whether to store mean and rstd for the backward pass. OFFSET: whether
    the factor is weight + 1. MEASURES: whether to update the largest magnitude of the normalised rows."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    mask = offset < width
    x = tl.load(x_at + row * width + offset, mask, 0.0).to(tl.float32)
    if BRANCH:
        branch = tl.load(branch_at + row * width + offset, mask, 0.0).to(tl.float32)
        if BRANCH_BIAS:
            branch += tl.load(branch_bias_at + offset, mask, 0.0).to(tl.float32)
        if DROP:
            branch = dropped(branch, drop, row, offset)
        x += branch
        # The norm must use the rounded sum, because the backward pass reads the rounded sum.
        x = x.to(sum_at.dtype.element_ty)
        tl.store(sum_at + row * width + offset, x, mask)
        x = x.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 0) / width
        x = tl.where(mask, x - mean, 0.0)
        if KEPT:
            tl.store(mean_at + row, mean)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if KEPT:
        tl.store(rstd_at + row, rstd)
    weight = tl.load(weight_at + offset, mask, 0.0).to(tl.float32)
    if OFFSET:
        weight += 1.0
    y = x * rstd * weight
    if CENTRED:
        y += tl.load(bias_at + offset, mask, 0.0).to(tl.float32)
    y = y.to(normed_at.dtype.element_ty)
    tl.store(normed_at + row * width + offset, y, mask)
    if MEASURES:
        update_largest(largest_at, tl.where(mask, tl.abs(y.to(tl.float32)), 0.0), tl.program_id(0), MAXIMA)


@jit
def _norm_backward(
    x_at, weight_at, mean_at, rstd_at, grad_sum_at, grad_normed_at, grad_at, grad_branch_at, sums_at, largest_at, drop,
    rows, width, programs,
    RESIDUAL: tl.constexpr, BRANCH_BIAS: tl.constexpr, CENTRED: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr, MEASURES: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    program, offset = tl.program_id(0), tl.arange(0, BLOCK)
    mask = offset < width
    weight = tl.load(weight_at + offset, mask, 0.0).to(tl.float32)
    if OFFSET:
        weight += 1.0
    grad_weight, grad_bias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    grad_branch, top = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    # Each program handles a fixed set of rows in a fixed order, so the sums do not depend on scheduling.
    for number in tl.range(program, rows, programs, num_stages=STAGES):
        row = tl.cast(number, tl.int64)
        x = tl.load(x_at + row * width + offset, mask, 0.0).to(tl.float32)
        dy = tl.load(grad_normed_at + row * width + offset, mask, 0.0).to(tl.float32)
        rstd = tl.load(rstd_at + row)
        if CENTRED:
            x = tl.where(mask, x - tl.load(mean_at + row), 0.0)
            grad_bias += dy
        x *= rstd
        grad_weight += dy * x
        dy *= weight
        dx = dy - x * (tl.sum(x * dy, 0) / width)
        if CENTRED:
            dx -= tl.sum(dy, 0) / width
        dx *= rstd
        if RESIDUAL:
            dx += tl.load(grad_sum_at + row * width + offset, mask, 0.0).to(tl.float32)
        tl.store(grad_at + row * width + offset, dx.to(grad_at.dtype.element_ty), mask)
        if DROP:
            dx = dropped(dx, drop, row, offset)
            tl.store(grad_branch_at + row * width + offset, dx.to(grad_branch_at.dtype.element_ty), mask)
        if MEASURES:
            top = tl.maximum(top, tl.abs(dx))
        if BRANCH_BIAS:
            grad_branch += tl.where(mask, dx, 0.0)
    if MEASURES:  # rounding is monotonic, so the largest magnitude may be rounded instead of all magnitudes
        top = tl.where(mask, top.to(grad_branch_at.dtype.element_ty).to(tl.float32), 0.0)
        update_largest(largest_at, top, program, MAXIMA)
    part = sums_at + program * width + offset
    tl.store(part, grad_weight, mask)
    if CENTRED:
        tl.store(part + programs * width, grad_bias, mask)
    if BRANCH_BIAS:
        tl.store(part + 2 * programs * width, grad_branch, mask)


def _shape(width: int) -> tuple[int, int]:
    """Return the number of elements and warps of a program. A thread handles 16 elements of a row, or more if the row
    is long."""
    block = next_power_of_2(width)
    return block, min(8, max(1, block // 512))


def _forward(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    drop: Dropout | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    measures: bool,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward kernel. mean, rstd: outputs fp32 [rows] for the backward pass, or None."""
    assert x.is_contiguous() and (branch is None or branch.is_contiguous())
    width = x.shape[-1]
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=weight.dtype)
    largest = new_largest(x.device) if measures else None
    block, warps = _shape(width)
    launch(
        _norm_forward, (x.numel() // width,),
        x, branch, branch_bias, weight, bias, total, normed, mean, rstd, largest, values_of(drop), width, eps,
        BRANCH=branch is not None, BRANCH_BIAS=branch_bias is not None, CENTRED=bias is not None,
        DROP=drop is not None, BLOCK=block, KEPT=rstd is not None, OFFSET=offset, MEASURES=measures, MAXIMA=MAXIMA,
        num_warps=warps,
    )  # fmt: skip
    return total, normed if largest is None else with_largest(normed, largest)


_NormState = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor | None, Dropout | None, torch.dtype | None, bool, bool
]
"""State for the backward pass: (weight, bias, the branch's bias, dropout, the branch's dtype, whether the factor is
weight + 1, whether to measure the branch's gradient)."""


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[_NormState],
        x: torch.Tensor,
        branch: torch.Tensor | None,
        branch_bias: torch.Tensor | None,
        drop: Dropout | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        offset: bool,
        measures: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, rstd = torch.empty(2, x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
        total, normed = _forward(x, branch, branch_bias, drop, weight, bias, eps, offset, measures, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, mean, rstd)
        ctx.state = weight, bias, branch_bias, drop, None if branch is None else branch.dtype, offset, measures
        return total, normed

    @staticmethod
    def backward(
        ctx: FunctionContext[_NormState], grad_sum: torch.Tensor | None, grad_normed: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, mean, rstd = ctx.saved_tensors
        weight, bias, branch_bias, drop, branch_dtype, offset, measures = ctx.state
        assert grad_normed is not None, "the norm itself is always used"
        width = x.shape[-1]
        rows = x.numel() // width
        block, warps = _shape(width)
        programs = min(rows, multiprocessors(x.device) * (4 if warps < 4 else 2))
        grad, grad_branch = torch.empty_like(x), None
        if branch_dtype is not None:
            grad_branch = torch.empty_like(x, dtype=branch_dtype) if drop is not None else grad
        largest = new_largest(x.device) if measures and grad_branch is not None else None
        sums = torch.empty(3, programs, width, dtype=torch.float32, device=x.device)
        launch(
            _norm_backward, (programs,),
            x, weight, mean, rstd, None if grad_sum is None else grad_sum.contiguous(), grad_normed.contiguous(),
            grad, grad_branch, sums, largest, values_of(drop), rows, width, programs,
            RESIDUAL=grad_sum is not None, BRANCH_BIAS=branch_bias is not None, CENTRED=bias is not None,
            DROP=drop is not None, BLOCK=block, STAGES=STAGES, OFFSET=offset, MEASURES=largest is not None,
            MAXIMA=MAXIMA, num_warps=warps,
        )  # fmt: skip
        if largest is not None and grad_branch is not None:
            with_largest(grad_branch, largest)
        grad_weight, grad_bias, grad_branch_bias = deliver_sums((weight, bias, branch_bias), sums)
        return grad, grad_branch, grad_branch_bias, None, grad_weight, grad_bias, None, None, None


def add_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    drop: Dropout | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    form: norm.NormForm = norm.USUAL,
    *,
    measures: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `ops.norm.add_norm`. The sum is rounded only once, whereas plain torch rounds after each addition. The
    norm is also rounded only once, in every variant. measures: whether to attach their largest magnitudes to the norm
    and to the gradient of the branch."""
    if drop is not None and drop.rule != RULE:
        x, branch, branch_bias, drop = norm.added(x, branch, branch_bias, drop), None, None, None
    x = x.contiguous()
    if not torch.is_grad_enabled():  # skip autograd, whose overhead exceeds that of a launch
        return _forward(x, branch, branch_bias, drop, weight, bias, eps, form.offset, measures)
    return _AddNorm.apply(x, branch, branch_bias, drop, weight, bias, eps, form.offset, measures)  # type: ignore[no-any-return]
