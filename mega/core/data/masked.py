"""Build BERT and T5 samples: join sentences, and mask words or replace them with sentinels. All random draws are
identical to Megatron-LM's; see masking.py, which makes them.

Rows of many samples are filled together, because the operations per sample take most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset
from mega.core.data.masking import (
    BertDraws,
    Ints,
    Stream,
    Vocabulary,
    WordIndex,
    choose_words,
    ranges,
    with_enough,
)
from mega.core.text.tokenizer import Roles

if TYPE_CHECKING:
    from mega.core.batch import EncoderDecoderBatch, MaskedBatch

Sample = TypeVar("Sample")

_stream = Stream()


def _row(rows: Ints, number: int) -> Ints:
    row: Ints = rows[number]
    return row


class BertSample(NamedTuple):
    """A BERT sample."""

    rows: Ints  # int64 [5, seq_length], the five properties below
    is_random: int  # 1 if the two parts are in the wrong order
    truncated: int  # 1 if tokens were cut off

    @property
    def text(self) -> Ints:
        """Ids of the text with masks, padded."""
        return _row(self.rows, 0)

    @property
    def types(self) -> Ints:
        """0 for the first part, 1 for the second, padded with the pad id."""
        return _row(self.rows, 1)

    @property
    def labels(self) -> Ints:
        """The true id at predicted positions, else -1."""
        return _row(self.rows, 2)

    @property
    def loss_mask(self) -> Ints:
        """1 at predicted positions."""
        return _row(self.rows, 3)

    @property
    def padding_mask(self) -> Ints:
        """1 for tokens, 0 for padding."""
        return _row(self.rows, 4)


class T5Sample(NamedTuple):
    """A T5 sample: the encoder's text with sentinels in place of spans, and the spans, which the decoder predicts."""

    text_enc: Ints  # int64 [encoder length], the text with sentinels in place of spans
    rows: Ints  # int64 [3, decoder length], the three properties below
    truncated: int  # 1 if tokens were cut off

    @property
    def text_dec(self) -> Ints:
        """The spans, each after its sentinel."""
        return _row(self.rows, 0)

    @property
    def labels(self) -> Ints:
        """`text_dec` shifted by one, padded with -1."""
        return _row(self.rows, 1)

    @property
    def loss_mask(self) -> Ints:
        """1 for tokens."""
        return _row(self.rows, 2)


