"""Whether a run on several ranks was that of one process, and how small both may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mega.core.proof.parity import Snapshot, compare, within
from tests.support.runs import SHAPE


def enough(world: int, layout: Mapping[str, Any]) -> dict[str, int]:
    """The layers and the batch that a row needs, since every exchange of ranks that share two cores takes long.

    Without stages two layers show all that more do. Every data rank has two microbatches at least, and twice as many as
    stages, unless these are more than the batch of `small_run` holds.
    """
    size = {"global_batch": enough_samples(world, layout)}
    return size if layout.get("pp", 1) > 1 else {"layers": 2, **size}


def enough_samples(world: int, layout: Mapping[str, Any]) -> int:
    """The batch alone, for models whose layers differ."""
    stages = layout.get("pp", 1)
    data = world // (layout.get("tp", 1) * layout.get("cp", 1) * stages)
    return int(min(SHAPE["global_batch"], max(4, 2 * stages * data * layout.get("micro_batch", 1))))


def same_run(steps: Sequence[int], expected: list[Snapshot], found: list[Snapshot], dtype: str = "fp64") -> None:
    """Losses, gradients and norms at the steps, within the bounds of a proof. Errors: AssertionError."""
    for difference in compare(dtype, steps, expected, found):
        assert within(dtype, difference), difference
    for mine, theirs in zip(expected, found, strict=True):
        assert theirs.grad_norm == pytest.approx(mine.grad_norm, rel=1e-10 if dtype == "fp64" else 1e-4)


def named(value: Any) -> str:
    """A layout, or another parameter, in a test's name."""
    return "-".join(f"{name}={size}" for name, size in value.items()) if isinstance(value, dict) else str(value)
