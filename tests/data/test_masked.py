"""BERT's and T5's samples: golden vectors of Megatron-LM, and the statistics of masking."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega.cli import main
from mega.core.batch import EncoderDecoderBatch, MaskedBatch
from mega.core.config.sections import DataConfig, MaskingConfig
from mega.core.data import mapping, masked, masking
from mega.core.data.batches import Batches
from mega.core.data.build import Datasets, build_datasets
from mega.core.data.dataset import BlendedDataset, is_blend
from mega.core.data.indexed import IndexedDataset, token_dtype
from mega.core.data.mapping import mt19937_64, sentence_mapping
from mega.core.data.masked import BertDataset, BertSample, T5Dataset, T5Sample, Texts, bert_samples, t5_samples
from mega.core.data.masking import (
    SPARE,
    Exhausted,
    Streams,
    Vocabulary,
    WordIndex,
    choose_words,
    draw_below,
    draw_coins,
)
from mega.core.data.order import split_boundaries
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.data.recipes import recipe
from mega.core.text.build import build
from mega.core.text.tokenizer import Roles
from tests.support.shared import shared

ROLES = Roles(cls=1, sep=2, mask=3, pad=0, bos=40, eos=41, sentinels=(42, 43, 44, 45, 46))
SMALL = Vocabulary(ROLES, np.array([4 <= i < 40 and i % 4 == 0 for i in range(47)]), np.arange(40))
TEXT, BOUNDS = np.array([5, 6, *range(8, 21)]), np.array([0, 5, 8, 15])


def test_mersenne_twister() -> None:
    """The first outputs for the default seed, and the 10000th, which the C++ standard states."""
    words = np.concatenate(list(islice(mt19937_64(5489), 33))).tolist()
    assert words[:2] == [14514284786278117030, 4620546740167642908]
    assert words[9999] == 9981545732273789042


def plain_mapping(
    documents: list[int], sizes: list[int], *, samples: int, max_length: int, short_prob: float, seed: int,
    min_sentences: int,
) -> list[list[int]]:  # fmt: skip
    """The original's loops, which look at each sentence and swap two entries at a time."""
    ratio, generator = round(1 / short_prob) if short_prob else 0, np.random.RandomState(seed)

    def target() -> int:
        draw = int(np.frombuffer(generator.bytes(4), "<u4")[0]) if ratio else 1
        return 2 + draw % (max_length - 1) if ratio and draw % ratio == 0 else max_length

    found = list[list[int]]()
    while len(found) < samples:
        for first, last in pairwise(documents):
            if last - first < max(1, min_sentences) or (last - first > 1 and max(sizes[first:last]) > 512):
                continue
            start, longest = first, target()
            for i in range(first, last):
                left, full = last - i - 1, sum(sizes[start : i + 1]) >= longest and i + 1 - start >= min_sentences
                if (full and left > 1) or left == 0:
                    found.append([start, i + 1, longest])
                    start, longest = i + 1, target()
    draws = (int(word) for block in mt19937_64(seed + 1) for word in block)
    for i in range(len(found) - 1, 0, -1):
        j = next(draws) % (i + 1)
        found[i], found[j] = found[j], found[i]
    return found