def bert_batch(rows: Sequence[BertSample], first_sample: int, max_masked: int | None = None) -> MaskedBatch:
    """Build a microbatch of BERT samples, whose first row is global sample `first_sample`.

    max_masked: maximum number of masked tokens in a row; None if unknown.
    """
    import torch

    from mega.core.batch import MaskedBatch

    text, types, labels, weights, padding = np.stack([row.rows for row in rows], 1)
    # Positions [b, max_masked] of the masked tokens. A row with fewer masked tokens is filled with unmasked positions
    # of weight 0.
    predicted = (
        None if max_masked is None else torch.from_numpy(np.argsort(weights < 1, axis=1, kind="stable")[:, :max_masked])
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


class Texts(NamedTuple):
    """The sentences of many samples, consecutively. `bounds` and `sentences` have one more entry for the end."""

    ids: NDArray[np.integer]
    bounds: list[int]  # The first id of each sentence
    sentences: list[int]  # The first sentence of each sample
    targets: list[int]  # The target length of each sample
    seeds: list[int]  # The seed of each sample's stream

    @property
    def begins(self) -> list[int]:
        """The first id of each sample, and the number of ids."""
        return [self.bounds[number] for number in self.sentences]


class _Mapped(Generic[Sample]):
    """Base class of datasets that read the sentences of each sample from a corpus. mapping: see
    `mapping.sentence_mapping`."""

    def __init__(self, corpus: IndexedDataset, mapping: NDArray[np.integer], seed: int) -> None:
        self._corpus, self._mapping, self._seed = corpus, mapping, seed

    def __len__(self) -> int:
        return len(self._mapping)

    def __getitem__(self, sample: int) -> Sample:
        return self.samples([sample])[0]

    def samples(self, entries: Sequence[int]) -> list[Sample]:
        """Return the samples `entries`. Many at once take less time than each alone."""
        raise NotImplementedError

    def _read(self, entries: Sequence[int]) -> Texts:
        numbers = np.asarray(entries, np.int64)
        if len(wrong := numbers[(numbers < 0) | (numbers >= len(self))]):
            raise IndexError(f"no sample {wrong[0]}, there are {len(self)}")
        first, last, targets = self._mapping[numbers].T.astype(np.int64)
        lengths = self._corpus.lengths[ranges(first, last - first)]
        return Texts(
            ids=np.concatenate(self._corpus.runs(first, last)),
            bounds=[0, *lengths.cumsum(dtype=np.int64).tolist()],
            sentences=[0, *(last - first).cumsum().tolist()],
            targets=targets.tolist(),
            seeds=[(self._seed + number) % 2**32 for number in numbers.tolist()],
        )


class BertDataset(_Mapped[BertSample]):
    """BERT samples, each with two parts of a document and masked words. In half of the samples, the parts are in the
    wrong order. See `bert_samples`."""

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

    def samples(self, entries: Sequence[int]) -> list[BertSample]:
        return bert_samples(
            self._read(entries),
            self._length,
            self._vocabulary,
            mask_prob=self._mask_prob,
            binary_head=self._binary_head,
        )

    def collate(self, rows: Sequence[BertSample], first_sample: int) -> MaskedBatch:
        """See `bert_batch`."""
        return bert_batch(rows, first_sample, max(1, ceil(self._mask_prob * self._length)))


class T5Dataset(_Mapped[T5Sample]):
    """T5 samples, each a text with sentinels in place of spans, and the spans. See `t5_samples`."""

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

    def samples(self, entries: Sequence[int]) -> list[T5Sample]:
        return t5_samples(self._read(entries), *self._lengths, self._vocabulary, mask_prob=self._mask_prob)

    def collate(self, rows: Sequence[T5Sample], first_sample: int) -> EncoderDecoderBatch:
        """Build a microbatch whose first row is global sample `first_sample`."""
        import torch

        from mega.core.batch import EncoderDecoderBatch

        encoder = np.stack([row.text_enc for row in rows])
        decoder, labels, weights = np.stack([row.rows for row in rows], 1)
        return EncoderDecoderBatch(
            encoder_tokens=torch.from_numpy(encoder),
            encoder_lengths=torch.from_numpy((encoder != self._vocabulary.roles.pad).sum(axis=1)),
            tokens=torch.from_numpy(decoder),
            labels=torch.from_numpy(np.maximum(labels, 0)),
            loss_weights=torch.from_numpy(weights.astype(np.float32)),
            lengths=torch.from_numpy(weights.sum(axis=1)),
            samples=torch.arange(first_sample, first_sample + len(rows)),
        )


def bert_samples(
    texts: Texts, seq_length: int, vocabulary: Vocabulary, *, mask_prob: float, binary_head: bool
) -> list[BertSample]:
    """Build [CLS] A [SEP] B [SEP] with masks. A and B together have at most as many tokens as the sample's target.

    Words are masked in runs of 1 to 3 words, in random order, until `mask_prob` of the tokens are masked.
    """
    kinds = vocabulary.kinds[texts.ids].tobytes()
    ascending = np.arange(len(kinds))

    def attempt(draws: int) -> list[BertSample]:
        pairs, orders, words = list[_Pair](), list[Ints](), WordIndex()
        outputs = np.empty((len(texts.targets), draws), np.uint64)
        for i, (seed, target) in enumerate(zip(texts.seeds, texts.targets, strict=True)):
            _stream.seed(seed)
            bounds = texts.bounds[texts.sentences[i] : texts.sentences[i + 1] + 1]
            pair = _pair(bounds, target, binary_head)
            pairs.append(pair)
            first, end = words.add(kinds[pair[0] : pair[1]] + kinds[pair[2] : pair[3]])
            orders.append(_stream.shuffled(ascending[first:end]))
            outputs[i] = _stream.raw(draws)
        filled = _filled(texts, pairs, seq_length, vocabulary.roles)
        _mask(filled, words, orders, BertDraws(outputs, vocabulary), texts.targets, vocabulary, mask_prob)
        swapped, truncated = (pair[4] for pair in pairs), (np.diff(texts.begins) > texts.targets).astype(int)
        return list(map(BertSample, filled.swapaxes(0, 1), swapped, truncated.tolist()))

    return with_enough(attempt, 40 + ceil(4.5 * mask_prob * max(texts.targets)))


_Pair = tuple[int, int, int, int, int]
"""The two parts of a sample: the first id of each in `Texts.ids` and the id after its last, and 1 if the parts were
exchanged."""


def _pair(bounds: list[int], target: int, binary_head: bool) -> _Pair:
    """Divide the sentences into two runs, exchange the runs with probability 1/2, and remove tokens until both have at
    most `target` tokens together. Without binary_head, the second part is empty.

    Each token is removed from a random end of the longer part; of the second part if both are equally long.
    bounds: the first id of each sentence, and the id after the last sentence.
    """
    excess = max(bounds[-1] - bounds[0] - target, 0)
    first, first_end, second, second_end, swapped = bounds[0], bounds[-1], bounds[-1], bounds[-1], 0
    if binary_head:
        first_end = second = bounds[1 + _stream.below(len(bounds) - 2)]
    coins = _stream.coins(binary_head + excess)
    if binary_head and (swapped := coins[0]):
        first, first_end, second, second_end = second, second_end, first, first_end
    if excess:
        at_begin = coins[binary_head:]
        # The longer part loses tokens until both are equally long; then the second, the first, the second, ...
        longer = first_end - first - (second_end - second)
        alone, in_turn = at_begin[: abs(longer)], at_begin[abs(longer) :]
        of_first, of_second = in_turn[1::2], in_turn[::2]
        if longer > 0:
            of_first += alone
        else:
            of_second += alone
        first += of_first.count(1)
        first_end -= of_first.count(0)
        second += of_second.count(1)
        second_end -= of_second.count(0)
    return first, first_end, second, second_end, swapped


def _filled(texts: Texts, pairs: list[_Pair], seq_length: int, roles: Roles) -> Ints:
    """Return the rows of BERT samples without masks, int64 [5, samples, seq_length]; see `BertSample`."""
    rows = np.empty((5, len(pairs), seq_length), np.int64)
    for row, filler in zip(rows, (roles.pad, roles.pad, -1, 0, 0), strict=True):
        row.fill(filler)
    tokens, types, _, _, padding_mask = rows
    first = np.array(pairs)[:, 0:4:2]  # of both parts
    sizes = np.array(pairs)[:, 1:4:2] - first
    begins = sizes[:, :1] + 2  # positions of the second parts
    ends = begins + sizes[:, 1:] + (sizes[:, 1:] > 0)
    columns = np.arange(seq_length)
    inside = columns < ends
    is_sep = (columns == begins - 1) | (columns == ends - 1)
    is_text = inside & ~is_sep
    is_text[:, 0] = False
    tokens[:, 0] = roles.cls
    tokens[is_sep] = roles.sep
    tokens[is_text] = texts.ids[ranges(first.reshape(-1), sizes.reshape(-1))]
    np.copyto(types, columns >= begins, where=inside)
    padding_mask[:] = inside
    return rows


def _mask(
    rows: Ints,
    words: WordIndex,
    orders: list[Ints],
    draws: BertDraws,
    targets: list[int],
    vocabulary: Vocabulary,
    mask_prob: float,
) -> None:
    """Mask words in the rows of BERT samples. Raises `Exhausted`, and changes nothing, if there are too few draws."""
    tokens, _, labels, loss_mask, padding_mask = rows
    budgets = _budgets(targets, padding_mask.sum(1), mask_prob)
    drawn = choose_words(words, orders, budgets, draws.runs, draws.steps)
    chosen = (drawn >= 0).nonzero()[0]
    in_words = ((vocabulary.kinds[tokens] > 0) & (padding_mask > 0)).reshape(-1).nonzero()[0]
    positions = np.unravel_index(in_words[chosen], tokens.shape)
    labels[positions] = tokens[positions]
    tokens[positions] = draws.replacements(drawn[chosen], tokens[positions])
    loss_mask[positions] = 1


def _budgets(targets: list[int], sizes: Ints, mask_prob: float) -> list[int]:
    """Return the maximum number of tokens to mask in each sample. sizes: number of tokens."""
    limits = np.minimum(mask_prob * np.array(targets), np.maximum(1, np.rint(sizes * mask_prob)))
    budgets: list[int] = limits.astype(np.int64).tolist()
    return budgets


def t5_samples(
    texts: Texts, seq_length: int, decoder_seq_length: int, vocabulary: Vocabulary, *, mask_prob: float
) -> list[T5Sample]:
    """Replace spans with sentinels: a b c d e with span c d -> encoder a b <0> e; decoder <bos> <0> c d.

    Raises ValueError if there are too few sentinels, or the decoder's sequence length is too short.
    """
    begins = np.array(texts.begins)
    sizes = np.minimum(np.diff(begins), texts.targets)
    tokens = texts.ids[ranges(begins[:-1], sizes)].astype(np.int64)
    kinds, ends = vocabulary.kinds[tokens], sizes.cumsum()
    budgets = _budgets(texts.targets, sizes, mask_prob)
    all_kinds, ascending, words = kinds.tobytes(), np.arange(len(tokens)), WordIndex()
    bounds = [words.add(all_kinds[end - size : end]) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]

    def attempt(draws: int) -> Ints:
        orders, lengths = list[Ints](), np.empty((len(sizes), draws), np.int64)
        for i, (seed, (first, end)) in enumerate(zip(texts.seeds, bounds, strict=True)):
            _stream.seed(seed)
            orders.append(_stream.shuffled(ascending[first:end]))
            lengths[i] = _stream.geometric(0.2, draws)
        # The number of words of a run has a geometric distribution with mean 5, truncated at 10.
        runs = np.ones((len(sizes), 2 * draws + 2), np.uint8)
        runs[:, :-2:2] = np.minimum(lengths, 10)
        return choose_words(words, orders, budgets, runs)

    drawn = with_enough(attempt, 32 + max(budgets) // 2)
    truncated = np.diff(texts.begins) > texts.targets
    encoder, decoder = _with_sentinels(tokens, kinds, ends, drawn, (seq_length, decoder_seq_length), vocabulary.roles)
    return [T5Sample(encoder[i], decoder[:, i], int(cut)) for i, cut in enumerate(truncated.tolist())]


def _with_sentinels(
    tokens: Ints,
    kinds: NDArray[np.uint8],
    ends: Ints,
    drawn: Ints,
    lengths: tuple[int, int],
    roles: Roles,
) -> tuple[Ints, Ints]:
    """Return the encoder's rows, int64 [samples, lengths[0]], and the decoder's, int64 [3, samples, lengths[1]].

    tokens: the ids of all samples, concatenated; sample i ends before ends[i]. kinds: their kinds. drawn: from
    `choose_words`; the tokens of a span have the same draw.
    """
    chosen = (drawn >= 0).nonzero()[0]
    positions = kinds.nonzero()[0][chosen]
    first = np.diff(drawn[chosen], prepend=-1).nonzero()[0]  # of each span, as an index into positions
    begins, last = positions[first], positions[np.append(first[1:], len(positions))[: len(first)] - 1]
    text = np.searchsorted(ends, begins, side="right")
    spans = np.bincount(text, minlength=len(ends))
    if (most := int(spans.max())) > len(roles.sentinels):
        raise ValueError(f"--vocab-extra-ids {len(roles.sentinels)}: a sample has {most} spans; raise it")
    numbers = np.arange(len(first)) - np.repeat(spans.cumsum() - spans, spans)  # of each span in its sample
    sentinels = np.array(roles.sentinels)[numbers]
    # tokens   a b  c  d e     span c d
    # becomes  a b <0> d e     d is then removed; the decoder gets <0> c d
    decoder = np.insert(tokens[positions], first, sentinels)
    decoder_sizes = spans + np.diff(np.searchsorted(positions, ends), prepend=0)
    tokens[begins] = sentinels
    removed = np.zeros(len(tokens) + 1, np.int8)
    removed[begins + 1] += 1
    removed[last + 1] -= 1
    is_kept = removed[:-1].cumsum() == 0
    encoder_sizes = np.diff(np.append(0, is_kept.cumsum())[ends], prepend=0)
    encoder_rows = np.full((len(ends), lengths[0]), roles.pad)
    encoder_rows[np.arange(lengths[0]) < encoder_sizes[:, None]] = tokens[is_kept]
    return encoder_rows, _decoder_rows(decoder, decoder_sizes, lengths[1], roles)


def _decoder_rows(tokens: Ints, sizes: Ints, length: int, roles: Roles) -> Ints:
    """Return the decoder's rows, int64 [3, samples, length]; see `T5Sample`. tokens: the decoder's tokens of all
    samples, concatenated. sizes: number of tokens of each sample."""
    if (most := int(sizes.max()) + 1) > length:
        raise ValueError(f"--decoder-seq-length {length}: a sample takes {most}; raise it")
    rows = np.empty((3, len(sizes), length), np.int64)
    for row, filler in zip(rows, (roles.pad, -1, 0), strict=True):
        row.fill(filler)
    text, labels, loss_mask = rows
    columns = np.arange(length)
    text[:, 0] = roles.bos
    text[:, 1:][columns[:-1] < sizes[:, None]] = tokens
    labels[columns < sizes[:, None]] = tokens
    labels[np.arange(len(sizes)), sizes] = roles.eos
    loss_mask[:] = columns <= sizes[:, None]
    return rows
