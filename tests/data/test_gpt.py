"""GPT samples, what is read off their tokens, batches for every coordinate, and the datasets of a run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega.core.config.sections import DataConfig
from mega.core.data.batches import Batches
from mega.core.data.build import Datasets, build_datasets, parse_blend, samples_requested
from mega.core.data.dataset import BlendedDataset, MockDataset
from mega.core.data.gpt import GPTDataset, document_numbers, loss_weights, positions
from mega.core.data.indexed import IndexedDataset, token_dtype
from mega.core.data.order import sample_order
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.ops.attention import fused
from mega.core.ops.mask import AttentionMask

LENGTHS = [5, 3, 8, 2, 7, 4, 6, 9]


def corpus(prefix: Path, lengths: list[int] = LENGTHS, base: int = 0) -> Path:
    """Documents whose token number j of document i is base + 10 i + j: every token shows where it is from."""
    with IndexedWriter(prefix, token_dtype(60000)) as writer:
        for i, length in enumerate(lengths):
            writer.add([[base + 10 * i + j for j in range(length)]])
    return prefix


def stream_samples(prefix: Path, seq_length: int, samples: int, seed: int) -> list[list[int]]:
    """The samples of a corpus from the definition: documents laid end to end, cut, shuffled."""
    data = IndexedDataset(prefix)
    found = sample_order(data.lengths, 0, len(data), seq_length=seq_length, samples=samples, seed=seed)
    stream = np.concatenate([data[i] for i in found.documents]).tolist()
    return [stream[q * seq_length : (q + 1) * seq_length + 1] for q in found.shuffle.tolist()]


@pytest.mark.parametrize(("seq_length", "samples"), [(4, 10), (4, 19), (1, 5), (13, 9), (43, 1)])
def test_samples_are_the_stream_cut_and_shuffled(tmp_path: Path, seq_length: int, samples: int) -> None:
    data = IndexedDataset(corpus(tmp_path / "a"))
    found = sample_order(data.lengths, 0, 8, seq_length=seq_length, samples=samples, seed=7)
    dataset = GPTDataset(data, found, seq_length)
    assert [dataset[i].tolist() for i in range(len(dataset))] == stream_samples(tmp_path / "a", seq_length, samples, 7)
    assert dataset[0].dtype == np.int64
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[outside]


def test_empty_sequences_are_stepped_over(tmp_path: Path) -> None:
    """No writer of ours makes them, others may."""
    with IndexedWriter(tmp_path / "a", token_dtype(100)) as writer:
        writer.extend(np.arange(7), np.array([0, 3, 0, 0, 4, 0]), np.ones(6, np.int64))
    data = IndexedDataset(tmp_path / "a")
    dataset = GPTDataset(data, sample_order(data.lengths, 0, 6, seq_length=2, samples=9, seed=0), 2)
    assert [dataset[i].tolist() for i in range(len(dataset))] == stream_samples(tmp_path / "a", 2, 9, 0)


def test_golden_masks() -> None:
    tokens = np.array([5, 6, 0, 7, 8, 0])
    assert loss_weights(tokens, 0).tolist() == [1, 1, 0, 1, 1, 0]
    assert positions(tokens, 0).tolist() == [0, 1, 2, 0, 1, 2]
    assert document_numbers(tokens, 0).tolist() == [0, 0, 0, 1, 1, 1]
    assert loss_weights(tokens, None).tolist() == [1] * 6 and positions(tokens, None).tolist() == list(range(6))


@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=3))
def test_positions_and_documents_follow_each_eod(rows: list[list[int]]) -> None:
    tokens = np.array(rows)
    for row, place, document in zip(rows, positions(tokens, 0), document_numbers(tokens, 0), strict=True):
        at, number = 0, 0
        for i, token in enumerate(row):
            assert (place[i], document[i]) == (at, number)
            at, number = (0, number + 1) if token == 0 else (at + 1, number)


class Numbers:
    """A dataset whose sample i is i, i + 1, ..."""

    def __init__(self, size: int, seq_length: int = 3) -> None:
        self.size, self.length = size, seq_length + 1

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> Any:
        assert 0 <= sample < self.size
        return np.arange(sample, sample + self.length)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_every_sample_once_in_order_in_any_layout(b: int, d: int, steps: list[int], ahead: bool) -> None:
    total = sum(steps) * b * d
    ranks = [
        Batches(Numbers(total), micro_batch=b, vocab=10**6, dp_index=r, dp_size=d, read_ahead=ahead) for r in range(d)
    ]
    consumed, seen = 0, []
    for microbatches in steps:
        taken = [rank.take(consumed, microbatches) for rank in ranks]
        for number in range(microbatches):
            for batch in (rank[number] for rank in taken):
                assert batch.tokens[:, 0].tolist() == batch.samples.tolist()
                seen += batch.samples.tolist()
        consumed += microbatches * b * d
    assert seen == list(range(total))
    with pytest.raises(ValueError, match=f"has {total} samples"):
        ranks[0].take(consumed, 1)


def test_a_batch() -> None:
    batch = Batches(Numbers(8), micro_batch=2, vocab=100, dp_index=1, dp_size=2).take(4, 1)[0]
    assert batch.tokens.tolist() == [[6, 7, 8], [7, 8, 9]] and batch.labels.tolist() == [
        [7, 8, 9],
        [8, 9, 10],
    ]
    assert batch.positions.tolist() == [[0, 1, 2]] * 2 and batch.loss_weights.tolist() == [[1.0] * 3] * 2
    assert batch.samples.tolist() == [6, 7] and batch.documents is None
    assert [t.dtype for t in (batch.tokens, batch.labels, batch.positions, batch.samples)] == [torch.int64] * 4
    assert batch.loss_weights.dtype == torch.float32 and batch.labels.is_contiguous()


def test_a_batch_with_documents() -> None:
    flags = {"eod_mask_loss": True, "reset_positions": True, "reset_attention": True}
    batch = Batches(Numbers(8), micro_batch=1, vocab=100, eod=6, **flags).take(5, 1)[0]  # tokens 5 6 7
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 1]] and batch.positions.tolist() == [[0, 1, 0]]
    assert batch.loss_weights.tolist() == [[1, 0, 1]]
    with pytest.raises(ValueError, match="end-of-document"):
        Batches(Numbers(8), micro_batch=1, vocab=100, **flags)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    batches = Batches(Numbers(8), micro_batch=1, vocab=10)
    batches.take(6, 1)
    with pytest.raises(ValueError, match=r"token ids 7 \.\. 10"):
        batches.take(7, 1)


def test_cyclic_order_is_each_share_shuffled_by_the_epoch() -> None:
    b, d, total = 2, 2, 11  # 2 groups of 4 an epoch, shares of 4, 3 samples left over
    ranks = [Batches(Numbers(total), micro_batch=b, vocab=99, dp_index=r, dp_size=d, order="cyclic") for r in range(d)]
    for epoch in range(3):
        for r, rank in enumerate(ranks):
            generator = torch.Generator()
            generator.manual_seed(epoch)
            expected = [4 * r + entry for entry in torch.randperm(4, generator=generator).tolist()]
            found = [batch.tokens[:, 0].tolist() for batch in rank.take(8 * epoch, 2)]
            assert found == [expected[:2], expected[2:]]
            assert rank.take(8 * epoch + 4, 1)[0].tokens[:, 0].tolist() == expected[2:]
    with pytest.raises(ValueError, match=r"whole rounds of 4 samples.*at sample 2"):
        ranks[0].take(2, 1)
    with pytest.raises(ValueError, match="takes 4"):
        Batches(Numbers(3), micro_batch=2, vocab=99, dp_size=2, order="cyclic").take(0, 1)


@pytest.mark.parametrize(("b", "d", "total"), [(2, 2, 11), (1, 3, 11), (2, 3, 16)])
def test_cyclic_order_without_sharding_is_taken_in_turn(b: int, d: int, total: int) -> None:
    """Every rank plays Megatron-LM's sampler from epoch to epoch, as its loader does: a rank may have a microbatch
    more in an epoch than others."""

    def played(rank: int, count: int) -> list[list[int]]:
        group, consumed, found = b * d, 0, []
        while len(found) < count:
            epoch, within = divmod(consumed, total - total % group)
            generator = torch.Generator()
            generator.manual_seed(epoch)
            numbers = torch.randperm(total // b * b, generator=generator).tolist()[within:][rank::d]
            for at in range(0, len(numbers) - b + 1, b):
                found.append(numbers[at : at + b])
                consumed += group
        return found[:count]

    for rank in range(d):
        batches = Batches(
            Numbers(total), micro_batch=b, vocab=99, dp_index=rank, dp_size=d, order="cyclic", sharding=False
        )
        found = [batches.take(number * b * d, 1)[0].tokens[:, 0].tolist() for number in range(12)]
        assert found == played(rank, 12)


def test_mock_samples_are_a_function_of_seed_and_number() -> None:
    mock = MockDataset(samples=5, seq_length=7, vocab=11, seed=3)
    assert len(mock) == 5 and mock[2].shape == (8,) and mock[2].dtype == np.int64
    assert (mock[2] == MockDataset(samples=9, seq_length=7, vocab=11, seed=3)[2]).all()
    assert (mock[2] != mock[3]).any() and int(max(mock[i].max() for i in range(5))) < 11
    with pytest.raises(IndexError):
        mock[5]


def test_blended_samples() -> None:
    blend = BlendedDataset([Numbers(5), Numbers(9)], np.array([1, 0, 1], np.int16), np.array([0, 0, 1]))
    assert len(blend) == 3 and [int(blend[i][0]) for i in range(3)] == [0, 0, 1]
    with pytest.raises(IndexError):
        blend[3]


def build(samples: tuple[int, int, int] = (10, 0, 0), seq_length: int = 4, vocab: int = 1000, **data: Any) -> Datasets:
    return build_datasets(DataConfig(**data), seq_length=seq_length, seed=1234, vocab=vocab, samples=samples)


def test_samples_requested() -> None:
    asked = {"steps": 100, "global_batch": 8, "eval_interval": 50, "eval_iters": 5}
    assert samples_requested(**asked) == (800, 120, 40)
    assert samples_requested(**asked, train_samples=333)[0] == 333


def test_split_of_one_corpus(tmp_path: Path) -> None:
    prefix = str(corpus(tmp_path / "a", LENGTHS * 4))
    made = build((20, 3, 0), data_path=(prefix,), split="75,25,0", vocab=1000)
    assert made.train is not None and made.valid is not None and made.test is None and not made.notes
    splits = {"train": made.train, "valid": made.valid}
    tokens = {name: {t for i in range(len(d)) for t in d[i].tolist()} for name, d in splits.items()}
    assert max(tokens["train"]) < 240 <= min(tokens["valid"])  # document 24 begins with 240
    assert len(list((tmp_path / "index-cache").glob("*.safetensors"))) == 2
    again = build((20, 3, 0), data_path=(prefix,), split="75,25,0", vocab=1000)
    assert again.train is not None
    assert all((again.train[i] == made.train[i]).all() for i in range(len(made.train)))


def test_blend_draws_from_every_corpus_by_its_weight(tmp_path: Path) -> None:
    first, second = str(corpus(tmp_path / "a")), str(corpus(tmp_path / "b", base=500))
    made = build((20, 0, 0), data_path=("1", first, "3", second), split="1", vocab=1000)
    assert made.train is not None and len(made.train) == 6 + 16
    sources = [int(made.train[i][0] >= 500) for i in range(8)]
    assert sources == [1, 0, 1, 1, 0, 1, 1, 1]
    ones = [made.train[i].tolist() for i in range(len(made.train)) if made.train[i][0] < 500]
    assert ones == stream_samples(tmp_path / "a", 4, 6, 1234)[: len(ones)]


def test_every_sample_of_a_blend_can_be_read(tmp_path: Path) -> None:
    """Not only the one that was asked for: the cyclic order shuffles them all. Each corpus has one sample."""
    words = [str(word) for i, weight in enumerate((4.664, 3.454, 0.818, 1.195)) for word in (weight, tmp_path / f"{i}")]
    for prefix in words[1::2]:
        corpus(Path(prefix), [5])
    made = build((1, 0, 0), data_path=tuple(words), split="1,0,0", vocab=1000)
    assert made.train is not None
    assert [len(made.train[i]) for i in range(len(made.train))] == [5, 5, 5]


def test_part_of_a_blend_that_is_empty_is_left_out(tmp_path: Path) -> None:
    large, tiny = str(corpus(tmp_path / "a", LENGTHS * 10)), str(corpus(tmp_path / "b", [9], base=900))
    made = build((30, 5, 0), data_path=("1", large, "1", tiny), split="90,10,0")
    assert made.valid is not None and max(int(made.valid[i].max()) for i in range(5)) < 900
    assert f"--data-path {tiny}: its valid part is empty; the other corpora have its share" in made.notes
    made = build((30, 0, 0), data_path=(large, tiny), split="49,51,0")
    assert f"--data-path {tiny}: its train part is empty; the other corpora have its share" in made.notes
    with pytest.raises(ValueError, match="its train part is empty, but its weight is 9;"):
        build((30, 0, 0), data_path=("1", large, "9", tiny), split="49,51,0")


def test_corpus_of_each_split(tmp_path: Path) -> None:
    first, second = str(corpus(tmp_path / "a")), str(corpus(tmp_path / "b", base=500))
    made = build((10, 10, 0), train_data=(first,), valid_data=(second,))
    assert made.train is not None and made.valid is not None
    assert max(int(made.train[i].max()) for i in range(10)) < 500 <= min(int(made.valid[i].min()) for i in range(10))


def test_epochs_and_empty_splits_are_reported(tmp_path: Path) -> None:
    made = build((50, 5, 0), data_path=(str(corpus(tmp_path / "a")),))
    assert made.valid is None
    assert ["take 5 epochs" in note or "is empty" in note for note in made.notes] == [True, True]


def test_a_corpus_that_is_empty_is_named_by_its_own_flag(tmp_path: Path) -> None:
    whole, empty = str(corpus(tmp_path / "a")), str(corpus(tmp_path / "b", []))
    made = build((10, 5, 5), train_data=(whole,), valid_data=(empty,), valid_sets=(f"books={empty}",))
    assert f"--valid-data {empty}: is empty" in made.notes and f"--valid-sets {empty}: is empty" in made.notes
    with pytest.raises(ValueError, match=f"--train-data {empty}: is empty$"):
        build((10, 0, 0), train_data=(empty,))


def test_a_part_of_less_than_a_sample_can_be_repeated(tmp_path: Path) -> None:
    prefix = str(corpus(tmp_path / "a", [3]))
    with pytest.raises(
        ValueError, match="has 3 tokens, needs 5 for one sample of --seq-length 4; --repeat-short-parts"
    ):
        build((2, 0, 0), data_path=(prefix,), split="1,0,0")
    made = build((2, 0, 0), data_path=(prefix,), split="1,0,0", repeat_short_parts=True)
    assert made.train is not None and made.repeats
    assert sorted(made.train[i].tolist() for i in range(2)) == sorted(stream_samples(tmp_path / "a", 4, 2, 1234))
    assert {len(made.train[i]) for i in range(2)} == {5}


def test_a_blend_of_core_has_its_length(tmp_path: Path) -> None:
    first, second = str(corpus(tmp_path / "a")), str(corpus(tmp_path / "b", base=500))
    made = build((10, 0, 0), data_path=("1", first, "2", second), split="1", order="core")
    assert made.train is not None and len(made.train) == 4 + 7


def test_mock_data() -> None:
    made = build((10, 0, 2), mock_data=True, vocab=7, seq_length=40)
    assert made.train is not None and made.valid is None and made.test is not None and len(made.train) == 10
    assert (made.train[0] != made.test[0]).any()


def test_bad_data(tmp_path: Path) -> None:
    prefix = str(corpus(tmp_path / "a"))
    corpus(tmp_path / "b_text_document")
    cut = corpus(tmp_path / "cut")
    Path(f"{cut}.bin").write_bytes(Path(f"{cut}.bin").read_bytes()[:-2])
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "--data-path is missing"),
        ({"data_path": (str(tmp_path / "no"),)}, "--data-path .*no.bin or its .idx does not exist"),
        ({"data_path": (f"{prefix}.bin",)}, f"did you mean {prefix}\\?"),
        ({"data_path": (str(tmp_path / "b"),)}, "did you mean .*b_text_document"),
        ({"data_path": (str(cut),)}, "--data-path .*cut.bin: has 86 bytes"),
        ({"data_path": ("1", prefix, prefix)}, "prefixes, or weight prefix"),
        ({"data_path": ("0", prefix, "1", prefix)}, "weights above 0"),
        ({"data_path": ("nan", prefix)}, "weights above 0"),
        ({"data_path": ("1e308", prefix, "1e308", prefix)}, "the weights' sum must be a finite number"),
        ({"data_path": (prefix,), "split": "x"}, "--split"),
        ({"data_path": (prefix,), "split": "0,1,0"}, "train part of --split .* is empty"),
        ({"data_path": (prefix,), "train_data": (prefix,)}, "cannot be combined with"),
        ({"data_path": (prefix,), "vocab": 78}, "token ids 0 .. 78, but the vocabulary's are 0 .. 77"),
        (
            {"data_path": (prefix,), "split": "1", "seq_length": 44},
            "44 tokens, needs 45.*other shares than --split 1",
        ),
        (
            {"data_path": (prefix,), "split": "8,0,1", "samples": (0, 0, 2), "seq_length": 44},
            "; --split 95,5,0 makes no test",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            build(**arguments)


def test_parse_blend() -> None:
    assert parse_blend("--data-path", ("a",)) == [(None, "a")]
    assert parse_blend("--data-path", ("a", "b", "c")) == [(None, "a"), (None, "b"), (None, "c")]
    assert parse_blend("--data-path", ("0.2", "a", "3", "b")) == [(0.2, "a"), (3.0, "b")]


def calls_of(work: Callable[[], object]) -> Counter[str]:
    """How often `work` calls what, in Python and in C: its cost apart from how busy the machine is."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            found[frame.f_code.co_name if event == "call" else getattr(called, "__name__", "")] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_sample_is_read_from_the_map(tmp_path: Path) -> None:
    """In some ten microseconds, so with few calls however many sequences there are, and none that opens or reads."""

    def calls(sequences: int) -> Counter[str]:
        data = IndexedDataset(corpus(tmp_path / f"{sequences}", [700] * sequences))
        order = sample_order(data.lengths, 0, sequences, seq_length=2048, samples=15, seed=0)
        dataset = GPTDataset(data, order, 2048)
        dataset[0]
        return calls_of(lambda: dataset[1])

    few, many = calls(60), calls(3000)
    assert few.total() < 100 and many.total() < few.total() + 20, (few, many)
    assert not {"open", "read", "pread", "readinto", "seek", "fromfile"} & {*few, *many}


def test_documents_apart_cost_the_same_however_many() -> None:
    """Numbers and positions of documents, and attention within them: rows of 2 documents against rows of 1,000."""
    length = 2000
    q = torch.randn(1, length, 2, 16)

    def calls(every: int) -> int:
        text = np.arange(1, length + 2) % every
        dataset = [text.astype(np.int64)] * 8
        batches = Batches(dataset, micro_batch=8, vocab=length, eod=0, reset_positions=True, reset_attention=True)

        def work() -> None:
            batch = batches.take(0, 1)[0]
            assert batch.documents is not None and int(batch.documents[0, -1]) + 1 == -(-length // every)
            documents = batch.documents[:1]
            fused(q, q, q, AttentionMask(q_documents=documents, k_documents=documents))

        work()
        return calls_of(work).total()

    assert calls(2) == calls(1000)
