"""Build BERT and T5 samples: join sentences, and mask words or replace them with sentinels. All random draws
(masking.py) are identical to Megatron-LM's.

Rows of many samples are filled together, because separate operations for each sample would dominate the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset
from mega.core.data.masking import (
    SPARE,
    BertDraws,
    Ints,
    Stream,
    Streams,
    Vocabulary,
    WordIndex,
    choose_words,
    draw_below,
    draw_coins,
    ranges,
    with_enough,
)
from mega.core.text.tokenizer import Roles

if TYPE_CHECKING:
    from mega.core.batch import EncoderDecoderBatch, MaskedBatch

Sample = TypeVar("Sample")

_BLOCK = 1024
_streams = Streams()


def _row(rows: Ints, number: int) -> Ints:
    row: Ints = rows[number]
    return row


class BertSample(NamedTuple):
    """A BERT sample."""

    rows: Ints  # int64 [3, seq_length], the properties `text`, `types` and `labels`
    length: int  # Number of tokens without padding
    is_random: int  # 1 if the two parts are in the wrong order
    truncated: int  # 1 if tokens were cut off

    @property
    def text(self) -> Ints:
        """Ids of the masked text, padded."""
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
        return (self.labels >= 0).astype(np.int64)

    @property
    def padding_mask(self) -> Ints:
        """1 for tokens, 0 for padding."""
        return (np.arange(len(self.text)) < self.length).astype(np.int64)


class BertSamples(Sequence[BertSample]):
    """BERT samples in common arrays, from which a batch is built without reading each sample. See `BertSample`.

    rows: int64 [3, samples, seq_length]. lengths, is_random, truncated: int64 [samples].
    """

    def __init__(self, rows: Ints, lengths: Ints, is_random: Ints, truncated: Ints) -> None:
        self.rows, self.lengths, self.is_random, self.truncated = rows, lengths, is_random, truncated

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[BertSample]:
        flags = (each.tolist() for each in (self.lengths, self.is_random, self.truncated))
        return map(BertSample, self.rows.swapaxes(0, 1), *flags)

    @overload
    def __getitem__(self, index: int) -> BertSample: ...
    @overload
    def __getitem__(self, index: slice) -> BertSamples: ...
    def __getitem__(self, index: int | slice) -> BertSample | BertSamples:
        flags = self.lengths[index], self.is_random[index], self.truncated[index]
        if isinstance(index, slice):
            return BertSamples(self.rows[:, index], *flags)
        return BertSample(self.rows[:, index], *map(int, flags))


class T5Sample(NamedTuple):
    """A T5 sample: the encoder's text, in which sentinels replace spans, and the spans, which the decoder predicts."""

    text_enc: Ints  # int64 [encoder length], the text with spans replaced with sentinels
    rows: Ints  # int64 [3, decoder length], `text_dec`, `labels`, `loss_mask`
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
        """1 for tokens, 0 for padding."""
        return _row(self.rows, 2)


def bert_batch(samples: Sequence[BertSample], first_sample: int, max_masked: int | None = None) -> MaskedBatch:
    """Build a microbatch of BERT samples, whose first row is global sample `first_sample`.

    max_masked: maximum number of masked tokens in a row; None if unknown.
    """
    import torch

    from mega.core.batch import MaskedBatch

    if not isinstance(samples, BertSamples):
        rows, *flags = zip(*samples, strict=True)
        samples = BertSamples(np.stack(rows, 1), *map(np.array, flags))
    text, types, labels = samples.rows
    is_masked = labels >= 0
    return MaskedBatch(
        tokens=torch.from_numpy(text),
        labels=torch.from_numpy(np.maximum(labels, 0)),
        loss_weights=torch.from_numpy(is_masked.astype(np.float32)),
        types=torch.from_numpy(types),
        lengths=torch.from_numpy(samples.lengths),
        pairs=torch.from_numpy(samples.is_random),
        samples=torch.arange(first_sample, first_sample + len(samples)),
        predicted=None if max_masked is None else torch.from_numpy(_predicted(is_masked, max_masked)),
    )


