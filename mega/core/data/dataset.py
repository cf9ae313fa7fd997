"""Define the dataset protocol, and datasets that do not read token files (random ids, chained and blended datasets)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Dataset(Protocol):
    """The interface of datasets. `dataset[i]`, 0 <= i < len(dataset), is int64 [seq_length + 1], which contains the
    inputs and, shifted by one, the labels.

    A dataset with samples of another type has a method `collate(samples, index of the first sample)`, which builds a
    batch. A dataset that reads many samples faster in one call has a method `samples(entries)`, which returns a
    sequence; slices of this sequence are passed to `collate`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> Any: ...


def samples_of(dataset: Dataset, entries: Sequence[int]) -> Sequence[object]:
    """Return the samples `entries` of a dataset, with one call of the dataset's method `samples` if it has one."""
    samples: Callable[[Sequence[int]], Sequence[object]] | None = getattr(dataset, "samples", None)
    return samples(entries) if samples and entries else [dataset[entry] for entry in entries]


def _samples_of_each(
    datasets: Sequence[Dataset], chosen: NDArray[np.integer], numbers: NDArray[np.integer]
) -> list[object]:
    """Return sample numbers[i] of datasets[chosen[i]] for each i. The samples of each dataset are read together."""
    samples: list[object] = [None] * len(chosen)
    for dataset in np.unique(chosen).tolist():
        positions = (chosen == dataset).nonzero()[0]
        read = samples_of(datasets[dataset], numbers[positions].tolist())
        for position, sample in zip(positions.tolist(), read, strict=True):
            samples[position] = sample
    return samples


def is_blend(dataset: Dataset) -> bool:
    """Return whether a dataset is a blend of several datasets."""
    return isinstance(dataset.built if isinstance(dataset, DeferredDataset) else dataset, BlendedDataset)


class MockDataset:
    """A dataset of random ids below `vocab`, for benchmarks without a corpus. Sample i depends only on (seed, i)."""

    def __init__(self, *, samples: int, seq_length: int, vocab: int, seed: int) -> None:
        self._samples, self._length, self._vocab, self._seed = samples, seq_length + 1, vocab, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        if not 0 <= sample < self._samples:
            raise IndexError(f"no sample {sample}, there are {self._samples}")
        return np.random.default_rng([self._seed, sample]).integers(self._vocab, size=self._length)


class DeferredDataset:
    """A dataset that is built when its length or a sample is first read, for runs that may read neither."""

    def __init__(self, build: Callable[[], Dataset]) -> None:
        self._build = build

    @cached_property
    def built(self) -> Dataset:
        """The dataset itself."""
        return self._build()

    def __len__(self) -> int:
        return len(self.built)

    def __getitem__(self, sample: int) -> object:
        return self.built[sample]


class ChainedDataset:
    """The concatenation of datasets with samples of the same type."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = datasets
        self._ends = np.cumsum([len(dataset) for dataset in datasets])
        self.collate = getattr(datasets[0], "collate", None)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, sample: int) -> object:
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        index = int(np.searchsorted(self._ends, sample, side="right"))
        return self._datasets[index][sample - (int(self._ends[index - 1]) if index else 0)]

    def samples(self, entries: Sequence[int]) -> list[object]:
        chosen = np.searchsorted(self._ends, entries, side="right")
        return _samples_of_each(self._datasets, chosen, np.asarray(entries) - np.append(0, self._ends)[chosen])


class BlendedDataset:
    """A dataset whose sample i is sample numbers[i] of datasets[chosen[i]] (see `order.blend_order`). All datasets have
    samples of the same type."""

    def __init__(
        self, datasets: Sequence[Dataset], dataset_numbers: NDArray[np.integer], numbers: NDArray[np.integer]
    ) -> None:
        assert len(dataset_numbers) == len(numbers)
        self._datasets, self._chosen, self._numbers = datasets, dataset_numbers, numbers
        self.collate = getattr(datasets[0], "collate", None)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, sample: int) -> object:
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        return self._datasets[int(self._chosen[sample])][int(self._numbers[sample])]

    def samples(self, entries: Sequence[int]) -> list[object]:
        return _samples_of_each(self._datasets, self._chosen[np.asarray(entries)], self._numbers[np.asarray(entries)])

    def documents(self, sample: int) -> frozenset[tuple[int, int]]:
        """Return (corpus index, document index) of all documents that contribute tokens to a sample."""
        number, inner = int(self._chosen[sample]), int(self._numbers[sample])
        documents_of: Callable[[int], frozenset[tuple[int, int]]] = getattr(self._datasets[number], "documents")  # noqa: B009
        return documents_of(inner)
