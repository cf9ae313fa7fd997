"""SGD with momentum, as in torch: v <- momentum v + g + decay p, p <- p - lr v. Without momentum, v = g + decay p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega.core.optim.rule import Elementwise, StepArgs


@dataclass(frozen=True)
class SGD(Elementwise):
    """SGD with momentum. The decay is added to the gradient, so the momentum also contains the decay."""

    momentum: float

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("moment1",) if self.momentum else ()

    def update(self, master: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor, args: StepArgs) -> None:
        direction = grad.add(master, alpha=args.decay)
        for velocity in moments:
            direction = velocity.mul_(self.momentum).add_(direction)
        master.sub_(direction, alpha=args.lr)
