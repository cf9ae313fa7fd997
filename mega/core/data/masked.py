"""BERT and T5 samples: sentences put together, words masked or taken out. Megatron-LM's, draw for draw.

Every sample has a generator of its own, seeded by seed + its number, and every draw is made where Megatron-LM makes
it. This file knows neither batches nor ranks.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset
from mega.core.text.tokenizer import Roles

if TYPE_CHECKING:
    from mega.core.batch import EncoderDecoderBatch, MaskedBatch
    from mega.core.text.tokenizer import Tokenizer

Ints = NDArray[np.int64]


class BertSample(NamedTuple):
    """int64 [seq_length] each, and two numbers.

    text: with masks, padded; types: 0 for the first part, 1 for the second, padded with the pad id; labels: the true
    id where one is predicted, else -1; loss_mask: 1 there; padding_mask: 1 for tokens; is_random: 1 where the parts
    stand in the wrong order; truncated: 1 where tokens were cut off.
    """

    text: Ints
    types: Ints
    labels: Ints
    loss_mask: Ints
    padding_mask: Ints
    is_random: int
    truncated: int


class T5Sample(NamedTuple):
    """text_enc: int64 [encoder length], spans replaced by sentinels; text_dec, labels, loss_mask: int64 [decoder
    length], the spans after their sentinels, one step apart. Labels are padded with -1."""

    text_enc: Ints
    text_dec: Ints
    labels: Ints
    loss_mask: Ints
    truncated: int


@dataclass(frozen=True)
class Vocabulary:
    """What masking asks of a tokenizer. continues[t]: token t continues the word before it; ids: what a random
    replacement is drawn from."""

    roles: Roles
    continues: NDArray[np.bool_]
    ids: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, rows: int | None = None) -> Vocabulary:
        """rows: of the model's table of tokens, where it may have fewer than the tokenizer has tokens.

        Raises ValueError for a tokenizer that lacks [CLS], [SEP] and [MASK].
        """
        if tokenizer.roles is None:
            raise ValueError(f"--tokenizer {tokenizer.kind}: has no CLS, SEP and MASK, which BERT and T5 need")
        size = min(tokenizer.vocab_size, rows or tokenizer.vocab_size)
        return cls(tokenizer.roles, np.array([tokenizer.continues(i) for i in range(size)]), range(size))


def bert_batch(rows: Sequence[BertSample], first_sample: int, most: int | None = None) -> MaskedBatch:
    """BERT samples as one microbatch whose first row is global sample `first_sample`: a `MaskedBatch`.

    most: tokens that are masked in a row at the most, where that is known.
    """
    import torch

    from mega.core.batch import MaskedBatch

    text, types, labels, weights, padding = (np.stack([row[i] for row in rows]) for i in range(5))
    # The masked ones first.
    predicted = None if most is None else torch.from_numpy(np.argsort(-weights, axis=1, kind="stable")[:, :most])
    assert most is None or weights.sum(axis=1).max() <= most, (weights.sum(axis=1), most)
    return MaskedBatch(
        tokens=torch.from_numpy(text),
        labels=torch.from_numpy(np.maximum(labels, 0)),
        loss_weights=torch.from_numpy(weights.astype(np.float32)),
        types=torch.from_numpy(types),
        lengths=torch.from_numpy(padding.sum(axis=1)),
        pairs=torch.tensor([row.is_random for row in rows]),
        samples=torch.arange(first_sample, first_sample + len(rows)),
        predicted=predicted,
    )


class _Own(threading.local):
    """A generator of each thread's own, since to make one takes longer than all the rest of a sample."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(0)


_own = _Own()


