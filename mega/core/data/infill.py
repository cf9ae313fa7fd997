"""Samples with a part of each document moved to its end, so that a model learns to fill in the middle.

    <prefix> p <suffix> s <middle> m      or, suffix first,      <prefix> <suffix> s <middle> p m

Megatron-core's decisions (its dataset for --fim-data), drawn by a generator of its own for every sample: a sample is a
function of seed and number, independent of what was read before. Source of the two orders: Bavarian et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.config.sections import DataConfig
from mega.core.data.dataset import Dataset
from mega.core.text.tokenizer import Tokenizer

Ids = NDArray[np.int64]


class InfillTokens(NamedTuple):
    """Ids of the tokens that mark the parts. split: what parts the fragments of a document, such as files."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None


@dataclass(frozen=True)
class Infill:
    """How a sample is permuted.

    encode, decode: between text and ids, without control tokens. rate: share of the documents. spm_rate: of those the
    share with the suffix first. fragment_rate: share of the fragments, where a document has several. no_prefix: what
    begins with it stays as it is.
    """

    tokens: InfillTokens
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    rate: float = 0.5
    spm_rate: float = 0.5
    fragment_rate: float = 0.5
    no_prefix: str | None = None

    def sample(self, ids: Ids, generator: np.random.RandomState) -> Ids:
        """A sample of the same length: what becomes too long loses its end, what becomes too short is padded.

        An empty document leaves, with the id that ends it.
        """
        parts = _pieces(ids, self.tokens.eod, lambda piece: self._document(piece, generator))
        found = np.concatenate(parts)[: len(ids)]
        return np.concatenate([found, np.full(len(ids) - len(found), self.tokens.pad, np.int64)])

    def _document(self, ids: Ids, generator: np.random.RandomState) -> Ids:
        split = self.tokens.split
        if split is None or not (ids == split).any():
            return self._permuted(ids, self.rate, generator)
        if not generator.binomial(1, self.rate):
            return ids
        return np.concatenate(_pieces(ids, split, lambda piece: self._permuted(piece, self.fragment_rate, generator)))

    def _permuted(self, ids: Ids, rate: float, generator: np.random.RandomState) -> Ids:
        """A text cut at two characters, with its middle at its end; by one coin as it was."""
        if not generator.binomial(1, rate):
            return ids
        special = set(self.tokens)
        text = self.decode([token for token in ids.tolist() if token not in special])
        if self.no_prefix is not None and text.startswith(self.no_prefix):
            return ids
        first, last = sorted(generator.randint(low=0, high=len(text) + 1, size=2).tolist())
        before, inside, after = (
            np.array(self.encode(part), np.int64) for part in (text[:first], text[first:last], text[last:])
        )
        prefix, middle, suffix = ([token] for token in self.tokens[:3])
        if generator.binomial(1, self.spm_rate):
            return np.concatenate([prefix, suffix, after, middle, before, inside])
        return np.concatenate([prefix, before, suffix, after, middle, inside])


def _pieces(ids: Ids, end: int, change: Callable[[Ids], Ids]) -> list[Ids]:
    """What lies between ids `end`, changed, each with its end but the last; empty ones are left out."""
    found: list[Ids] = []
    begin = 0
    for at in np.flatnonzero(ids == end).tolist():
        if at > begin:
            found += [change(ids[begin:at]), np.array([end], np.int64)]
        begin = at + 1
    return [*found, change(ids[begin:])]


class InfillDataset:
    """Sample i of `dataset`, permuted by a generator of (seed, i)."""

    def __init__(self, dataset: Dataset, infill: Infill, seed: int) -> None:
        self._dataset, self._infill, self._seed = dataset, infill, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, sample: int) -> Ids:
        generator = np.random.RandomState([self._seed, sample & 0xFFFFFFFF, sample >> 32])
        return self._infill.sample(self._dataset[sample], generator)


def infill_of(data: DataConfig, tokenizer: Tokenizer | None, vocab: int | None) -> Infill | None:
    """What --fim-data asks for; None without it. Errors: ValueError naming the flag."""
    if not data.fim_data:
        return None
    if tokenizer is None:
        raise ValueError("--fim-data: needs a tokenizer, since texts are cut at characters; give --tokenizer")

    def token(flag: str, name: str) -> int:
        found = tokenizer.control(name)
        if found is None:
            ids = tokenizer.encode(name)
            found = ids[0] if len(ids) == 1 else None
        if found is None or (vocab is not None and found >= vocab):
            raise ValueError(f"{flag} {name}: is not one token of {tokenizer.kind}; name one that it has")
        return found

    names = ("prefix", "middle", "suffix", "pad", "eod")
    prefix, middle, suffix, pad, eod = (
        token(f"--fim-{name}-token", getattr(data, f"fim_{name}_token")) for name in names
    )
    split = None if data.fim_split_sample is None else token("--fim-split-sample", data.fim_split_sample)
    return Infill(
        InfillTokens(prefix, middle, suffix, pad, eod, split),
        tokenizer.encode,
        tokenizer.decode,
        data.fim_rate,
        data.fim_spm_rate,
        data.fim_fragment_rate,
        data.fim_no_prefix,
    )
