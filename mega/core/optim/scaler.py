"""The dynamic loss scale of fp16, which is halved at overflows and doubled after a number of steps without overflow.

Losses are multiplied by the scale before the backward pass, and gradients are divided by the scale before clipping. The
state is three device scalars, so that the host never has to wait for the result of an overflow check.
"""

from __future__ import annotations

import torch


class LossScaler:
    """A dynamic loss scale. scale: the current factor. clean: number of steps since the last overflow or increase.
    patience: number of overflows until the scale is halved.

    The patience is reset when the scale is doubled, but not when the scale is halved. Once the patience has reached 0,
    every overflow halves the scale.

    >>> scaler = LossScaler(initial=2.0**32, window=3, hysteresis=2)
    >>> seen = []
    >>> for finite in (False, False, False, True, True, True):
    ...     scaler.update(torch.tensor(finite))
    ...     seen.append((int(scaler.scale.log2()), int(scaler.patience)))
    >>> seen
    [(32, 1), (31, 0), (30, -1), (30, -1), (30, -1), (31, 2)]
    """

    def __init__(
        self,
        *,
        initial: float,
        window: int | None = 1000,
        hysteresis: int = 2,
        least: float = 1.0,
        device: torch.device | str = "cpu",
    ):
        self.window, self.hysteresis, self.least = window, hysteresis, least  # the scale is constant if window is None
        self.scale = torch.tensor(initial, dtype=torch.float64, device=device)
        self.clean = torch.tensor(0, device=device)
        self.patience = torch.tensor(hysteresis, device=device)

    def update(self, finite: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Update the scale after a step. finite: bool [], whether all gradients on all ranks were finite. counts: bool
        []; false ignores the step."""
        if self.window is None:
            return
        ignored = torch.zeros_like(finite) if counts is None else ~counts
        self.clean = torch.where(ignored, self.clean, torch.where(finite, self.clean + 1, 0))
        self.patience = torch.where(finite | ignored, self.patience, self.patience - 1)
        backs_off = ~finite & ~ignored & (self.patience <= 0)
        self.scale = torch.where(backs_off, (self.scale / 2).clamp(min=self.least), self.scale)
        grows = self.clean >= self.window  # `clean` may exceed the window if a resume has shortened it
        self.scale = torch.where(grows, self.scale * 2, self.scale)
        self.clean = torch.where(grows, 0, self.clean)
        self.patience = torch.where(grows, self.hysteresis, self.patience)

    @property
    def follows(self) -> bool:
        """Whether the scale is dynamic."""
        return self.window is not None

    @property
    def at_least(self) -> bool:
        """Whether the scale cannot decrease, because it is constant or has reached the minimum. Reading this property
        waits for the device."""
        return self.window is None or bool(self.scale <= self.least)

    def state(self) -> dict[str, float]:
        """Return the state as Python numbers, for a checkpoint."""
        return {"scale": float(self.scale), "clean": int(self.clean), "patience": int(self.patience)}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint, unless the scale is constant."""
        if self.window is None:
            return
        self.scale.fill_(state["scale"])
        self.clean.fill_(int(state["clean"]))
        self.patience.fill_(int(state["patience"]))
