"""Compute the order in which a corpus is read: splits, the three indices of a GPT dataset, and blends.

The order depends only on lengths, sizes and a seed. All indices are identical to those of Megatron-LM 23.06 or of
Megatron-core 0.18, which rounds splits and blends differently. Both draw random numbers with numpy's legacy generator.
This module does not read files or tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 20
_TOGETHER = 1 << 15  # number of entries in the table for parallel runs, which fits in the processor's cache
_LEAST_RUNS = 8  # fewer parallel runs are not faster than one


def split_shares(split: str) -> tuple[float, float, float]:
    """Parse `split`, such as "969, 30, 1", "90/10" or "1", into shares of training, validation and test that sum to 1.

    Raises ValueError if there are more than three shares, if a share is not a number of at least 0, or if all shares
    are 0.
    """
    parts = re.split("," if "," in split else "/", split)
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = [-1.0]
    if len(shares) > 3 or not all(0 <= share < float("inf") for share in shares) or not sum(shares) > 0:
        raise ValueError(f'--split "{split}": must be up to three numbers of at least 0, such as "969, 30, 1"')
    train, valid, test = [*shares, 0.0, 0.0][:3]  # missing shares are 0
    total = train + valid + test
    return train / total, valid / total, test / total


def split_note(split: str) -> str:
    """Return a message with the normalized shares if the given shares do not sum to 1, 10, 100 or 1000; otherwise "".

    >>> split_note("90,20"), split_note("969, 30, 1")
    ('--split 90,20: sums to 110: training has 81.8%, validation 18.2%, test 0.0% of the documents', '')
    """
    total = sum(float(part) for part in split.replace("/", ",").split(","))
    if total in (1.0, 10.0, 100.0, 1000.0) or "," not in split.replace("/", ","):
        return ""
    train, valid, test = (f"{100 * share:.1f}%" for share in split_shares(split))
    return f"--split {split}: sums to {total:g}: training has {train}, validation {valid}, test {test} of the documents"


def split_boundaries(split: str, items: int, *, core: bool = False) -> tuple[int, int, int, int]:
    """Return the boundaries of training, validation and test among `items` items.

    Each share is rounded (half to even), and training absorbs the difference to `items`:
    "90/10" of 7 -> shares 6.3 and 0.7 -> 0 6 7 7; "949,50,1" of 10 -> 9 + 0 (0.5) + 0 = 9 -> 0 10 10 10.
    core: round cumulative sums of the shares, as in Megatron-core: "949,50,1" of 10 -> 9.49, 9.99, 10 -> 0 9 10 10.
    """
    train, valid, test = split_shares(split)
    if core:
        return 0, round(train * items), round((train + valid) * items), round((train + valid + test) * items)
    bounds = [0]
    for share in (train, valid, test):
        bounds.append(bounds[-1] + round(share * items))
    over = bounds[3] - items
    return 0, bounds[1] - over, bounds[2] - over, bounds[3] - over


def epochs(tokens: int, seq_length: int, samples: int) -> int:
    """Return the minimum number E of passes for `samples` samples: floor((E tokens - 1) / seq_length) >= samples.

    Example: with 44 tokens and sequences of 4, 10 samples need 1 pass (43 // 4 = 10), 11 samples need 2 (87 // 4 = 21).
    """
    return max(1, -(-(samples * seq_length + 1) // tokens))


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples. Sample i consists of the tokens from samples[q] to samples[q + 1], inclusive, with q =
    shuffle[i]."""

    documents: NDArray[np.integer]
    """int32 [epochs * sequences], sequence indices in the order in which they are read."""
    samples: NDArray[np.integer]
    """[n + 1, 2], first token of each row: position in `documents`, and token offset within the sequence at this
    position."""
    shuffle: NDArray[np.integer]
    """[n], row index of each sample."""

    def __len__(self) -> int:
        return len(self.shuffle)


def sample_order(
    lengths: NDArray[np.int32], first: int, last: int, *, seq_length: int, samples: int, seed: int
) -> SampleOrder:
    """Return the order of at least `samples` samples of seq_length + 1 tokens from sequences first .. last - 1.

    If less than 80 % of the last epoch is needed, it is shuffled separately and comes last. If all epochs were shuffled
    together, some documents could be read once more than others early in the run.
    """
    tokens = int(lengths[first:last].sum(dtype=np.int64))
    passes = epochs(tokens, seq_length, samples)
    generator = np.random.RandomState(seed)
    before = ((passes - 1) * tokens - 1) // seq_length
    last_is_separate = passes > 1 and samples - before < int(0.80 * ((tokens - 1) // seq_length))

    documents = _documents(first, last, passes, last_is_separate, generator)
    rows = _rows(lengths, documents, seq_length, (passes * tokens - 1) // seq_length)
    shuffle = _shuffle(len(rows) - 1, before if last_is_separate else len(rows) - 1, generator)
    return SampleOrder(documents, rows, shuffle)


def _documents(
    first: int, last: int, passes: int, separate: bool, generator: np.random.RandomState
) -> NDArray[np.int32]:
    """Return every sequence index once per pass. All passes are shuffled together; if `separate`, the last pass is
    shuffled separately and appended."""
    once = np.arange(first, last, dtype=np.int32)
    parts = [np.tile(once, passes - 1), once] if separate else [np.tile(once, passes)]
    for part in parts:
        generator.shuffle(part)
    return np.concatenate(parts)


def _rows(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], seq_length: int, samples: int
) -> NDArray[np.integer]:
    """Return the position and offset of token i * seq_length of the concatenated documents, for i = 0 .. samples.

    Documents of 5, 0 and 4 tokens, sequences of 4: tokens 0, 4, 8 -> (0, 0) (0, 4) (2, 3).
    """
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    needs_64_bits = max(len(documents), int(lengths.max(initial=0))) >= 2**31
    rows = np.empty((samples + 1, 2), np.int64 if needs_64_bits else np.int32)
    for begin in range(0, samples + 1, _BLOCK):
        targets = np.arange(begin, min(begin + _BLOCK, samples + 1)) * seq_length
        positions = np.searchsorted(ends, targets, side="right")  # the first document that ends after the token
        rows[begin : begin + len(targets), 0] = positions
        starts = np.where(positions > 0, ends[positions - 1], 0)
        rows[begin : begin + len(targets), 1] = targets - starts
    return rows


def _shuffle(count: int, head: int, generator: np.random.RandomState) -> NDArray[np.integer]:
    """Return 0 .. head - 1 in random order, then head .. count - 1 in random order."""
    kind: type[np.integer] = np.uint32 if count < 2**32 - 2 else np.int64
    numbers = np.arange(count, dtype=kind)
    generator.shuffle(numbers[:head])
    if head < count:
        generator.shuffle(numbers[head:])
    return numbers


def blend_shares(weights: Sequence[float]) -> list[float]:
    """Normalize weights to a sum of 1. The sum is computed in a loop, because Python 3.12's `sum` of floats rounds
    differently."""
    total = 0.0
    for weight in weights:
        total += weight
    return [weight / total for weight in weights]


def blend_samples(shares: Sequence[float], samples: int, *, core: bool = False) -> list[int]:
    """Return the number of samples to provide for each dataset of a blend: its share plus half a percent, rounded up.

    1000 samples with shares 0.2, 0.3, 0.5 -> 201, 302, 503. core: as in Megatron-core, the share itself is rounded up
    first.
    """
    if core:
        return [math.ceil(share * 1.005) for share in blend_parts(shares, samples)]
    return [int(np.ceil(samples * share * 1.005)) for share in shares]


def blend_parts(shares: Sequence[float], samples: int) -> list[int]:
    """Return the number of samples of each dataset in a blend, rounded up. The sum is the length of a Megatron-core
    blend."""
    return [math.ceil(samples * share) for share in shares]


def blend_order(weights: Sequence[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return, for each of `size` samples of a blend, the index of the dataset and the index within this dataset.

    The next dataset is the one furthest behind its share; ties are broken by the lower index. Shares 0.2, 0.3, 0.5
    produce the datasets 2 1 0 2 1 2 0 2 1 2 0 2. A shorter order is a prefix of a longer one.
    """
    if len(weights) > 32766:
        raise ValueError(f"a blend of {len(weights)} datasets: must be at most 32766")
    # Megatron-LM divides by numpy's sum here, even if the weights are already normalized.
    shares = np.array(weights, np.float64) / np.sum(weights, dtype=np.float64)
    datasets = _blend_choices(shares, size)
    return datasets, _running_numbers(datasets, len(shares))


def entries_served(dataset_numbers: NDArray[np.int16], numbers: NDArray[np.int64], lengths: Sequence[int]) -> int:
    """Return the number of leading entries of a blend whose index is within their dataset.

    Datasets 0 1 0 0 with sample indices 0 0 1 2 and lengths 2, 5 -> 3.
    """
    beyond = np.flatnonzero(numbers >= np.array(lengths)[dataset_numbers])
    return int(beyond[0]) if len(beyond) else len(dataset_numbers)


def _blend_choices(shares: NDArray[np.float64], size: int) -> NDArray[np.int16]:
    """Return the dataset index of each entry of a blend. The entries are divided into many runs, which are computed in
    parallel.

    Each choice depends on how often each dataset was chosen before. However, a run that starts with nearly correct
    counts soon has exactly correct counts, because the dataset furthest behind its share is always chosen next.

        1 guess    each run starts some steps early, with counts that are rounded shares
        2 advance  all runs take their steps together, as rows of one table
        3 check    a run whose initial counts differ from the previous run's final counts is repeated

    The result is therefore exact for any guess.
    """
    early = 64 + 2 * len(shares)
    runs = min(_TOGETHER // len(shares), size // (4 * early))
    if runs < _LEAST_RUNS:
        return _run(shares, 0, np.zeros(len(shares)), size)[0]
    length = -(-size // runs)
    begins = np.arange(runs) * length
    counts = np.stack([_guess(shares, begin - early) if begin else np.zeros(len(shares)) for begin in begins.tolist()])
    _, counts[1:] = _side_by_side(shares, begins[1:] - early, counts[1:], early)
    choices, ends = _side_by_side(shares, begins, counts, length)
    for run in range(1, runs):
        if (counts[run] != ends[run - 1]).any():
            choices[run], ends[run] = _run(shares, int(begins[run]), ends[run - 1], length)
    return choices.ravel()[:size]


def _guess(shares: NDArray[np.float64], total: int) -> NDArray[np.float64]:
    """Return integer counts with the sum `total`, each within 1 of its share of `total`: 10 with shares 0.25, 0.33,
    0.42 -> 2, 4, 4 (2.5, 3.3, 4.2)."""
    exact = shares * total
    counts = np.floor(exact)
    counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
    return counts


def _run(
    shares: NDArray[np.float64], begin: int, counts: NDArray[np.float64], steps: int
) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Choose datasets for `steps` entries by the rule of `blend_order`, starting at entry `begin` with the counts
    `counts`. Return the choices and the final counts."""
    counts, errors = counts.copy(), np.empty_like(counts)
    choices = np.empty(steps, np.int16)
    for step in range(steps):
        np.multiply(shares, float(max(begin + step, 1)), out=errors)
        np.subtract(errors, counts, out=errors)
        best = int(errors.argmax())
        choices[step] = best
        counts[best] += 1
    return choices, counts


def _side_by_side(
    shares: NDArray[np.float64], begins: NDArray[np.int64], counts: NDArray[np.float64], steps: int
) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Do the work of `_run` for many runs at once. begins: [runs], the first entry of each run. counts: [runs,
    datasets]. Return choices, [runs, steps], and counts, [runs, datasets]."""
    counts, errors = counts.copy(), np.empty_like(counts)
    flat, rows = counts.reshape(-1), np.arange(len(begins)) * len(shares)
    choices = np.empty((steps, len(begins)), np.int16)
    for step in range(steps):
        np.multiply(np.maximum(begins + step, 1)[:, None], shares, out=errors)
        np.subtract(errors, counts, out=errors)
        best = errors.argmax(axis=1)
        choices[step] = best
        flat[rows + best] += 1
    return choices.T, counts


def _running_numbers(dataset_numbers: NDArray[np.int16], datasets: int) -> NDArray[np.int64]:
    """Return, for each entry, the number of earlier occurrences: 2 1 2 2 -> 0 0 1 2."""
    numbers = np.empty(len(dataset_numbers), np.int64)
    before = np.zeros(datasets, np.int64)
    for first in range(0, len(dataset_numbers), _BLOCK):
        block = dataset_numbers[first : first + _BLOCK]
        by_dataset = np.argsort(block, kind="stable")
        sizes = np.bincount(block, minlength=datasets)
        starts = np.cumsum(sizes) - sizes
        numbers[first + by_dataset] = np.arange(len(block)) + np.repeat(before - starts, sizes)
        before += sizes
    return numbers
