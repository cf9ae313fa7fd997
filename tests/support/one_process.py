"""Whether a run on several ranks was that of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mega.core.proof.parity import Snapshot, compare, within


def same_run(steps: Sequence[int], expected: list[Snapshot], found: list[Snapshot], dtype: str = "fp64") -> None:
    """Losses, gradients and norms at the steps, within the bounds of a proof. Errors: AssertionError."""
    for difference in compare(dtype, steps, expected, found):
        assert within(dtype, difference), difference
    for mine, theirs in zip(expected, found, strict=True):
        assert theirs.grad_norm == pytest.approx(mine.grad_norm, rel=1e-10 if dtype == "fp64" else 1e-4)


def named(value: Any) -> str:
    """A layout, or another parameter, in a test's name."""
    return "-".join(f"{name}={size}" for name, size in value.items()) if isinstance(value, dict) else str(value)