def _predicted(is_masked: NDArray[np.bool_], width: int) -> Ints:
    """Return int64 [b, width], the columns of the masked tokens in each row. If a row has fewer than `width` masked
    tokens, its first columns that are not masked fill the remaining entries."""
    counts = is_masked.sum(axis=1, keepdims=True)
    assert counts.max() <= width, (counts, width)
    spare = ~is_masked[:, :width]
    spare &= spare.cumsum(axis=1) <= width - counts
    predicted, filled = np.empty(spare.shape, np.int64), np.arange(spare.shape[1]) < counts
    predicted[filled] = is_masked.reshape(-1).nonzero()[0] % is_masked.shape[1]
    predicted[~filled] = spare.reshape(-1).nonzero()[0] % spare.shape[1]
    return predicted


class Texts(NamedTuple):
    """The sentences of many samples. The sentences of each sample are consecutive in `ids`."""

    ids: NDArray[np.integer]
    begins: Ints  # [samples], the position in `ids` of each sample's first id
    bounds: Ints  # [sentences + 1], the number of ids of all samples before each sentence, and in total
    sentences: Ints  # [samples + 1], the first sentence of each sample, and the number of sentences
    targets: Ints  # [samples], the target length of each sample
    seeds: list[int]  # The seed of each sample's stream

    @property
    def sizes(self) -> Ints:
        """The number of ids of each sample."""
        return np.diff(self.bounds.take(self.sentences))


class _Mapped(Generic[Sample]):
    """Base class of datasets that read the sentences of each sample from a corpus. mapping: see
    `mapping.sentence_mapping`."""

    def __init__(self, corpus: IndexedDataset, mapping: NDArray[np.integer], seed: int) -> None:
        self._corpus, self._mapping, self._seed = corpus, mapping, seed

    def __len__(self) -> int:
        return len(self._mapping)

    def __getitem__(self, sample: int) -> Sample:
        return self.samples([sample])[0]

    def samples(self, entries: Sequence[int]) -> Sequence[Sample]:
        """Return the samples `entries`. One call for many samples is faster than many calls."""
        # Blocks limit the memory, because each sample in a block needs a random stream of 3 KB.
        blocks = [self._block(entries[first : first + _BLOCK]) for first in range(0, len(entries), _BLOCK)]
        return blocks[0] if len(blocks) == 1 else [sample for block in blocks for sample in block]

    def _block(self, entries: Sequence[int]) -> Sequence[Sample]:
        raise NotImplementedError

    def _read(self, entries: Sequence[int]) -> Texts:
        numbers = np.asarray(entries, np.int64)
        if len(wrong := numbers[(numbers < 0) | (numbers >= len(self))]):
            raise IndexError(f"no sample {wrong[0]}, there are {len(self)}")
        first, last, targets = self._mapping[numbers].T.astype(np.int64)
        lengths = self._corpus.lengths[ranges(first, last - first)]
        ids, begins = self._corpus.runs(first, last)
        return Texts(
            ids,
            begins,
            bounds=np.append(0, lengths.cumsum(dtype=np.int64)),
            sentences=np.append(0, (last - first).cumsum()),
            targets=targets,
            seeds=((self._seed + numbers) % 2**32).tolist(),
        )


