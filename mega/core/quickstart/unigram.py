"""The baseline for a model: the frequencies of single tokens in token files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset


def unigram(train: Path, ids: Sequence[int] | NDArray[np.integer], vocab: int) -> float:
    """Mean -ln p of `ids`, where p is their frequency in the token files `train`, with one added to the count of each
    id."""
    counts = np.bincount(IndexedDataset(train).tokens[:], minlength=vocab) + 1.0
    return float(-np.log(counts / counts.sum())[np.asarray(ids)].mean())


def entropy(train: Path) -> float:
    """Entropy of the token files `train` under their own unigram statistics, in nats per token."""
    tokens = IndexedDataset(train).tokens[:]
    return unigram(train, tokens, int(tokens.max()) + 1)
