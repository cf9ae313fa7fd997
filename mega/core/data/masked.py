"""Build BERT and T5 samples: join sentences, and mask words or replace them with sentinels. All random draws are
identical to Megatron-LM's.

Each sample uses a separate generator, seeded with seed + sample index. A sample therefore does not depend on batches or
ranks.
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
    """A BERT sample: five arrays, int64 [seq_length], and two flags."""

    text: Ints  # Ids of the text with masks, padded
    types: Ints  # 0 for the first part, 1 for the second, padded with the pad id
    labels: Ints  # The true id at predicted positions, else -1
    loss_mask: Ints  # 1 at predicted positions
    padding_mask: Ints  # 1 for tokens, 0 for padding
    is_random: int  # 1 if the two parts are in the wrong order
    truncated: int  # 1 if tokens were cut off


class T5Sample(NamedTuple):
    """A T5 sample: the encoder's text with sentinels in place of spans, and the spans, which the decoder predicts."""

    text_enc: Ints  # int64 [encoder length], the text with sentinels in place of spans
    text_dec: Ints  # int64 [decoder length], the spans, each after its sentinel
    labels: Ints  # int64 [decoder length], `text_dec` shifted by one, padded with -1
    loss_mask: Ints  # int64 [decoder length], 1 for tokens
    truncated: int  # 1 if tokens were cut off


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a tokenizer's vocabulary that masking needs."""

    roles: Roles
    """The control tokens."""
    continues: NDArray[np.bool_]
    """continues[t] is True if token t continues the word of the token before it."""
    ids: Sequence[int]
    """The ids from which random replacements are drawn."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, rows: int | None = None) -> Vocabulary:
        """Return the vocabulary of a tokenizer. rows: number of rows in the model's embedding table, which may be
        smaller than the tokenizer's vocabulary.

        Raises ValueError for a tokenizer that lacks [CLS], [SEP] and [MASK].
        """
        if tokenizer.roles is None:
            raise ValueError(f"--tokenizer {tokenizer.kind}: has no CLS, SEP and MASK, which BERT and T5 need")
        size = min(tokenizer.vocab_size, rows or tokenizer.vocab_size)
        return cls(tokenizer.roles, np.array([tokenizer.continues(i) for i in range(size)]), range(size))


def bert_batch(rows: Sequence[BertSample], first_sample: int, max_masked: int | None = None) -> MaskedBatch:
    """Build a microbatch of BERT samples, whose first row is global sample `first_sample`.

    max_masked: maximum number of masked tokens in a row; None if unknown.
    """
    import torch

    from mega.core.batch import MaskedBatch

    text, types, labels, weights, padding = (np.stack([row[i] for row in rows]) for i in range(5))
    # Positions [b, max_masked] of the masked tokens. A row with fewer masked tokens is filled with unmasked positions
    # of weight 0.
    predicted = (
        None if max_masked is None else torch.from_numpy(np.argsort(-weights, axis=1, kind="stable")[:, :max_masked])
    )
    assert max_masked is None or weights.sum(axis=1).max() <= max_masked, (weights.sum(axis=1), max_masked)
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
    """One generator per thread, because creating a generator takes longer than all other work for a sample."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(0)


_own = _Own()


class _Mapped:
    """Base class of datasets that read the sentences of each sample from a corpus. mapping: see
    `mapping.sentence_mapping`."""

    def __init__(self, corpus: IndexedDataset, mapping: NDArray[np.integer], seed: int) -> None:
        self._corpus, self._mapping, self._seed = corpus, mapping, seed

    def __len__(self) -> int:
        return len(self._mapping)

    def _read(self, sample: int) -> tuple[NDArray[np.integer], NDArray[np.integer], int, np.random.RandomState]:
        """Return the concatenated sentences of a sample, their lengths, the target length, and the sample's generator.
        The generator is valid until the next call."""
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        first, last, target = self._mapping[sample].tolist()
        _own.generator.seed((self._seed + sample) % 2**32)
        return self._corpus.run(first, last), self._corpus.lengths[first:last], target, _own.generator


class BertDataset(_Mapped):
    """BERT samples, each with two parts of a document and masked words. In half of the samples, the parts are in the
    wrong order. See `bert_sample`."""

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
        """See `bert_batch`."""
        return bert_batch(rows, first_sample, max(1, ceil(self._mask_prob * self._length)))