def test_mapping_is_that_of_the_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 150 corpora drawn at random, with blocks that end within passes; and of so many samples that blocks of swaps
    touch entries twice."""
    draw = random.Random(1)
    monkeypatch.setattr(mapping, "_BLOCK", 64)
    for number in range(150):
        counts = [draw.choice([0, 1, 2, draw.randint(0, 40)]) for _ in range(draw.randint(1, 12))] + [3]
        sizes = [draw.choice([0, 1, 5, draw.randint(0, 100), 512]) for _ in range(sum(counts))]
        if len(sizes) > 3 and draw.random() < 0.3:
            sizes[0] = 513  # the last document remains
        settings = {
            "samples": 6000 if number == 0 else draw.choice([1, 7, 200, 900]),
            "max_length": draw.choice([2, 3, 61, 300]),
            "short_prob": draw.choice([0.1, 0.5, 1.0, 0.0]),
            "seed": number,
            "min_sentences": draw.choice([1, 2]),
        }
        documents = [0, *accumulate(counts)]
        found = sentence_mapping(np.array(documents), np.array(sizes, np.int32), **settings)
        assert found.tolist() == plain_mapping(documents, sizes, **settings), settings


GOLDEN = [
    ([0, 4, 4, 5, 8, 12], [10, 20, 30, 15, 40, 7, 9, 30, 12, 513, 3, 4], 61, 0.1, 1234, 8, 2,
     "(0,4,61) (5,8,61) (5,8,61) (5,8,61) (0,4,61) (0,4,61) (0,4,61) (5,8,61)"),
    ([0, 4, 4, 5, 8, 12], [10, 20, 30, 15, 40, 7, 9, 30, 12, 513, 3, 4], 61, 0.1, 1234, 8, 1,
     "(5,8,61) (4,5,61) (4,5,61) (0,4,61) (5,8,61) (0,4,61) (4,5,61) (5,8,61) (0,4,61)"),
    ([0, 6, 10], [10, 20, 30, 15, 40, 7, 9, 30, 12, 13], 29, 0.5, 7, 12, 2,
     "(0,2,29) (4,6,16) (0,2,29) (8,10,18) (6,8,29) (2,4,22) (8,10,24) (4,6,29) (6,8,29) (2,4,26) (2,4,24) (0,2,4) "
     "(4,6,29) (6,8,29) (8,10,29)"),
]  # fmt: skip


@pytest.mark.parametrize(("documents", "sizes", "longest", "short", "seed", "samples", "least", "expected"), GOLDEN)
def test_golden_mapping(
    documents: list[int], sizes: list[int], longest: int, short: float, seed: int, samples: int, least: int,
    expected: str,
) -> None:  # fmt: skip
    found = sentence_mapping(
        np.array(documents), np.array(sizes, np.int32), samples=samples, max_length=longest, short_prob=short,
        seed=seed, min_sentences=least,
    )  # fmt: skip
    assert " ".join(f"({a},{b},{c})" for a, b, c in found.tolist()) == expected
    assert found.dtype == np.uint32


def test_corpus_without_a_usable_document() -> None:
    with pytest.raises(ValueError, match=r"no document has 2 or more sentences.*--split-sentences"):
        sentence_mapping(
            np.array([0, 1, 2]), np.array([5, 6], np.int32), samples=1, max_length=9, short_prob=0.1, seed=1,
            min_sentences=2,
        )  # fmt: skip


def padded(values: str, length: int, filler: int) -> list[int]:
    found = [int(value) for value in values.split()]
    return found + [filler] * (length - len(found))


def test_golden_bert() -> None:
    def sample(target: int, prob: float, head: bool, seed: int) -> BertSample:
        texts = Texts(TEXT, np.array([0]), BOUNDS, np.array([0, 3]), np.array([target]), [seed])
        return bert_samples(texts, 24, SMALL, mask_prob=prob, binary_head=head)[0]

    one = sample(13, 0.15, True, 1234)
    assert one.text.tolist() == padded("1 3 15 16 17 18 19 20 2 5 6 8 9 10 11 2", 24, 0)
    assert one.labels.tolist() == [14 if i == 1 else -1 for i in range(24)]
    assert one.types.tolist() == [int(9 <= i <= 15) for i in range(24)]
    assert one.padding_mask.tolist() == [int(i < 16) for i in range(24)]
    assert (one.is_random, one.truncated, one.loss_mask.tolist()) == (1, 1, [int(i == 1) for i in range(24)])
    two = sample(13, 0.15, True, 1235)
    assert two.text.tolist() == padded("1 5 6 8 9 10 11 12 2 14 15 16 17 18 3 2", 24, 0)
    assert two.labels.tolist() == [19 if i == 14 else -1 for i in range(24)]
    assert (two.is_random, two.truncated) == (0, 1)
    three = sample(21, 0.5, False, 99)
    assert three.text.tolist() == padded("1 5 6 8 3 10 11 12 3 3 15 3 17 3 3 3 2", 24, 0)
    labels = {4: 9, 8: 13, 9: 14, 10: 15, 11: 16, 13: 18, 14: 19, 15: 20}
    assert three.labels.tolist() == [labels.get(i, -1) for i in range(24)]
    assert not three.types.any() and (three.is_random, three.truncated) == (0, 0)


def t5(seed: int, vocabulary: Vocabulary = SMALL, decoder: int = 12) -> T5Sample:
    texts = Texts(TEXT, np.array([0]), BOUNDS, np.array([0, 3]), np.array([15]), [seed])
    return t5_samples(texts, 20, decoder, vocabulary, mask_prob=0.3)[0]


def test_golden_t5() -> None:
    one = t5(1234)
    assert one.text_enc.tolist() == padded("42 6 8 43 10 11 12 13 14 15 16 44 45 19 20", 20, 0)
    assert one.text_dec.tolist() == padded("40 42 5 43 9 44 17 45 18", 12, 0)
    assert one.labels.tolist() == padded("42 5 43 9 44 17 45 18 41", 12, -1)
    assert one.loss_mask.tolist() == [1] * 9 + [0] * 3 and one.truncated == 0
    two = t5(1237)
    assert two.text_enc.tolist() == padded("5 6 8 9 42 43 14 15 16 17 18 19 20", 20, 0)
    assert two.text_dec.tolist() == padded("40 42 10 11 12 43 13", 12, 0)
    assert two.labels.tolist() == padded("42 10 11 12 43 13 41", 12, -1)


def test_t5_says_what_does_not_suffice() -> None:
    few = Vocabulary(ROLES._replace(sentinels=(42,)), SMALL.continues, SMALL.ids)
    with pytest.raises(ValueError, match="--vocab-extra-ids 1: a sample has 4 spans"):
        t5(1234, few)
    with pytest.raises(ValueError, match="--decoder-seq-length 8: a sample takes 9"):
        t5(1234, decoder=8)


def test_streams_draw_as_numpy_does() -> None:
    seeds = np.arange(300)
    streams = Streams().seeded(seeds.tolist())
    below, coins = draw_below(streams, 1 + seeds % 37), draw_coins(streams, seeds % 9).tolist()
    for seed, stream in enumerate(streams):
        generator = np.random.RandomState(seed)
        assert below[seed] == generator.randint(0, 1 + seed % 37)
        for _ in range(seed % 9):
            assert coins.pop(0) == (generator.random_sample() < 0.5)
        orders = np.arange(seed), np.arange(seed)
        stream.shuffle(orders[0])
        generator.shuffle(orders[1])
        assert np.array_equal(*orders) and stream.geometric(0.2) == generator.geometric(0.2)
    assert not coins


def texts_of(rows: list[list[int]], target: int) -> Texts:
    """Samples of one sentence each; sample i has seed i."""
    bounds = np.array([0, *accumulate(map(len, rows))])
    return Texts(
        np.array([token for row in rows for token in row]),
        bounds[:-1],
        bounds,
        np.arange(len(rows) + 1),
        np.full(len(rows), target),
        list(range(len(rows))),
    )


def pair_one_by_one(sentences: list[list[int]], generator: np.random.RandomState, target: int) -> tuple[Any, ...]:
    """Both parts of a sample and whether they were exchanged, as the original cuts them: one token at a time."""
    cut = generator.randint(1, len(sentences)) if len(sentences) >= 3 else 1
    parts = [[token for sentence in some for token in sentence] for some in (sentences[:cut], sentences[cut:])]
    if swapped := bool(generator.random_sample() < 0.5):
        parts.reverse()
    while sum(map(len, parts)) > target:
        part = parts[0] if len(parts[0]) > len(parts[1]) else parts[1]
        part.pop(0 if generator.random_sample() < 0.5 else -1)
    return *parts, swapped


def test_parts_are_cut_as_one_by_one() -> None:
    """Of 400 samples drawn at random, which are not adjacent in the corpus."""
    draw = random.Random(3)
    samples = [
        [[draw.randint(4, 39) for _ in range(draw.randint(0, 30))] for _ in range(draw.randint(2, 9))]
        for _ in range(400)
    ]
    ids, begins, bounds = list[int](), list[int](), [0]
    for sample in samples:
        ids += [0] * draw.randint(0, 3)
        begins.append(len(ids))
        ids += [token for sentence in sample for token in sentence]
        bounds += [bounds[-1] + size for size in accumulate(map(len, sample))]
    targets = [draw.choice([2, 20, 60, 300]) for _ in samples]
    sentences = [0, *accumulate(map(len, samples))]
    seeds = list(range(len(samples)))
    texts = Texts(*map(np.array, (ids, begins, bounds, sentences, targets)), seeds)
    first, sizes, swapped = masked._pairs(texts, Streams().seeded(seeds), True)
    for seed, (sample, target) in enumerate(zip(samples, targets, strict=True)):
        parts = [ids[begin : begin + size] for begin, size in zip(first[seed], sizes[seed], strict=True)]
        assert (*parts, swapped[seed]) == pair_one_by_one(sample, np.random.RandomState(seed), target)
    assert 100 < sum(texts.sizes > targets) < 400 and 150 < swapped.sum() < 250


def test_statistics_of_masking() -> None:
    """10,000 samples: 15 % of the tokens, 80 / 10 / 10, never CLS or SEP, words whole, runs of one to three words."""
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary(ROLES, np.arange(1000) % 4 == 0, np.arange(1000))
    samples = bert_samples(
        texts_of(rng.integers(50, 1000, (10_000, 62)).tolist(), 62), 64, vocabulary, mask_prob=0.15, binary_head=False
    )
    masked = kept = changed = total = 0
    for sample in samples:
        chosen = sample.loss_mask.nonzero()[0]
        tokens, places = np.where(sample.labels >= 0, sample.labels, sample.text), chosen.tolist()
        assert len(places) <= 10 and places[0] > 0 and places[-1] < 63
        for place in places:
            assert place - 1 in places or place == 1 or tokens[place] % 4, "a span begins with a word"
            assert place + 1 in places or place == 62 or tokens[place + 1] % 4, "a span ends with a word"
        total += len(places)
        there = list(zip(sample.text[chosen].tolist(), tokens[chosen].tolist(), strict=True))
        masked += sum(found == 3 for found, _ in there)
        kept += sum(found == token for found, token in there)
        changed += sum(found not in (3, token) for found, token in there)
    assert total == 90_000, "62 x 0.15 = 9.3 is the limit, so nine are masked, of words of one to many tokens"
    for share, count in ((0.8, masked), (0.1, kept), (0.1, changed)):
        assert abs(count / total - share) < 5 * (share * (1 - share) / total) ** 0.5 + 1e-4


def word_by_word(
    tokens: list[int], vocabulary: Vocabulary, generator: np.random.RandomState, budget: float, draw: Any
) -> Iterator[list[int]]:
    """Spans of places as the original chooses them: words are lists, and every word is looked at."""
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token not in (ROLES.cls, ROLES.sep):
            if words and vocabulary.continues[token]:
                words[-1].append(place)
            else:
                words.append([place])
    order = list(range(len(words)))
    generator.shuffle(order)
    covered = set[int]()
    for start in order:
        if len(covered) + 1 > budget:
            break
        run, span = draw(), list[int]()
        while run and not 0 < len(span) <= budget - len(covered):
            span = [place for word in words[start : start + run] for place in word]
            run -= 1
        if len(covered) + len(span) <= budget and covered.isdisjoint(span):
            covered.update(span)
            yield span


def random_texts(count: int) -> list[list[int]]:
    """Texts of words of one to many tokens, with control tokens inside."""
    rng = random.Random(1)
    return [
        [rng.choice([1, 2]) if rng.random() < 0.05 else rng.randint(4, 39) for _ in range(rng.randint(0, 60))]
        for _ in range(count)
    ]


def test_spans_are_chosen_as_word_by_word() -> None:
    """Of 500 texts drawn at random, with any budget: the original's loop."""
    rng = random.Random(2)
    texts = random_texts(500)
    budgets = [rng.choice([0, 1, 9, rng.random() * 60]) for _ in texts]
    runs = np.ones((len(texts), 2 * 60 + 2 + SPARE), np.uint8)
    runs[:, :120:2] = [[rng.randint(1, 10) for _ in range(60)] for _ in texts]
    words = WordIndex.of(SMALL.kinds[np.concatenate(texts).astype(int)], np.cumsum([len(tokens) for tokens in texts]))
    order = words.shuffled(Streams().seeded(range(len(texts))))
    drawn, begin = np.full(len(words.positions), -1), 0
    chosen, positions = choose_words(words, order, np.array(budgets, int), runs)
    drawn[chosen] = positions
    drawn = drawn.tolist()
    for seed, (tokens, budget) in enumerate(zip(texts, budgets, strict=True)):
        lengths = iter(runs[seed, :120:2].tolist())
        expected = list(word_by_word(tokens, SMALL, np.random.RandomState(seed), budget, lengths.__next__))
        places = [place for place, token in enumerate(tokens) if token not in (ROLES.cls, ROLES.sep)]
        found = dict[int, list[int]]()
        for place, draw in zip(places, drawn[begin : begin + len(places)], strict=True):
            found.setdefault(draw, []).append(place)
        found.pop(-1, None)
        assert [found[draw] for draw in sorted(found)] == expected
        begin += len(places)


