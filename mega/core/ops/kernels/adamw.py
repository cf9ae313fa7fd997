"""AdamW in one pass over a flat span: clipping, moments, master weights and the model's low-precision weights.

The clip factor, the bias corrections, and a flag that decides whether the step is applied are read from device memory,
so the host never waits for the device.
"""

from __future__ import annotations

import torch

from mega.core.ops.kernels.language import cdiv, jit, launch, tl

BLOCK = 2048


@jit
def _adamw(
    master_at, grad_at, moment1_at, moment2_at, weight_at, scalars_at, size, decay_end, lr, decay, beta1, beta2,
    gain1, gain2, eps, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    finite = tl.load(scalars_at)
    if finite != 0:
        factor = tl.load(scalars_at + 1)
        correction1 = tl.load(scalars_at + 2)
        correction2 = tl.load(scalars_at + 3)
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < size
        grad = tl.load(grad_at + offset, mask, 0.0).to(tl.float32) * factor
        moment1 = tl.load(moment1_at + offset, mask, 0.0)
        moment2 = tl.load(moment2_at + offset, mask, 0.0)
        master = tl.load(master_at + offset, mask, 0.0).to(tl.float32)
        moment1 = beta1 * moment1 + gain1 * grad
        moment2 = beta2 * moment2 + gain2 * grad * grad
        # As in torch, the decay is applied before the step, and both are computed from the old master weight.
        shrink = tl.where(offset < decay_end, lr * decay, 0.0)
        step = (moment1 / correction1) / (tl.sqrt(moment2 / correction2) + eps)
        master = master - master * shrink - lr * step
        tl.store(moment1_at + offset, moment1, mask)
        tl.store(moment2_at + offset, moment2, mask)
        tl.store(master_at + offset, master.to(master_at.dtype.element_ty), mask)
        if COPY:
            tl.store(weight_at + offset, master.to(weight_at.dtype.element_ty), mask)


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    weights: torch.Tensor | None,
    scalars: torch.Tensor,
    *,
    decay_end: int,
    lr: float,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Apply one update in place. All tensors are flat and have equal lengths. weights: None if the model's weights are
    `master`, which may then have any dtype.

    scalars: fp32 [4] on the device: 1 to apply the step or 0 to skip it, the clip factor, 1 - beta1^t, and 1 - beta2^t.
    decay_end: weight decay is applied to the elements before this index.
    """
    size = master.numel()
    if size:
        launch(
            _adamw, (cdiv(size, BLOCK),),
            master, grad, moment1, moment2, weights, scalars, size, decay_end, lr, decay, beta1, beta2,
            1 - beta1, 1 - beta2, eps, COPY=weights is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
