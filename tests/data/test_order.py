"""Splits, GPT indices and blends: golden vectors, and plain rewritings of the rules on random small cases."""

from __future__ import annotations

import math
import random
import tarfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega.core.config.sections import DataConfig
from mega.core.data import order
from mega.core.data.build import build_datasets
from mega.core.data.order import (
    blend_order,
    blend_parts,
    blend_samples,
    blend_shares,
    entries_served,
    epochs,
    sample_order,
    split_boundaries,
    split_shares,
)
from tests.support.shared import shared

LENGTHS = np.array([5, 3, 8, 2, 7, 4, 6, 9], np.int32)
SPLITS = ("969, 30, 1", "949,50,1", "98,2,0", "90/10")
BOUNDARIES = {
    1: ["0 1 1 1", "0 1 1 1", "0 1 1 1", None],
    7: ["0 7 7 7", "0 7 7 7", "0 7 7 7", "0 6 7 7"],
    10: ["0 10 10 10", "0 10 10 10", "0 10 10 10", "0 9 10 10"],
    55: ["0 53 55 55", "0 52 55 55", "0 54 55 55", "0 49 55 55"],
    100: ["0 97 100 100", "0 95 100 100", "0 98 100 100", "0 90 100 100"],
    1000: ["0 969 999 1000", "0 949 999 1000", "0 980 1000 1000", "0 900 1000 1000"],
    1234: ["0 1196 1233 1234", "0 1171 1233 1234", "0 1209 1234 1234", "0 1111 1234 1234"],
    99999: ["0 96899 99899 99999", "0 94899 99899 99999", "0 97999 99999 99999", "0 89999 99999 99999"],
}


@pytest.mark.parametrize(("items", "rows"), BOUNDARIES.items())
def test_golden_splits(items: int, rows: list[str | None]) -> None:
    for split, row in zip(SPLITS, rows, strict=True):
        if row:
            assert split_boundaries(split, items) == tuple(map(int, row.split()))


def test_core_rounds_sums_of_shares() -> None:
    """10,000 drawn splits and blends against the rule of Megatron-core, in exact numbers where a tie is not near."""
    assert split_boundaries("949,50,1", 10, core=True) == (0, 9, 10, 10) != split_boundaries("949,50,1", 10)
    rng, others = random.Random(22), 0
    for _ in range(10_000):
        parts, items = [rng.randrange(1000) for _ in range(3)], rng.randrange(1, rng.choice([10, 100, 10**6]))
        parts[0] += 1
        exact = [Fraction(sum(parts[: i + 1]) * items, sum(parts)) for i in range(3)]
        found = split_boundaries(",".join(map(str, parts)), items, core=True)
        assert all(abs(bound - share) <= Fraction(1, 2) for bound, share in zip(found[1:], exact, strict=True))
        assert found[0] == 0 <= found[1] <= found[2] <= found[3] == items
        others += found != split_boundaries(",".join(map(str, parts)), items)
        weights = [Fraction(rng.randrange(1, 100)) for _ in range(rng.randrange(1, 6))]
        asked = [math.ceil(items * weight / sum(weights)) for weight in weights]
        shares = blend_shares([float(weight) for weight in weights])
        made = blend_parts(shares, items)
        assert all(0 <= part - least <= 1 for part, least in zip(made, asked, strict=True)), "rounded in float64"
        assert blend_samples(shares, items, core=True) == [math.ceil(part * 1.005) for part in made]
    assert 100 < others < 5000, "which 23.06 cuts otherwise"


@pytest.mark.parametrize(
    "name", ["gpt_fp32_tp2pp1dp2_plain", "llama_bf16_tp2pp2dp1_do", "te_llama_fp32_tp2pp1dp1_plain"]
)
def test_batches_that_megatron_core_read(tmp_path: Path, name: str) -> None:
    """Of six iterations of 4 samples, by data rank and microbatch."""
    with tarfile.open(shared(f"megatron_core/{name}.tar.xz")) as archive:
        member = next(each for each in archive if each.name.endswith("batches.npz"))
        (tmp_path / "batches.npz").write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
    tokens = np.load(tmp_path / "batches.npz")["tokens"]
    prefix = str(shared("megatron_core/bytes_document.bin")).removesuffix(".bin")
    data = DataConfig(data_path=(prefix,), split="100,0,0", order="core", data_cache=str(tmp_path))
    made = build_datasets(data, seq_length=64, seed=1234, vocab=257, samples=(24, 0, 0)).train
    assert made is not None
    wanted = tokens.transpose(0, 2, 1, 3, 4).reshape(24, 64)
    assert [made[i][:64].tolist() for i in range(24)] == wanted.tolist()


