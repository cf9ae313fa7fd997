"""A blend whose weights change in mid-run: every corpus continues where it was, so nothing is lost or read twice.

A run that resumes with another blend has phases: the samples up to the change come from the former blend, as they were
laid out for it, those after it from the new one. What has been read of a corpus in former phases is not read again
before the rest of it is; a corpus that the former layout is too short for is passed over again in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.dataset import BlendedDataset, ChainedDataset, Dataset
from mega.core.data.order import blend_order
from mega.core.untrusted import Json


class BlendPhase(NamedTuple):
    """until: the sample at which the next phase begins. asked: samples that it was laid out for. blend: weight (None:
    by size) and prefix of each corpus."""

    until: int
    asked: int
    blend: Sequence[tuple[float | None, str]]

    def as_json(self) -> dict[str, Json]:
        """For a checkpoint."""
        return {"until": self.until, "asked": self.asked, "blend": [list(each) for each in self.blend]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> BlendPhase:
        """The inverse."""
        return cls(int(found["until"]), int(found["asked"]), [(weight, prefix) for weight, prefix in found["blend"]])


class PhaseLayout(NamedTuple):
    """A phase with what it is drawn from. shares: of each prefix. counts: samples to ask of each."""

    until: int
    prefixes: Sequence[str]
    shares: Sequence[float]
    counts: Sequence[int]


def phased_dataset(layouts: Sequence[PhaseLayout], segment: Callable[[str, int, int], Dataset]) -> Dataset:
    """All phases as one dataset.

    segment: from a prefix, how many samples, and the number of former segments of it, to a dataset of at least as many.
    """
    order = list(dict.fromkeys(prefix for layout in layouts for prefix in layout.prefixes))
    segments: dict[str, list[Dataset]] = {prefix: [] for prefix in order}
    used: Counter[str] = Counter()
    chosen: list[NDArray[np.integer]] = []
    numbers: list[NDArray[np.integer]] = []
    begin = 0
    for layout in layouts:
        for prefix, count in zip(layout.prefixes, layout.counts, strict=True):
            missing = used[prefix] + count - sum(map(len, segments[prefix]))
            if missing > 0:
                segments[prefix].append(segment(prefix, missing, len(segments[prefix])))
        picks, own = blend_order(layout.shares, max(layout.until - begin, 0))
        owners = np.array([order.index(prefix) for prefix in layout.prefixes], np.int16)
        before = np.array([used[prefix] for prefix in layout.prefixes], np.int64)
        chosen.append(owners[picks])
        numbers.append(own + before[picks])
        for prefix, count in zip(layout.prefixes, np.bincount(picks, minlength=len(owners)).tolist(), strict=True):
            used[prefix] += count
        begin = max(layout.until, begin)
    chains: list[Dataset] = [ChainedDataset(segments[prefix]) for prefix in order]
    return BlendedDataset(chains, np.concatenate(chosen), np.concatenate(numbers))