class BertDataset(_Mapped[BertSample]):
    """A dataset of BERT samples, each with two parts of a document and masked words. In half of the samples, the parts
    are exchanged. See `bert_samples`."""

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

    def _block(self, entries: Sequence[int]) -> BertSamples:
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
    """A dataset of T5 samples. A sample consists of a text in which sentinels replace spans, and of these spans. See
    `t5_samples`."""

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

    def _block(self, entries: Sequence[int]) -> list[T5Sample]:
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
) -> BertSamples:
    """Build rows [CLS] A [SEP] B [SEP] with masked words. The total number of tokens in A and B is limited to the
    sample's target.

    Words are masked in runs of 1 to 3 words, in random order, until `mask_prob` of the tokens are masked.
    """
    streams = _streams.seeded(texts.seeds)
    first, sizes, swapped = _pairs(texts, streams, binary_head)
    ids = texts.ids.take(ranges(first.reshape(-1), sizes.reshape(-1)))
    words = WordIndex.of(vocabulary.kinds.take(ids), sizes.sum(1).cumsum())
    order = words.shuffled(streams)
    rows, positions, lengths = _filled(ids, sizes, seq_length, vocabulary.roles)
    budgets = _budgets(texts.targets, lengths, mask_prob)

    def draw(count: int) -> NDArray[np.uint64]:
        return np.concatenate([stream.raw(count) for stream in streams]).reshape(-1, count)

    def attempt(outputs: NDArray[np.uint64]) -> None:
        draws = BertDraws(outputs, vocabulary)
        tokens, starts = choose_words(words, order, budgets, draws.runs, draws.steps)
        tokens = words.positions.take(tokens)
        in_rows, true_ids = positions.take(tokens), ids.take(tokens)
        rows[0].reshape(-1)[in_rows] = draws.replacements(starts, true_ids)
        rows[2].reshape(-1)[in_rows] = true_ids

    with_enough(attempt, draw, 24 + ceil(4.5 * mask_prob * int(texts.targets.max())))
    return BertSamples(rows, lengths, swapped, (texts.sizes > texts.targets).astype(np.int64))


def _pairs(texts: Texts, streams: Sequence[Stream], binary_head: bool) -> tuple[Ints, Ints, Ints]:
    """Divide the sentences of each sample into two parts, exchange the parts with probability 1/2, and remove tokens
    until their total length is at most the sample's target. If not `binary_head`, the second part is empty.

    Each token is removed from a random end of the longer part, or of the second part if both are equally long.
    Return the positions in `Texts.ids` of both parts' first ids, int64 [samples, 2]; the parts' lengths, int64
    [samples, 2]; and 1 if the parts were exchanged, else 0, int64 [samples].
    """
    samples, begins, ends = np.arange(len(texts.targets)), texts.begins, texts.begins + texts.sizes
    excess = np.maximum(texts.sizes - texts.targets, 0)
    flips, sentences, cut = excess + binary_head, texts.sentences, ends
    if binary_head:
        cut = sentences[:-1] + 1 + draw_below(streams, np.diff(sentences) - 1)
        cut = begins + texts.bounds.take(cut) - texts.bounds.take(sentences[:-1])
    coins = draw_coins(streams, flips)
    first, end = np.stack([begins, cut], 1), np.stack([cut, ends], 1)
    coin, swapped = flips.cumsum() - flips, np.zeros(len(samples), np.int64)
    if binary_head:
        swapped = coins[coin].astype(np.int64)
        first, end = (np.where(swapped[:, None], each[:, ::-1], each) for each in (first, end))
    # Tokens are removed from the longer part until both are equally long, then from the second, the first, the second,
    # ...
    longer = end[:, 0] - first[:, 0] - (end[:, 1] - first[:, 1])
    turn, sample = ranges(-abs(longer), excess), samples.repeat(excess)
    of_second = np.where(turn < 0, (longer <= 0)[sample], turn % 2 == 0)
    at_begin = coins[ranges(coin + binary_head, excess)]
    removed = np.bincount(4 * sample + 2 * of_second + at_begin, minlength=4 * len(samples)).reshape(-1, 2, 2)
    first, end = first + removed[:, :, 1], end - removed[:, :, 0]
    return first, end - first, swapped


def _filled(ids: NDArray[np.integer], sizes: Ints, seq_length: int, roles: Roles) -> tuple[Ints, Ints, Ints]:
    """Return the rows of BERT samples without masks, int64 [3, samples, seq_length] (see `BertSample`), the position in
    rows[0] of each id, and the length of each sample.

    ids: concatenated parts of all samples. sizes: int64 [samples, 2], the number of ids in each part.
    """
    rows = np.empty((3, len(sizes), seq_length), np.int64)
    begins = sizes[:, :1] + 2  # columns of the second parts
    ends = begins + sizes[:, 1:] + (sizes[:, 1:] > 0)
    assert ends.max() <= seq_length, (ends.max(), seq_length)
    columns, row_begins = np.arange(seq_length), np.arange(len(sizes))[:, None] * seq_length
    rows[0] = roles.pad
    rows[1] = roles.pad
    np.copyto(rows[1], columns >= begins, where=columns < ends)
    rows[2] = -1
    positions = ranges((row_begins + np.append(np.ones_like(begins), begins, 1)).reshape(-1), sizes.reshape(-1))
    text = rows[0].reshape(-1)
    text[positions] = ids
    text[row_begins] = roles.cls
    text[row_begins + begins - 1] = roles.sep
    text[row_begins + ends - 1] = roles.sep
    return rows, positions, ends[:, 0]


