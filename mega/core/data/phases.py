"""Read a blend whose weights change during the run. After a change, each corpus is read from its current position
onward, so that no sample is lost or repeated.

A run that resumes with a different blend has several phases. The samples before the change come from the earlier blend,
in their original order; later samples come from the new blend. In the next pass over a corpus, samples that earlier
phases have read come last. If a corpus has too few samples for the original order, it is reshuffled for another pass.
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
    """The part of a training run that reads one blend."""

    until: int
    """Index of the sample at which the next phase begins."""
    asked: int
    """Number of samples for which the blend was planned."""
    blend: Sequence[tuple[float | None, str]]
    """Weight and prefix of each corpus. If the weight is None, the share is proportional to the size of the corpus."""

    def as_json(self) -> dict[str, Json]:
        """Return the phase as it is stored in a checkpoint."""
        return {"until": self.until, "asked": self.asked, "blend": [list(each) for each in self.blend]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> BlendPhase:
        """Restore a phase from the result of `as_json`."""
        return cls(
            int(content["until"]), int(content["asked"]), [(weight, prefix) for weight, prefix in content["blend"]]
        )


class PhaseLayout(NamedTuple):
    """A phase and its corpora."""

    until: int  # Index of the sample at which the next phase begins
    prefixes: Sequence[str]  # Prefix of each corpus
    shares: Sequence[float]  # Share of each corpus
    counts: Sequence[int]  # Number of samples to reserve in each corpus


def phased_dataset(layouts: Sequence[PhaseLayout], segment: Callable[[str, int, int], Dataset]) -> Dataset:
    """Concatenate all phases.

    segment: function (prefix, number of samples, number of earlier segments of this prefix) -> a dataset with at least
    this number of samples.
    """
    order = list(dict.fromkeys(prefix for layout in layouts for prefix in layout.prefixes))
    segments: dict[str, list[Dataset]] = {prefix: [] for prefix in order}
    used: Counter[str] = Counter()
    dataset_numbers: list[NDArray[np.integer]] = []
    numbers: list[NDArray[np.integer]] = []
    begin = 0
    for layout in layouts:
        for prefix, count in zip(layout.prefixes, layout.counts, strict=True):
            missing = used[prefix] + count - sum(map(len, segments[prefix]))
            if missing > 0:
                segments[prefix].append(segment(prefix, missing, len(segments[prefix])))
        picks, dataset_samples = blend_order(layout.shares, max(layout.until - begin, 0))
        owners = np.array([order.index(prefix) for prefix in layout.prefixes], np.int16)
        samples_used = np.array([used[prefix] for prefix in layout.prefixes], np.int64)
        dataset_numbers.append(owners[picks])
        numbers.append(dataset_samples + samples_used[picks])
        for prefix, count in zip(layout.prefixes, np.bincount(picks, minlength=len(owners)).tolist(), strict=True):
            used[prefix] += count
        begin = max(layout.until, begin)
    chains: list[Dataset] = [ChainedDataset(segments[prefix]) for prefix in order]
    return BlendedDataset(chains, np.concatenate(dataset_numbers), np.concatenate(numbers))