@pytest.mark.parametrize("split", ["", "a", "1,b", "0,0,0", "-1,2", "nan", "inf,1", "1;2", "1,2,3,4"])
def test_bad_split_names_the_flag(split: str) -> None:
    with pytest.raises(ValueError, match="--split"):
        split_shares(split)


TEN_ROWS = [(0, 0), (0, 4), (1, 0), (2, 1), (2, 5), (3, 3), (4, 2), (4, 6), (5, 3), (7, 1), (7, 5)]
# first, last, seq_length, samples, seed -> documents, rows, shuffle
GOLDEN = {
    (0, 8, 4, 10, 1234): ("2 1 6 0 4 5 3 7", TEN_ROWS, "8 5 6 0 4 3 2 9 7 1"),
    (0, 8, 4, 12, 1234): (
        "2 1 6 0 4 5 3 7 5 0 3 4 2 6 1 7",
        [
            *TEN_ROWS,
            (8, 0),
            (9, 0),
            (9, 4),
            (11, 1),
            (11, 5),
            (12, 2),
            (12, 6),
            (13, 2),
            (14, 0),
            (15, 1),
            (15, 5),
        ],
        "3 9 2 1 7 5 4 0 8 6 18 11 19 14 13 17 16 20 15 10 12",
    ),
    (0, 8, 4, 19, 1234): (
        "5 3 0 4 6 2 2 7 1 1 0 4 5 6 3 7",
        [
            *[(0, 0), (1, 0), (2, 2), (3, 1), (3, 5), (4, 2), (5, 0), (5, 4), (6, 0), (6, 4), (7, 0)],
            *[(7, 4), (7, 8), (9, 0), (10, 1), (11, 0), (11, 4), (12, 1), (13, 1), (13, 5), (15, 1), (15, 5)],
        ],
        "10 4 13 17 1 14 8 7 3 6 18 19 12 11 0 2 15 9 20 5 16",
    ),
    (2, 7, 8, 3, 42): ("3 6 4 2 5", [(0, 0), (2, 0), (3, 1), (4, 1)], "1 2 0"),
}


@pytest.mark.parametrize("block", [1 << 20, 3])
@pytest.mark.parametrize("case", GOLDEN)
def test_golden_indices(case: tuple[int, int, int, int, int], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_BLOCK", block)
    first, last, seq_length, samples, seed = case
    found = sample_order(LENGTHS, first, last, seq_length=seq_length, samples=samples, seed=seed)
    documents, rows, shuffle = GOLDEN[case]
    assert found.documents.tolist() == [int(word) for word in documents.split()]
    assert [tuple(row) for row in found.samples.tolist()] == rows
    assert found.shuffle.tolist() == [int(word) for word in shuffle.split()]
    assert (found.documents.dtype, found.samples.dtype, found.shuffle.dtype) == (
        np.int32,
        np.int32,
        np.uint32,
    )


@pytest.mark.parametrize(("samples", "apart"), [(11, True), (17, True), (18, False), (20, False)])
def test_last_epoch_stands_apart_below_four_fifths_of_its_samples(samples: int, apart: bool) -> None:
    """An epoch of 44 tokens has 10 samples of 4; 10 + 7 need less than 8 of the second, 10 + 8 do not."""
    documents = sample_order(LENGTHS, 0, 8, seq_length=4, samples=samples, seed=1234).documents
    assert (sorted(documents[:8].tolist()) == list(range(8))) == apart


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 200))
def test_epochs_are_the_fewest(tokens: int, seq_length: int, samples: int) -> None:
    found = epochs(tokens, seq_length, samples)
    enough = [count for count in range(1, found + 1) if (count * tokens - 1) // seq_length >= samples]
    assert enough == [found]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(1, 12),
    st.integers(1, 60),
    st.integers(0, 3),
)
def test_rows_are_places_in_the_stream(lengths: list[int], seq_length: int, samples: int, seed: int) -> None:
    found = sample_order(
        np.array(lengths, np.int32), 0, len(lengths), seq_length=seq_length, samples=samples, seed=seed
    )
    passes = epochs(sum(lengths), seq_length, samples)
    count = (passes * sum(lengths) - 1) // seq_length
    stream = [(place, offset) for place, document in enumerate(found.documents) for offset in range(lengths[document])]
    assert [tuple(row) for row in found.samples.tolist()] == [stream[i * seq_length] for i in range(count + 1)]
    assert sorted(found.documents.tolist()) == sorted(passes * list(range(len(lengths))))
    assert sorted(found.shuffle.tolist()) == list(range(count)) and count >= samples


