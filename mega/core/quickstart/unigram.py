"""What a model must beat: the frequencies of single tokens, and nothing else. Reads token files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset


def unigram(train: Path, ids: Sequence[int] | NDArray[np.integer], vocab: int) -> float:
    """Mean -ln p of `ids`, p being their frequencies in the token files `train`, each id counted once more."""
    counts = np.bincount(IndexedDataset(train).tokens[:], minlength=vocab) + 1.0
    return float(-np.log(counts / counts.sum())[np.asarray(ids)].mean())


def entropy(train: Path) -> float:
    """What unigram statistics of the token files `train` leave open about them, nats per token."""
    tokens = IndexedDataset(train).tokens[:]
    return unigram(train, tokens, int(tokens.max()) + 1)
