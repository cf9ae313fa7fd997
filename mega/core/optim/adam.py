"""AdamW on one flat span: p <- p - lr (m / (sqrt v + eps) + decay p), moments bias-corrected.

Source: Loshchilov and Hutter 2019, in the form of torch and apex. Each function is elementwise, so where a span
begins and ends changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdamW:
    """The rule's constants."""

    beta1: float
    beta2: float
    eps: float

    def update(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        moment1: torch.Tensor,
        moment2: torch.Tensor,
        *,
        step: int,
        lr: float,
        decay: float,
    ) -> None:
        """One update in place; all tensors flat, of one length and dtype. `step` counts from 1."""
        if master.numel() == 0:
            return
        torch._fused_adamw_(
            [master],
            [grad],
            [moment1],
            [moment2],
            [],
            [torch.tensor(float(step), dtype=torch.float32, device=master.device)],
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def reference(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        moment1: torch.Tensor,
        moment2: torch.Tensor,
        *,
        step: int,
        lr: float,
        decay: float,
    ) -> None:
        """The same in plain steps."""
        moment1.mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
        moment2.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        first = moment1 / (1 - self.beta1**step)
        second = moment2 / (1 - self.beta2**step)
        master.sub_(lr * (first / (second.sqrt() + self.eps) + decay * master))