def masked_one_by_one(tokens: list[int], generator: np.random.RandomState, prob: float, target: int) -> list[int]:
    """The tokens of a BERT sample with masks, drawn as the original draws them, one number after the other."""
    found, budget = list(tokens), min(prob * target, max(1, round(len(tokens) * prob)))
    weights = np.array([1, 1 / 2, 1 / 3]) / (1 + 1 / 2 + 1 / 3)

    def run() -> int:
        return int(generator.choice([1, 2, 3], p=weights / weights.sum()))

    for span in word_by_word(tokens, SMALL, generator, budget, run):
        for place in span:
            if generator.random_sample() < 0.8:
                found[place] = ROLES.mask
            elif generator.random_sample() >= 0.5:
                found[place] = int(SMALL.ids[generator.randint(0, len(SMALL.ids))])
    return found


@pytest.mark.parametrize("draws", [5, 400])
def test_masks_are_drawn_as_one_by_one(draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 texts in one call and alone; also if more numbers are needed than were drawn at first."""
    exhausted = list[int]()

    def with_enough(attempt: Any, draw: Any, _: int) -> Any:
        def counted(outputs: Any) -> Any:
            try:
                return attempt(outputs)
            except Exhausted:
                exhausted.append(outputs.shape[1])
                raise

        return masking.with_enough(counted, draw, draws)

    monkeypatch.setattr(masked, "with_enough", with_enough)
    rows = random_texts(300)
    for prob in (0.15, 0.7):
        together = bert_samples(texts_of(rows, 64), 70, SMALL, mask_prob=prob, binary_head=False)
        for seed, (row, sample) in enumerate(zip(rows, together, strict=True)):
            tokens = [ROLES.cls, *row, ROLES.sep]
            expected = masked_one_by_one(tokens, np.random.RandomState(seed), prob, 64)
            assert sample.text.tolist() == expected + [0] * (70 - len(expected))
    alone = texts_of([rows[3]], 64)._replace(seeds=[3])
    assert np.array_equal(bert_samples(alone, 70, SMALL, mask_prob=0.7, binary_head=False)[0].rows, together[3].rows)
    assert bool(exhausted) == (draws == 5)


def corpus(tmp_path: Path, tokenizer, text: Path) -> IndexedDataset:  # type: ignore[no-untyped-def]
    """A text of one sentence a line, a blank line between documents."""
    with IndexedWriter(tmp_path / "a", token_dtype(tokenizer.vocab_size)) as writer:
        for document in text.read_text().split("\n\n"):
            writer.add([tokenizer.encode(line) for line in document.split("\n")])
    return IndexedDataset(tmp_path / "a")


def test_real_text(tmp_path: Path) -> None:
    tokenizer = build(
        tokenizer="BertWordPieceLowerCase", vocab_file=shared("bert/bert-base-uncased-vocab.txt"), vocab_extra_ids=100
    )
    data = corpus(tmp_path, tokenizer, shared("bert_tfrecord/sample_text.txt"))
    vocabulary = Vocabulary.of(tokenizer)

    def mapped(longest: int, least: int):  # type: ignore[no-untyped-def]
        return sentence_mapping(
            data.document_index, data.lengths, samples=200, max_length=longest, short_prob=0.1, seed=5,
            min_sentences=least,
        )  # fmt: skip

    bert = BertDataset(data, mapped(125, 2), vocabulary, seq_length=128, seed=5)
    assert len(bert) >= 200
    swapped, together = 0, bert.samples(range(200))
    for i in range(200):
        sample = bert[i]
        whole = np.where(sample.labels >= 0, sample.labels, sample.text)[sample.padding_mask == 1]
        assert whole[0] == 101 and whole[-1] == 102 and (whole == 102).sum() == 2
        assert np.array_equal(sample.rows, together[i].rows) and sample[1:] == together[i][1:]
        swapped += sample.is_random
    assert 60 < swapped < 140
    unmapped = BertDataset(
        IndexedDataset(tmp_path / "a", mmap=False), mapped(125, 2), vocabulary, seq_length=128, seed=5
    )
    assert np.array_equal(unmapped.samples(range(200)).rows, together.rows)
    blocks = bert.samples([*range(200)] * 6)  # more than are made at once
    assert len(blocks) == 1200 and all(np.array_equal(blocks[i].rows, together[i % 200].rows) for i in (0, 1100, 1199))
    one, other = (vars(bert.collate(some, 4)) for some in (together[3:9], list(together)[3:9]))
    assert all(one[name] is other[name] or one[name].equal(other[name]) for name in one) and len(one["tokens"]) == 6
    with ThreadPoolExecutor(4) as threads:  # each has a generator of its own
        for i, sample in zip(range(200), threads.map(bert.__getitem__, range(200)), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(sample, bert[i], strict=True))
    batch = bert.collate([bert[i] for i in (3, 4)], 7)
    assert batch.samples.tolist() == [7, 8] and batch.loss_weights.sum(1).tolist() == [
        bert[i].loss_mask.sum() for i in (3, 4)
    ]
    assert batch.predicted.shape == (2, 20) and batch.loss_weights.gather(1, batch.predicted).sum() == sum(
        bert[i].loss_mask.sum() for i in (3, 4)
    )
    assert batch.tokens[0, batch.lengths[0] - 1] == 102 and not batch.tokens[0, batch.lengths[0] :].any()
    t5 = T5Dataset(data, mapped(126, 1), vocabulary, seq_length=128, decoder_seq_length=64, seed=5)
    for i in range(200):
        sample = t5[i]
        spans, current = {}, None
        for token in sample.labels[sample.loss_mask == 1][:-1].tolist():
            if token in vocabulary.roles.sentinels:
                current = spans.setdefault(token, [])
            else:
                current.append(token)
        restored = [t for token in sample.text_enc.tolist() for t in spans.get(token, [token])]
        first, last, target = t5._mapping[i].tolist()
        original = [int(t) for s in range(first, last) for t in data[s]][:target]
        assert restored[: len(original)] == original and not any(restored[len(original) :])
    pair = t5.collate([t5[0], t5[1]], 0)
    assert pair.tokens[0, 0] == vocabulary.roles.bos and pair.labels[0, pair.lengths[0] - 1] == vocabulary.roles.eos
    assert pair.encoder_lengths.tolist() == [int((t5[i].text_enc > 0).sum()) for i in range(2)]
    with pytest.raises(ValueError, match="--vocab-extra-ids 0"):
        bare = Vocabulary(vocabulary.roles._replace(sentinels=()), vocabulary.continues, vocabulary.ids)
        T5Dataset(data, mapped(126, 1), bare, seq_length=128, decoder_seq_length=64, seed=5)
    with pytest.raises(ValueError, match="NullTokenizer: has no CLS"):
        Vocabulary.of(build(tokenizer="NullTokenizer", vocab_size=9))


def sentences(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A corpus of sentences as `mega preprocess --split-sentences` writes it, and its tokenizer's options."""
    options = {
        "tokenizer": "BertWordPieceLowerCase",
        "vocab_file": shared("bert/bert-base-uncased-vocab.txt"),
        "vocab_extra_ids": 100,
    }
    lines = [line for line in shared("bert_tfrecord/sample_text.txt").read_text().split("\n") if line]
    documents = tmp_path / "documents.txt"
    documents.write_text("\n\n".join("\n".join(lines[i : i + 4]) for i in range(0, len(lines), 4)))
    corpus(tmp_path, build(**options), documents)
    return str(tmp_path / "a"), options


def made(
    data: DataConfig, masking: MaskingConfig, options: dict[str, Any], samples: tuple[int, int, int], pairs: bool = True
) -> Datasets:
    tokenizer = build(**options)
    size = {"seq_length": 64, "seed": 5, "vocab": tokenizer.vocab_size, "samples": samples}
    return build_datasets(data, **size, tokenizer=tokenizer, masking=masking, pairs=pairs)  # type: ignore[arg-type]


def test_a_deferred_order_is_computed_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the checks and messages are those of the order, with about its number of epochs."""
    monkeypatch.setattr(mapping, "_COUNTED", 1000)
    prefix, options = sentences(tmp_path)
    tokenizer, cache = build(**options), tmp_path / "cache"
    words = {"one": (prefix,), "blend": ("0.5", prefix, "0.5", prefix)}
    for kind, path in [(kind, path) for kind in ("bert", "gpt") for path in words.values()]:
        data = DataConfig(data_path=path, split="1,0,0", data_cache=str(cache))
        masking = MaskingConfig(sample_kind=kind)
        size = {"seq_length": 64, "seed": 5, "vocab": tokenizer.vocab_size, "samples": (4000, 0, 0)}
        deferred = build_datasets(data, **size, tokenizer=tokenizer, masking=masking, defer=True)
        assert not cache.exists() and deferred.repeats
        full = build_datasets(data, **size, tokenizer=tokenizer, masking=masking)
        epochs = [[int(note.split()[-2]) for note in made.notes] for made in (deferred, full)]
        assert all(abs(about - exact) <= 1 for about, exact in zip(*epochs, strict=True)), epochs
        assert [("about" in note) for note in deferred.notes] == [kind == "bert"] * ((len(path) + 1) // 2)
        assert is_blend(deferred.train) == is_blend(full.train) == (len(path) > 1)
        assert len(deferred.train) == len(full.train)
        one, other = deferred.train[7], full.train[7]
        assert np.array_equal(one, other) if kind == "gpt" else np.array_equal(one.rows, other.rows)
        shutil.rmtree(cache)


def test_datasets_of_a_config(tmp_path: Path) -> None:
    """Documents are shared out, the rest is Megatron-LM's: mapping of 61 (or 62) tokens, samples by seed and number."""
    prefix, options = sentences(tmp_path)
    data = DataConfig(data_path=(prefix,), split="60, 30, 10", data_cache=str(tmp_path / "cache"))
    bert = made(data, MaskingConfig(sample_kind="bert"), options, (50, 20, 10))
    corpus = IndexedDataset(prefix)
    bounds = split_boundaries("60, 30, 10", corpus.documents)
    for dataset, first, last, count in zip(
        (bert.train, bert.valid, bert.test), bounds, bounds[1:], (50, 20, 10), strict=False
    ):
        entries = sentence_mapping(
            corpus.document_index[first : last + 1], corpus.lengths, samples=count, max_length=61, short_prob=0.1,
            seed=5, min_sentences=2,
        )  # fmt: skip
        expected = BertDataset(corpus, entries, Vocabulary.of(build(**options)), seq_length=64, seed=5)
        assert dataset is not None and len(dataset) == len(entries) >= count
        assert all(np.array_equal(a, b) for i in range(count) for a, b in zip(dataset[i], expected[i], strict=True))
    assert any("its train part has" in note and "epochs" in note for note in bert.notes)
    batches = Batches(bert.train, micro_batch=2, dp_index=1, dp_size=2, vocab=40000)
    batch = batches.take(4, 2)[1]
    assert isinstance(batch, MaskedBatch) and batch.samples.tolist() == [10, 11] and batch.tokens.shape == (2, 64)
    t5 = made(data, MaskingConfig(sample_kind="t5", decoder_seq_length=40), options, (9, 0, 0)).train
    batch = Batches(t5, micro_batch=3, vocab=40000).take(3, 1)[0]
    assert isinstance(batch, EncoderDecoderBatch) and batch.tokens.shape == (3, 40)


def test_blend_of_masked_corpora(tmp_path: Path) -> None:
    prefix, options = sentences(tmp_path)
    (tmp_path / "b").mkdir()
    other, _ = sentences(tmp_path / "b")
    data = DataConfig(train_data=("0.25", prefix, "0.75", other))
    blend = made(data, MaskingConfig(sample_kind="bert"), options, (40, 0, 0), pairs=False).train
    assert isinstance(blend, BlendedDataset) and len(blend) >= 40
    assert isinstance(Batches(blend, micro_batch=4, vocab=40000).take(0, 1)[0], MaskedBatch)
    unweighted = made(DataConfig(train_data=(prefix, other)), MaskingConfig(sample_kind="bert"), options, (8, 0, 0))
    assert len(unweighted.train) >= 8


def test_what_a_masked_corpus_needs(tmp_path: Path) -> None:
    prefix, options = sentences(tmp_path)
    data = DataConfig(train_data=(prefix,))
    bert = MaskingConfig(sample_kind="bert")
    with pytest.raises(ValueError, match="--sample-kind bert: needs a tokenizer"):
        build_datasets(data, seq_length=64, seed=1, vocab=40000, samples=(1, 0, 0), masking=bert)
    with pytest.raises(ValueError, match="--vocab-extra-ids 0: must be greater than 0 for T5"):
        made(data, MaskingConfig(sample_kind="t5"), options | {"vocab_extra_ids": 0}, (1, 0, 0))
    with pytest.raises(ValueError, match="--seq-length 4: must be at least 5"):
        recipe(bert, 4, 1, build(**options))
    with IndexedWriter(tmp_path / "whole", np.dtype("<u2")) as writer:
        writer.add([[5, 6]])
    with pytest.raises(ValueError, match=r"--train-data .*whole: its train part: no document has 2 or more sentences"):
        made(DataConfig(train_data=(str(tmp_path / "whole"),)), bert, options, (1, 0, 0))


def test_samples_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix, options = sentences(tmp_path)
    show = (
        f"data show-sample --data-path {prefix} --split 1 --seq-length 64 --number 3 --tokenizer-type "
        f"BertWordPieceLowerCase --vocab-file {options['vocab_file']} --vocab-extra-ids 100 --sample-kind"
    ).split()
    assert main([*show, "bert", "--bert-no-binary-head"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "sample 3" and said[3].split()[:2] == ["'[CLS]'", "101"]
    assert any(line.split()[0] == "'[MASK]'" and len(line.split()) == 4 for line in said[3:])
    assert main([*show, "t5", "--count", "2"]) == 0
    said = capsys.readouterr().out
    assert "sample 4" in said and said.count("decoder's token") == 2 and "'<extra_id_0>'" in said
    train = f"pretrain --model tiny-gpt --sample-kind bert --data-path {prefix} --steps 1 --lr 1 --micro-batch 1"
    assert main([*train.split(), "--vocab", "99"]) == 2
    assert "--sample-kind bert: needs --family bert" in capsys.readouterr().err
