"""The dynamic loss scale of fp16: the scale halves at overflows and doubles after a number of steps without an
overflow.

Losses are multiplied by the scale before the backward pass, gradients are divided by it before clipping. The state is
three device scalars, so that the host never waits to learn whether a step overflowed.
"""

from __future__ import annotations

import torch


class LossScaler:
    """scale: the current factor. clean: steps since the last overflow or growth. patience: overflows until the scale
    halves.

    The patience is reset when the scale doubles, not when it halves. Once the patience is used up, every overflow
    halves the scale.

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
        """Update the scale after a step. finite: bool [], whether all gradients of all ranks were finite. counts:
        bool [], false leaves the scale unchanged."""
        if self.window is None:
            return
        ignored = torch.zeros_like(finite) if counts is None else ~counts
        self.clean = torch.where(ignored, self.clean, torch.where(finite, self.clean + 1, 0))
        self.patience = torch.where(finite | ignored, self.patience, self.patience - 1)
        backs_off = ~finite & ~ignored & (self.patience <= 0)
        self.scale = torch.where(backs_off, (self.scale / 2).clamp(min=self.least), self.scale)
        grows = self.clean >= self.window  # `clean` is greater if a run resumes with a shorter window
        self.scale = torch.where(grows, self.scale * 2, self.scale)
        self.clean = torch.where(grows, 0, self.clean)
        self.patience = torch.where(grows, self.hysteresis, self.patience)

    @property
    def follows(self) -> bool:
        """Whether the scale is dynamic."""
        return self.window is not None

    @property
    def at_least(self) -> bool:
        """Whether the scale cannot decrease: it is at its minimum, or constant. Waits for the device."""
        return self.window is None or bool(self.scale <= self.least)

    def state(self) -> dict[str, float]:
        """The state as Python numbers, for a checkpoint."""
        return {"scale": float(self.scale), "clean": int(self.clean), "patience": int(self.patience)}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint; a constant scale is not restored."""
        if self.window is None:
            return
        self.scale.fill_(state["scale"])
        self.clean.fill_(int(state["clean"]))
        self.patience.fill_(int(state["patience"]))