class _Mapped:
    """Sentences of a corpus, sample by sample. mapping: see `mapping.sentence_mapping`."""

    def __init__(self, corpus: IndexedDataset, mapping: NDArray[np.integer], seed: int) -> None:
        self._corpus, self._mapping, self._seed = corpus, mapping, seed

    def __len__(self) -> int:
        return len(self._mapping)

    def _read(self, sample: int) -> tuple[NDArray[np.integer], NDArray[np.integer], int, np.random.RandomState]:
        """Sentences one after another, their lengths, the target length, and the generator until the next call."""
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        first, last, target = self._mapping[sample].tolist()
        _own.generator.seed((self._seed + sample) % 2**32)
        return self._corpus.run(first, last), self._corpus.lengths[first:last], target, _own.generator


class BertDataset(_Mapped):
    """Two parts of a document, in the wrong order half of the time, with masked words. See `bert_sample`."""

    def __init__(
        self,
        corpus: IndexedDataset,
        mapping: NDArray[np.integer],
        vocabulary: Vocabulary,
        *,
        seq_length: int,
        seed: int,
        mask_prob: float = 0.15,
        binary_head: bool = True,
    ) -> None:
        super().__init__(corpus, mapping, seed)
        self._vocabulary, self._length = vocabulary, seq_length
        self._mask_prob, self._binary_head = mask_prob, binary_head

    def __getitem__(self, sample: int) -> BertSample:
        text, lengths, target, generator = self._read(sample)
        return bert_sample(
            text, lengths, target, self._length, self._vocabulary, generator, self._mask_prob, self._binary_head
        )

    def collate(self, rows: Sequence[BertSample], first_sample: int) -> MaskedBatch:
        """As `bert_batch`."""
        return bert_batch(rows, first_sample, max(1, ceil(self._mask_prob * self._length)))


class T5Dataset(_Mapped):
    """Text without some spans, and the spans. See `t5_sample`."""

    def __init__(
        self,
        corpus: IndexedDataset,
        mapping: NDArray[np.integer],
        vocabulary: Vocabulary,
        *,
        seq_length: int,
        decoder_seq_length: int,
        seed: int,
        mask_prob: float = 0.15,
    ) -> None:
        if not vocabulary.roles.sentinels:
            raise ValueError("--vocab-extra-ids 0: must be greater than 0 for T5, which marks spans with them; try 100")
        super().__init__(corpus, mapping, seed)
        self._vocabulary, self._lengths, self._mask_prob = vocabulary, (seq_length, decoder_seq_length), mask_prob

    def __getitem__(self, sample: int) -> T5Sample:
        text, _, target, generator = self._read(sample)
        return t5_sample(text, target, *self._lengths, self._vocabulary, generator, self._mask_prob)

    def collate(self, rows: Sequence[T5Sample], first_sample: int) -> EncoderDecoderBatch:
        """Samples as one microbatch whose first row is global sample `first_sample`: an `EncoderDecoderBatch`."""
        import torch

        from mega.core.batch import EncoderDecoderBatch

        encoder, decoder, labels, weights = (np.stack([row[i] for row in rows]) for i in range(4))
        return EncoderDecoderBatch(
            encoder_tokens=torch.from_numpy(encoder),
            encoder_lengths=torch.from_numpy((encoder != self._vocabulary.roles.pad).sum(axis=1)),
            tokens=torch.from_numpy(decoder),
            labels=torch.from_numpy(np.maximum(labels, 0)),
            loss_weights=torch.from_numpy(weights.astype(np.float32)),
            lengths=torch.from_numpy(weights.sum(axis=1)),
            samples=torch.arange(first_sample, first_sample + len(rows)),
        )