class T5Dataset(_Mapped):
    """T5 samples, each a text with sentinels in place of spans, and the spans. See `t5_sample`."""

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
        """Build a microbatch whose first row is global sample `first_sample`."""
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
    """Build [CLS] A [SEP] B [SEP] with masks. A and B together have at most `target` tokens. lengths: number of tokens
    in each sentence of `text`."""
    roles = vocabulary.roles
    first, second, swapped = _halves(text, lengths, generator) if binary_head else (text, text[:0], False)
    first, second = _truncated(first, second, target, generator)
    begin = len(first) + 2  # position of the second part
    size = begin + len(second) + (len(second) > 0)
    tokens, types, labels, loss_mask, padding_mask = _rows(seq_length, roles.pad, roles.pad, -1, 0, 0)
    tokens[0], tokens[1 : begin - 1], tokens[begin - 1] = roles.cls, first, roles.sep
    types[:begin] = 0
    if len(second):
        tokens[begin : size - 1], tokens[size - 1] = second, roles.sep
        types[begin:size] = 1
    masked_positions, replacements = mask(
        tokens[:size], vocabulary, generator, prob=mask_prob, limit=mask_prob * target
    )
    positions = np.array(masked_positions, np.int64)
    labels[positions] = tokens[positions]
    tokens[positions] = replacements
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
    """Replace spans with sentinels: a b c d e with span c d -> encoder a b <0> e; decoder <bos> <0> c d.

    Raises ValueError if there are too few sentinels, or the decoder's sequence length is too short.
    """
    roles = vocabulary.roles
    tokens = text[:target].astype(np.int64)
    positions, starts = _words(tokens, vocabulary)
    budget = min(mask_prob * target, max(1, round(len(tokens) * mask_prob)))
    spans = sorted(_spans(starts, budget, _geometric_runs(generator).__next__, generator))
    if len(spans) > len(roles.sentinels):
        raise ValueError(f"--vocab-extra-ids {len(roles.sentinels)}: a sample has {len(spans)} spans; raise it")
    words, is_kept, decoder = tokens[positions].tolist(), np.ones(len(tokens), np.bool_), list[int]()
    # tokens   a b  c  d e     span c d
    # becomes  a b <0> d e     is_kept then removes d; the decoder gets <0> c d
    for sentinel, (first, last) in zip(roles.sentinels, spans, strict=False):
        decoder.append(sentinel)
        decoder += words[first:last]
        position = positions[first]
        tokens[position] = sentinel
        is_kept[position + 1 : positions[last - 1] + 1] = False
    encoder, size = tokens[is_kept], len(decoder) + 1
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
    """Divide the sentences into two runs, and exchange the runs with probability 1/2. Return both runs, and whether
    they were exchanged."""
    pivot = generator.randint(1, len(lengths)) if len(lengths) >= 3 else 1
    cut = int(lengths[:pivot].sum())
    if generator.random_sample() < 0.5:
        return text[cut:], text[:cut], True
    return text[:cut], text[cut:], False


def _truncated(
    first: NDArray[np.integer], second: NDArray[np.integer], target: int, generator: np.random.RandomState
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Remove tokens until both parts together have at most `target` tokens. Each token is removed from a random end of
    the longer part."""
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
    """Return the masked positions of a BERT sample, and the ids that replace the tokens at these positions.

    Words are masked in runs of 1 to 3 words, in random order, until `prob` of the tokens, or `limit`, are masked.
    """
    words, starts = _words(tokens, vocabulary)
    budget = min(limit, max(1, round(len(tokens) * prob)))
    bounds, draw, of_words = _bounds(), generator.random_sample, words.tolist()
    positions, replacements = list[int](), list[int]()
    for first, last in _spans(starts, budget, lambda: 1 + bisect_right(bounds, draw()), generator):
        for position in of_words[first:last]:
            positions.append(position)
            # 80 %: [MASK]; 10 %: the token itself; 10 %: a random token.
            if draw() < 0.8:
                replacements.append(vocabulary.roles.mask)
            elif draw() < 0.5:
                replacements.append(int(tokens[position]))
            else:
                replacements.append(vocabulary.ids[generator.randint(0, len(vocabulary.ids))])
    return positions, replacements


def _words(tokens: Ints, vocabulary: Vocabulary) -> tuple[Ints, list[int]]:
    """Return the positions of all tokens that belong to words. Also return, for each word, the index of its first token
    in these positions; the last entry is the number of positions.

    [CLS] un ##aff a [SEP] -> [1, 2, 3], [0, 2, 3]
    """
    positions = ((tokens != vocabulary.roles.cls) & (tokens != vocabulary.roles.sep)).nonzero()[0]
    begins = ~vocabulary.continues[tokens[positions]]
    begins[:1] = True
    return positions, [*begins.nonzero()[0].tolist(), len(positions)]


def _spans(
    starts: list[int], budget: float, draw: Callable[[], int], generator: np.random.RandomState
) -> Iterator[tuple[int, int]]:
    """Yield runs of words in random order. A run is given by the index of its first token and the index after its last
    token.

    starts: from `_words`. budget: maximum number of tokens in all runs. draw: returns a random number of words for a
    run. A run that exceeds the budget is shortened. A run that overlaps an earlier run is dropped.
    """
    order = np.arange(len(starts) - 1)
    generator.shuffle(order)
    ends = starts + starts[-1:] * _MOST
    covered, count = bytearray(starts[-1]), 0
    for word in order.tolist():
        if count + 1 > budget:
            return  # the budget is used up; Megatron-LM's remaining draws have no effect
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
"""Maximum number of words in a T5 run. In BERT, the maximum is 3."""
_DRAWN = 32


def _geometric_runs(generator: np.random.RandomState) -> Iterator[int]:
    """Yield the number of words of each T5 run, from a geometric distribution with mean 5, truncated at 10. The numbers
    are drawn in batches, since no other draws occur between them."""
    while True:
        yield from np.minimum(generator.geometric(0.2, _DRAWN), _MOST).tolist()


@cache
def _bounds() -> list[float]:
    """Return the cumulative probabilities of BERT's runs of n = 1, 2 or 3 words, which have weights 1 / n."""
    weights = 1.0 / np.arange(1, 4)
    weights /= weights.sum()
    bounds = (weights / weights.sum()).cumsum()
    bounds /= bounds[-1]
    cumulative: list[float] = bounds.tolist()
    return cumulative


def _rows(length: int, *fillers: int) -> Ints:
    """Return an array, int64 [fillers, length], whose row i is filled with the value `fillers[i]`."""
    rows = np.empty((len(fillers), length), np.int64)
    rows.T[:] = fillers
    return rows
