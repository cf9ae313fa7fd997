"""BERT and T5 samples: sentences put together, words masked or taken out. Megatron-LM's, draw for draw.

Every sample has a generator of its own, seeded by seed + its number, and every draw is made where Megatron-LM makes
it. This file knows neither batches nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.indexed import IndexedDataset
from mega.core.text.tokenizer import Roles

Style = Literal["bert", "t5"]
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
    def of(cls, tokenizer: Any, rows: int | None = None) -> Vocabulary:
        """rows: of the model's table of tokens, where it may have fewer than the tokenizer has tokens.

        Raises ValueError for a tokenizer that lacks [CLS], [SEP] and [MASK].
        """
        if tokenizer.roles is None:
            raise ValueError(f"--tokenizer {tokenizer.kind}: has no CLS, SEP and MASK, which BERT and T5 need")
        size = min(tokenizer.vocab_size, rows or tokenizer.vocab_size)
        return cls(tokenizer.roles, np.array([tokenizer.continues(i) for i in range(size)]), range(size))


def bert_batch(rows: Sequence[BertSample], first_sample: int, most: int | None = None) -> Any:
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


class _Mapped:
    """Sentences of a corpus, sample by sample. mapping: see `mapping.sentence_mapping`."""

    def __init__(self, corpus: IndexedDataset, mapping: NDArray[Any], seed: int) -> None:
        self._corpus, self._mapping, self._seed = corpus, mapping, seed

    def __len__(self) -> int:
        return len(self._mapping)

    def _read(self, sample: int) -> tuple[list[list[int]], int, np.random.RandomState]:
        """Sentences, target length and generator."""
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        first, last, target = self._mapping[sample].tolist()
        generator = np.random.RandomState((self._seed + sample) % 2**32)
        return [self._corpus[i].tolist() for i in range(first, last)], target, generator


class BertDataset(_Mapped):
    """Two parts of a document, in the wrong order half of the time, with masked words. See `bert_sample`."""

    def __init__(
        self,
        corpus: IndexedDataset,
        mapping: NDArray[Any],
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
        sentences, target, generator = self._read(sample)
        return bert_sample(
            sentences, target, self._length, self._vocabulary, generator, self._mask_prob, self._binary_head
        )

    def collate(self, rows: Sequence[BertSample], first_sample: int) -> Any:
        """As `bert_batch`."""
        return bert_batch(rows, first_sample, max(1, ceil(self._mask_prob * self._length)))


class T5Dataset(_Mapped):
    """Text without some spans, and the spans. See `t5_sample`."""

    def __init__(
        self,
        corpus: IndexedDataset,
        mapping: NDArray[Any],
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
        sentences, target, generator = self._read(sample)
        return t5_sample(sentences, target, *self._lengths, self._vocabulary, generator, self._mask_prob)

    def collate(self, rows: Sequence[T5Sample], first_sample: int) -> Any:
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
    sentences: Sequence[Sequence[int]],
    target: int,
    seq_length: int,
    vocabulary: Vocabulary,
    generator: np.random.RandomState,
    mask_prob: float,
    binary_head: bool,
) -> BertSample:
    """[CLS] A [SEP] B [SEP], at most `target` tokens in A and B, some of them masked."""
    roles = vocabulary.roles
    first, second, swapped = _halves(sentences, generator) if binary_head else (_flat(sentences), [], False)
    truncated = _truncate(first, second, target, generator)
    tokens = [roles.cls, *first, roles.sep, *second, *([roles.sep] if second else [])]
    types = [0] * (len(first) + 2) + [1] * (len(second) + bool(second))
    masked, positions, labels, _ = mask(
        tokens, vocabulary, generator, style="bert", prob=mask_prob, limit=mask_prob * target, most=3
    )
    wanted = np.full(seq_length, -1, np.int64)
    wanted[positions] = labels
    return BertSample(
        text=_padded(masked, seq_length, roles.pad),
        types=_padded(types, seq_length, roles.pad),
        labels=wanted,
        loss_mask=(wanted >= 0).astype(np.int64),
        padding_mask=_padded([1] * len(tokens), seq_length, 0),
        is_random=int(swapped),
        truncated=int(truncated),
    )


def t5_sample(
    sentences: Sequence[Sequence[int]],
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
    whole = _flat(sentences)
    tokens = whole[:target]
    _, _, _, spans = mask(tokens, vocabulary, generator, style="t5", prob=mask_prob, limit=mask_prob * target, most=10)
    if len(spans) > len(roles.sentinels):
        raise ValueError(f"--vocab-extra-ids {len(roles.sentinels)}: a sample has {len(spans)} spans; raise it")
    encoder, decoder = [], []
    at = 0
    for sentinel, span in zip(roles.sentinels, spans, strict=False):
        encoder += [*tokens[at : span[0]], sentinel]
        decoder += [sentinel, *(tokens[i] for i in span)]
        at = span[-1] + 1
    encoder += tokens[at:]
    if len(decoder) + 1 > decoder_seq_length:
        raise ValueError(f"--decoder-seq-length {decoder_seq_length}: a sample takes {len(decoder) + 1}; raise it")
    return T5Sample(
        text_enc=_padded(encoder, seq_length, roles.pad),
        text_dec=_padded([roles.bos, *decoder], decoder_seq_length, roles.pad),
        labels=_padded([*decoder, roles.eos], decoder_seq_length, -1),
        loss_mask=_padded([1] * (len(decoder) + 1), decoder_seq_length, 0),
        truncated=int(len(whole) > target),
    )


def _halves(sentences: Sequence[Sequence[int]], generator: np.random.RandomState) -> tuple[list[int], list[int], bool]:
    """The sentences in two runs, exchanged half of the time, and whether they were."""
    pivot = generator.randint(1, len(sentences)) if len(sentences) >= 3 else 1
    parts = [_flat(sentences[:pivot]), _flat(sentences[pivot:])]
    swapped = generator.random_sample() < 0.5
    first, second = reversed(parts) if swapped else parts
    return first, second, swapped


def _flat(sentences: Sequence[Sequence[int]]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _truncate(first: list[int], second: list[int], target: int, generator: np.random.RandomState) -> bool:
    """Take tokens from either end of the longer part until both have `target` together."""
    cut = len(first) + len(second) > target
    while len(first) + len(second) > target:
        longer = first if len(first) > len(second) else second
        if generator.random_sample() < 0.5:
            del longer[0]
        else:
            longer.pop()
    return cut


def mask(
    tokens: Sequence[int],
    vocabulary: Vocabulary,
    generator: np.random.RandomState,
    *,
    style: Style,
    prob: float,
    limit: float,
    most: int,
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Masked tokens; positions, and what stood there, in order; spans of positions in order.

    Words (a token and those that continue it) are masked in runs of 1 .. `most`, in random order, until `prob` of the
    tokens, or `limit`, are masked.
    """
    words = _words(tokens, vocabulary)
    budget = min(limit, max(1, round(len(tokens) * prob)))
    draw = _run_lengths(style, most, generator)
    masked = list(tokens)
    covered: set[int] = set()
    spans: list[list[int]] = []
    for start in _order(len(words), generator):
        if len(covered) >= budget:
            break
        run = draw()
        span: list[int] = []
        while run and not 0 < len(span) <= budget - len(covered):
            span = [place for word in words[start : start + run] for place in word]
            run -= 1
        if len(covered) + len(span) > budget or not covered.isdisjoint(span):
            continue
        covered.update(span)
        spans.append(span)
        for place in span:
            masked[place] = _replacement(tokens[place], vocabulary, generator, style)
    positions = sorted(covered)
    return masked, positions, [tokens[place] for place in positions], sorted(spans)


