"""Build fill-in-the-middle samples, in which the middle of a document is moved to the end.

    <prefix> p <suffix> s <middle> m      or, suffix first,      <prefix> <suffix> s <middle> p m

Documents are selected and cut as in Megatron-core's dataset for --fim-data. However, every sample uses a separate
generator, so that a sample depends only on the seed and its index, not on earlier reads. Source of both orders:
Bavarian et al. 2022.
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
    """Ids of the control tokens that mark the parts of a document."""

    prefix: int  # Begins the text before the middle
    middle: int  # Begins the middle
    suffix: int  # Begins the text after the middle
    pad: int  # Pads a sample that has become too short
    eod: int  # Ends a document
    split: int | None = None  # Separates fragments of a document, such as files


@dataclass(frozen=True)
class Infill:
    """The rules for permuting the documents of a sample."""

    tokens: InfillTokens  # Ids of the control tokens
    encode: Callable[[str], Sequence[int]]  # Converts text to ids, without control tokens
    decode: Callable[[Sequence[int]], str]  # Converts ids to text, without control tokens
    rate: float = 0.5  # Probability that a document is permuted
    spm_rate: float = 0.5  # Probability that a permuted document has the suffix first
    fragment_rate: float = 0.5  # Probability that a fragment is permuted, for documents with several fragments
    no_prefix: str | None = None  # Documents that begin with this text are not permuted

    def sample(self, ids: Ids, generator: np.random.RandomState) -> Ids:
        """Permute the documents of a sample. The result is truncated or padded to the sample's original length.

        An empty document is removed together with its end-of-document id.
        """
        parts = _pieces(ids, self.tokens.eod, lambda piece: self._document(piece, generator))
        permuted = np.concatenate(parts)[: len(ids)]
        return np.concatenate([permuted, np.full(len(ids) - len(permuted), self.tokens.pad, np.int64)])

    def _document(self, ids: Ids, generator: np.random.RandomState) -> Ids:
        split = self.tokens.split
        if split is None or not (ids == split).any():
            return self._permuted(ids, self.rate, generator)
        if not generator.binomial(1, self.rate):
            return ids
        return np.concatenate(_pieces(ids, split, lambda piece: self._permuted(piece, self.fragment_rate, generator)))

    def _permuted(self, ids: Ids, rate: float, generator: np.random.RandomState) -> Ids:
        """Cut a text at two random characters, and move the middle to the end, with probability `rate`. Otherwise,
        return the text unchanged."""
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
    """Split ids at the id `end`, and apply `change` to each run that is not empty. All runs except the last are
    followed by `end`."""
    pieces: list[Ids] = []
    begin = 0
    for position in np.flatnonzero(ids == end).tolist():
        if position > begin:
            pieces += [change(ids[begin:position]), np.array([end], np.int64)]
        begin = position + 1
    return [*pieces, change(ids[begin:])]


class InfillDataset:
    """A dataset whose sample i is sample i of `dataset`, permuted with a generator seeded by (seed, i)."""

    def __init__(self, dataset: Dataset, infill: Infill, seed: int) -> None:
        self._dataset, self._infill, self._seed = dataset, infill, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, sample: int) -> Ids:
        generator = np.random.RandomState([self._seed, sample & 0xFFFFFFFF, sample >> 32])
        return self._infill.sample(self._dataset[sample], generator)


def infill_of(data: DataConfig, tokenizer: Tokenizer | None, vocab: int | None) -> Infill | None:
    """Return the `Infill` for the --fim options; None without --fim-data. Errors: ValueError naming the flag."""
    if not data.fim_data:
        return None
    if tokenizer is None:
        raise ValueError("--fim-data: needs a tokenizer, since texts are cut at characters; give --tokenizer")

    def token(flag: str, name: str) -> int:
        token_id = tokenizer.control(name)
        if token_id is None:  # also accept a name that is encoded as a single ordinary token
            ids = tokenizer.encode(name)
            token_id = ids[0] if len(ids) == 1 else None
        if token_id is None or (vocab is not None and token_id >= vocab):
            raise ValueError(f"{flag} {name}: is not one token of {tokenizer.kind}; name one that it has")
        return token_id

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
