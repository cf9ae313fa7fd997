"""What a conversion moves: counted while it runs, checked when it is done. Knows tensors by name and size only."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mega.core.checkpoint.own.pieces import CheckpointError


@dataclass(frozen=True)
class ConversionReport:
    """What was made: tensors, elements (each with one origin), bytes, and where. notes: lines for the user.

    losses: lines on what the source says and the form that was written has no place for.
    """

    tensors: int
    elements: int
    bytes: int
    path: Path
    notes: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()


class Ledger:
    """Counts what is moved. Target rectangles tile their tensors (the store sees to that), and each is read
    from the source at its own place: where the counts agree, every element was read and written once."""

    def __init__(self, expected: Mapping[str, int]) -> None:
        self.expected = expected
        self._moved: Counter[str] = Counter()
        self._not_finite: set[str] = set()
        self._lock = threading.Lock()

    def moved(self, key: str, elements: int, finite: bool = True) -> None:
        """finite: whether all of them are."""
        with self._lock:
            self._moved[key] += elements
            if not finite:
                self._not_finite.add(key)

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for the user where tensors that were moved hold a NaN or an infinity, which are copied as they are."""
        if not self._not_finite:
            return ()
        first, others = min(self._not_finite), len(self._not_finite) - 1
        more = f" and {others} other tensor{'s' * (others > 1)}" if others else ""
        return (f"{first}{more} of the source held a NaN or an infinity, and so does what was written",)

    def close(self) -> None:
        """Errors: CheckpointError naming the first tensor that was not moved exactly once."""
        for key in sorted({*self.expected, *self._moved}):
            if self._moved[key] != self.expected.get(key, 0):
                raise CheckpointError(
                    f"{key}: {self._moved[key]} elements were moved, {self.expected.get(key, 0)} are there"
                )