def _budgets(targets: Ints, sizes: Ints, mask_prob: float) -> Ints:
    """Return the maximum number of tokens to mask in each sample. sizes: number of tokens in each sample."""
    budgets: Ints = np.minimum(mask_prob * targets, np.maximum(1, np.rint(sizes * mask_prob))).astype(np.int64)
    return budgets


def t5_samples(
    texts: Texts, seq_length: int, decoder_seq_length: int, vocabulary: Vocabulary, *, mask_prob: float
) -> list[T5Sample]:
    """Replace spans with sentinels. For a b c d e with the span c d: encoder a b <0> e; decoder <bos> <0> c d.

    Raises ValueError if there are too few sentinels, or the decoder's sequence length is too short.
    """
    sizes = np.minimum(texts.sizes, texts.targets)
    tokens = texts.ids.take(ranges(texts.begins, sizes)).astype(np.int64)
    ends, budgets, streams = sizes.cumsum(), _budgets(texts.targets, sizes, mask_prob), _streams.seeded(texts.seeds)
    words = WordIndex.of(vocabulary.kinds.take(tokens), ends)
    order = words.shuffled(streams)

    def draw(count: int) -> Ints:
        return np.stack([stream.geometric(0.2, count) for stream in streams])

    def attempt(lengths: Ints) -> Ints:
        # The number of words in a run has a geometric distribution with mean 5, truncated at 10.
        runs = np.ones((len(sizes), 2 * lengths.shape[1] + SPARE), np.uint8)
        runs[:, :-SPARE:2] = np.minimum(lengths, 10)
        spans = np.full(len(words.positions), -1)
        span_tokens, starts = choose_words(words, order, budgets, runs)
        spans[span_tokens] = starts
        return spans

    spans = with_enough(attempt, draw, 32 + int(budgets.max()) // 2)
    truncated = texts.sizes > texts.targets
    encoder, decoder = _with_sentinels(
        tokens, words.positions, ends, spans, (seq_length, decoder_seq_length), vocabulary.roles
    )
    return [T5Sample(encoder[i], decoder[:, i], int(cut)) for i, cut in enumerate(truncated.tolist())]


def _with_sentinels(
    tokens: Ints,
    token_positions: Ints,
    ends: Ints,
    drawn: Ints,
    lengths: tuple[int, int],
    roles: Roles,
) -> tuple[Ints, Ints]:
    """Return the rows of the encoder, int64 [samples, lengths[0]], and of the decoder, int64 [3, samples, lengths[1]].

    tokens: the ids of all samples, concatenated; sample i ends before ends[i]. token_positions: see
    `WordIndex.positions`. drawn: the position of each token's draw, -1 if the token is not chosen; all tokens of a span
    have the same draw.
    """
    chosen = (drawn >= 0).nonzero()[0]
    positions = token_positions.take(chosen)
    first = np.diff(drawn[chosen], prepend=-1).nonzero()[0]  # index into `positions` of each span's first token
    begins, last = positions[first], positions[np.append(first[1:], len(positions))[: len(first)] - 1]
    text = np.searchsorted(ends, begins, side="right")
    spans = np.bincount(text, minlength=len(ends))
    if (most := int(spans.max())) > len(roles.sentinels):
        raise ValueError(f"--vocab-extra-ids {len(roles.sentinels)}: a sample has {most} spans; raise it")
    numbers = np.arange(len(first)) - np.repeat(spans.cumsum() - spans, spans)  # index of each span in its sample
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
    """Return the decoder's rows, int64 [3, samples, length]; see `T5Sample`. tokens: concatenated decoder tokens of all
    samples. sizes: number of tokens in each sample."""
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
