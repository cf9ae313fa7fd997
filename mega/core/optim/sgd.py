"""SGD with momentum: v <- momentum v + g + decay p, p <- p - lr v. As torch has it; without momentum v is not kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega.core.optim.rule import Elementwise, StepArgs


@dataclass(frozen=True)
class SGD(Elementwise):
    """The rule's constant. Its decay is a part of the gradient, so it enters the momentum."""

    momentum: float

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("moment1",) if self.momentum else ()

    def update(self, master: torch.Tensor, grad: torch.Tensor, *moments: torch.Tensor, args: StepArgs) -> None:
        direction = grad.add(master, alpha=args.decay)
        for velocity in moments:
            direction = velocity.mul_(self.momentum).add_(direction)
        master.sub_(direction, alpha=args.lr)
