"""AdamW: p <- p - lr (m / (sqrt v + eps) + decay p), with bias-corrected moments m and v.

Source: Loshchilov and Hutter 2019, as implemented in torch and apex.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega.core.optim.rule import Elementwise, StepArgs


@dataclass(frozen=True)
class AdamW(Elementwise):
    """AdamW with its constants."""

    beta1: float
    """Decay of the first moment, the mean of gradients."""
    beta2: float
    """Decay of the second moment, the mean of squared gradients."""
    eps: float
    """Constant that is added to the root of the second moment."""
    plain: bool = False
    """Whether to use `reference` instead of torch's fused kernel."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return "moment1", "moment2"

    def update(self, master: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor, args: StepArgs) -> None:
        if self.plain:
            return self.reference(master, grad, *moments, args=args)
        if master.numel() == 0:
            return
        moment1, moment2 = moments
        torch._fused_adamw_(
            [master],
            [grad],
            [moment1],
            [moment2],
            [],
            [torch.tensor(float(args.step), dtype=torch.float32, device=master.device)],
            lr=args.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=args.decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def reference(self, master: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor, args: StepArgs) -> None:
        """Update the weights with AdamW in unfused torch operations."""
        direction = self.direction(grad, *moments, step=args.step)
        master.sub_(args.lr * (direction + args.decay * master))

    def direction(self, grad: torch.Tensor, moment1: torch.Tensor, moment2: torch.Tensor, *, step: int) -> torch.Tensor:
        """Update the moments with a gradient, and return Adam's update without the learning rate and weight decay."""
        moment1.mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
        moment2.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        first = moment1 / (1 - self.beta1**step)
        second = moment2 / (1 - self.beta2**step)
        return first.div_(second.sqrt_().add_(self.eps))
