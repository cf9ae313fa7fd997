"""Count the elements that a conversion moves, and check the counts at the end. This module uses only names and sizes of
tensors."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mega.core.checkpoint.own.pieces import CheckpointError


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion."""

    tensors: int
    """Number of tensors written."""
    elements: int
    """Number of elements written. Each element comes from exactly one element of the source."""
    bytes: int
    """Number of bytes written."""
    path: Path
    """The path of the written checkpoint."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    losses: tuple[str, ...] = ()
    """Messages about settings of the source checkpoint that the target format cannot express."""


class Ledger:
    """A count of moved elements per tensor. The store checks that the written rectangles tile their tensors, and each
    rectangle is read from the same position in the source. Therefore, if the counts agree, every element was read and
    written exactly once."""

    def __init__(self, expected: Mapping[str, int]) -> None:
        self.expected = expected
        self._moved: Counter[str] = Counter()
        self._not_finite: set[str] = set()
        self._lock = threading.Lock()

    def moved(self, key: str, elements: int, finite: bool = True) -> None:
        """Count `elements` of the tensor `key`. finite: whether all these elements are finite."""
        with self._lock:
            self._moved[key] += elements
            if not finite:
                self._not_finite.add(key)

    @property
    def notes(self) -> tuple[str, ...]:
        """A message for the user if a moved tensor contains NaN or infinity. Such values are copied unchanged."""
        if not self._not_finite:
            return ()
        first, count = min(self._not_finite), len(self._not_finite) - 1
        suffix = f" and {count} other tensor{'s' * (count > 1)}" if count else ""
        return (f"{first}{suffix} of the source held a NaN or an infinity, and so does what was written",)

    def close(self) -> None:
        """Check the counts. Errors: CheckpointError naming the first tensor that was not moved exactly once."""
        for key in sorted({*self.expected, *self._moved}):
            if self._moved[key] != self.expected.get(key, 0):
                raise CheckpointError(
                    f"{key}: {self._moved[key]} elements were moved, {self.expected.get(key, 0)} are there"
                )