def bert_sample(
    text: NDArray[np.integer],
    lengths: NDArray[np.integer],
    target: int,
    seq_length: int,
    vocabulary: Vocabulary,
    generator: np.random.RandomState,
    mask_prob: float,
    binary_head: bool,
) -> BertSample:
    """[CLS] A [SEP] B [SEP], at most `target` tokens in A and B, some of them masked. lengths: of text's sentences."""
    roles = vocabulary.roles
    first, second, swapped = _halves(text, lengths, generator) if binary_head else (text, text[:0], False)
    first, second = _truncated(first, second, target, generator)
    begin = len(first) + 2  # of the second part
    size = begin + len(second) + (len(second) > 0)
    tokens, types, labels, loss_mask, padding_mask = _rows(seq_length, roles.pad, roles.pad, -1, 0, 0)
    tokens[0], tokens[1 : begin - 1], tokens[begin - 1] = roles.cls, first, roles.sep
    types[:begin] = 0
    if len(second):
        tokens[begin : size - 1], tokens[size - 1] = second, roles.sep
        types[begin:size] = 1
    chosen, instead = mask(tokens[:size], vocabulary, generator, prob=mask_prob, limit=mask_prob * target)
    positions = np.array(chosen, np.int64)
    labels[positions] = tokens[positions]
    tokens[positions] = instead
    loss_mask[positions] = 1
    padding_mask[:size] = 1
    return BertSample(tokens, types, labels, loss_mask, padding_mask, int(swapped), int(len(text) > target))


def t5_sample(
    text: NDArray[np.integer],
    target: int,
    seq_length: int,
    decoder_seq_length: int,
    vocabulary: Vocabulary,
    generator: np.random.RandomState,
    mask_prob: float,
) -> T5Sample:
    """Spans out, a sentinel in: a b c d e with span c d -> encoder a b <0> e; decoder <bos> <0> c d.

    Raises ValueError where the sentinels or the decoder's length do not suffice.
    """
    roles = vocabulary.roles
    tokens = text[:target].astype(np.int64)
    positions, starts = _words(tokens, vocabulary)
    budget = min(mask_prob * target, max(1, round(len(tokens) * mask_prob)))
    spans = sorted(_spans(starts, budget, _geometric_runs(generator).__next__, generator))
    if len(spans) > len(roles.sentinels):
        raise ValueError(f"--vocab-extra-ids {len(roles.sentinels)}: a sample has {len(spans)} spans; raise it")
    words, kept, decoder = tokens[positions].tolist(), np.ones(len(tokens), np.bool_), list[int]()
    for sentinel, (first, last) in zip(roles.sentinels, spans, strict=False):
        decoder.append(sentinel)
        decoder += words[first:last]
        at = positions[first]
        tokens[at] = sentinel
        kept[at + 1 : positions[last - 1] + 1] = False
    encoder, size = tokens[kept], len(decoder) + 1
    if size > decoder_seq_length:
        raise ValueError(f"--decoder-seq-length {decoder_seq_length}: a sample takes {size}; raise it")
    (text_enc,) = _rows(seq_length, roles.pad)
    text_dec, labels, loss_mask = _rows(decoder_seq_length, roles.pad, -1, 0)
    text_enc[: len(encoder)] = encoder
    labels[:size] = [*decoder, roles.eos]
    text_dec[0], text_dec[1:size] = roles.bos, labels[: size - 1]
    loss_mask[:size] = 1
    return T5Sample(text_enc, text_dec, labels, loss_mask, int(len(text) > target))


def _halves(
    text: NDArray[np.integer], lengths: NDArray[np.integer], generator: np.random.RandomState
) -> tuple[NDArray[np.integer], NDArray[np.integer], bool]:
    """The sentences in two runs, exchanged half of the time, and whether they were."""
    pivot = generator.randint(1, len(lengths)) if len(lengths) >= 3 else 1
    cut = int(lengths[:pivot].sum())
    if generator.random_sample() < 0.5:
        return text[cut:], text[:cut], True
    return text[:cut], text[cut:], False