def test_golden_blends() -> None:
    cases = [
        ([0.2, 0.3, 0.5], "2 1 0 2 1 2 0 2 1 2 0 2", "0 0 0 1 1 2 1 3 2 4 2 5"),
        ([0.1, 0.9], "1 0 1 1 1 1 1 1 1 1 0 1", "0 0 1 2 3 4 5 6 7 8 1 9"),
        ([1 / 3] * 3, "0 1 2 0 1 2 0", "0 0 0 1 1 1 2"),
    ]
    for weights, datasets, numbers in cases:
        size = len(datasets.split())
        chosen, numbered = blend_order(blend_shares(weights), size)
        assert chosen.tolist() == [int(word) for word in datasets.split()]
        assert numbered.tolist() == [int(word) for word in numbers.split()]
        assert (chosen.dtype, numbered.dtype) == (np.int16, np.int64)


def test_entries_that_their_datasets_have() -> None:
    chosen, numbers = np.array([0, 1, 0, 0], np.int16), np.array([0, 0, 1, 2])
    assert [entries_served(chosen, numbers, lengths) for lengths in ([2, 5], [3, 5], [3, 0], [0, 5])] == [3, 4, 1, 0]


def test_golden_blend_samples() -> None:
    shares = blend_shares([0.2, 0.3, 0.5])
    assert [blend_samples(shares, count) for count in (1000, 50, 10)] == [
        [201, 302, 503],
        [11, 16, 26],
        [3, 4, 6],
    ]
    assert blend_samples(blend_shares([2, 3]), 1000) == [402, 603]


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20), st.integers(0, 300))
def test_blend_is_the_rule_whichever_way_it_is_computed(weights: list[float], size: int) -> None:
    chosen, numbers = blend_order(blend_shares(weights), size)
    assert list(zip(chosen.tolist(), numbers.tolist(), strict=True)) == blend_by_the_rule(weights, size)


def blend_by_the_rule(weights: list[float], size: int) -> list[tuple[int, int]]:
    shares = np.array(blend_shares(weights))
    shares = shares / np.sum(shares)
    counts, found = np.zeros(len(shares)), []
    for k in range(size):
        best = int(np.argmax(shares * max(k, 1) - counts))
        found.append((best, int(counts[best])))
        counts[best] += 1
    return found


@pytest.mark.parametrize("guess", ["good", "worthless"])
@pytest.mark.parametrize(
    "weights", [[1.0], [0.1, 0.9], [1.0] * 7, [1e-6, 3.0, 0.2, 5.0], [float(i) for i in range(1, 30)]]
)
def test_blend_from_many_runs_side_by_side(weights: list[float], guess: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if guess == "worthless":
        monkeypatch.setattr(order, "_guess", lambda shares, chosen: np.eye(len(shares))[0] * chosen)
    monkeypatch.setattr(order, "_BLOCK", 1000)
    again = []
    run = order._run
    monkeypatch.setattr(order, "_run", lambda *arguments: again.append(1) or run(*arguments))
    chosen, numbers = blend_order(weights, 8001)
    assert list(zip(chosen.tolist(), numbers.tolist(), strict=True)) == blend_by_the_rule(weights, 8001)
    if guess == "good" and len(weights) < 8:
        assert not again
    elif len(weights) == 4:  # a count of 3000 instead of nothing is never caught up with
        assert again