def _words(tokens: Sequence[int], vocabulary: Vocabulary) -> list[list[int]]:
    """Places of each word: [CLS] un ##aff a [SEP] -> [1, 2] [3]."""
    controls = (vocabulary.roles.cls, vocabulary.roles.sep)
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in controls:
            continue
        if words and vocabulary.continues[token]:
            words[-1].append(place)
        else:
            words.append([place])
    return words


def _order(count: int, generator: np.random.RandomState) -> list[int]:
    order = np.arange(count)
    generator.shuffle(order)
    return order.tolist()


def _run_lengths(style: Style, most: int, generator: np.random.RandomState) -> Callable[[], int]:
    """Words of the next run: 1 .. most with weights 1 / n (bert), or geometric with mean 5, cut at `most` (t5)."""
    if style == "t5":
        return lambda: min(int(generator.geometric(0.2)), most)
    weights = 1.0 / np.arange(1, most + 1)
    weights /= weights.sum()
    bounds = (weights / weights.sum()).cumsum()
    bounds /= bounds[-1]
    return lambda: 1 + int(bounds.searchsorted(generator.random_sample(), side="right"))


def _replacement(token: int, vocabulary: Vocabulary, generator: np.random.RandomState, style: Style) -> int:
    """[MASK] in 8 of 10 cases, the token itself in 1, any other in 1; T5 takes the span out anyway."""
    if style == "t5" or generator.random_sample() < 0.8:
        return vocabulary.roles.mask
    if generator.random_sample() < 0.5:
        return token
    return vocabulary.ids[generator.randint(0, len(vocabulary.ids))]


def _padded(values: Sequence[int], length: int, filler: int) -> Ints:
    assert len(values) <= length
    found = np.full(length, filler, np.int64)
    found[: len(values)] = values
    return found