def _truncated(
    first: NDArray[np.integer], second: NDArray[np.integer], target: int, generator: np.random.RandomState
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Both parts without as many tokens, taken from either end of the longer one, as they have above `target`."""
    begin, end, other_begin, other_end = 0, len(first), 0, len(second)
    for at_begin in (generator.random_sample(max(0, end + other_end - target)) < 0.5).tolist():
        if end - begin > other_end - other_begin:
            begin, end = (begin + 1, end) if at_begin else (begin, end - 1)
        else:
            other_begin, other_end = (other_begin + 1, other_end) if at_begin else (other_begin, other_end - 1)
    return first[begin:end], second[other_begin:other_end]


def mask(
    tokens: Ints, vocabulary: Vocabulary, generator: np.random.RandomState, *, prob: float, limit: float
) -> tuple[list[int], list[int]]:
    """Which positions of a BERT sample are masked, and what stands there instead.

    Words are masked in runs of 1 to 3, in random order, until `prob` of the tokens, or `limit`, are masked.
    """
    words, starts = _words(tokens, vocabulary)
    budget = min(limit, max(1, round(len(tokens) * prob)))
    bounds, draw, of_words = _bounds(), generator.random_sample, words.tolist()
    positions, instead = list[int](), list[int]()
    for first, last in _spans(starts, budget, lambda: 1 + bisect_right(bounds, draw()), generator):
        for position in of_words[first:last]:
            positions.append(position)
            # [MASK] in 8 of 10 cases, the token itself in 1, any other in 1.
            if draw() < 0.8:
                instead.append(vocabulary.roles.mask)
            elif draw() < 0.5:
                instead.append(int(tokens[position]))
            else:
                instead.append(vocabulary.ids[generator.randint(0, len(vocabulary.ids))])
    return positions, instead


def _words(tokens: Ints, vocabulary: Vocabulary) -> tuple[Ints, list[int]]:
    """Places of the tokens of words, and where each word begins among them, with their number at the end.

    [CLS] un ##aff a [SEP] -> [1, 2, 3], [0, 2, 3]
    """
    positions = ((tokens != vocabulary.roles.cls) & (tokens != vocabulary.roles.sep)).nonzero()[0]
    begins = ~vocabulary.continues[tokens[positions]]
    begins[:1] = True
    return positions, [*begins.nonzero()[0].tolist(), len(positions)]


def _spans(
    starts: list[int], budget: float, draw: Callable[[], int], generator: np.random.RandomState
) -> Iterator[tuple[int, int]]:
    """Runs of words, as the first of their tokens and the one after the last, as they are chosen in random order.

    starts: as of `_words`; budget: of tokens. draw: for how many words a run is to have, of which those that are
    beyond the budget are left out; a run that meets another is left out wholly.
    """
    order = np.arange(len(starts) - 1)
    generator.shuffle(order)
    ends = starts + starts[-1:] * _MOST
    covered, count = bytearray(starts[-1]), 0
    for word in order.tolist():
        if count + 1 > budget:
            return  # nothing fits any more; the draws that Megatron-LM still makes decide nothing
        run = draw()
        first, last = starts[word], ends[word + run]
        while run > 1 and last - first > budget - count:
            run -= 1
            last = ends[word + run]
        size = last - first
        if count + size > budget or covered.find(1, first, last) >= 0:
            continue
        covered[first:last] = b"\1" * size
        count += size
        yield first, last


_MOST = 10
"""Words of a run, of T5; of BERT 3."""
_DRAWN = 32


def _geometric_runs(generator: np.random.RandomState) -> Iterator[int]:
    """Words of T5's runs: geometric with mean 5, cut at 10. Many are drawn at once: nothing else is between them."""
    while True:
        yield from np.minimum(generator.geometric(0.2, _DRAWN), _MOST).tolist()


@cache
def _bounds() -> list[float]:
    """Of BERT's runs: 1, 2 or 3 words with weights 1 / n."""
    weights = 1.0 / np.arange(1, 4)
    weights /= weights.sum()
    bounds = (weights / weights.sum()).cumsum()
    bounds /= bounds[-1]
    found: list[float] = bounds.tolist()
    return found


def _rows(length: int, *fillers: int) -> Ints:
    """int64 [fillers, length]."""
    rows = np.empty((len(fillers), length), np.int64)
    rows.T[:] = fillers
    return rows
