"""Compute the baseline for a model from the frequencies of single tokens in token files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset


def unigram(train: Path, ids: Sequence[int] | NDArray[np.integer], vocab: int) -> float:
    """Return the mean of -ln p over `ids`, where p is the relative frequency of an id in the token files `train`, with
    1 added to every count."""
    counts = np.bincount(IndexedDataset(train).tokens[:], minlength=vocab) + 1.0
    return float(-np.log(counts / counts.sum())[np.asarray(ids)].mean())


def entropy(train: Path) -> float:
    """Return the entropy of the token files `train` under their unigram statistics, in nats per token."""
    tokens = IndexedDataset(train).tokens[:]
    return unigram(train, tokens, int(tokens.max()) + 1)
