"""Attention to the blocks of a cache by our kernels, against the plain form in float64 and in the same dtype.

On a CUDA device as they are; without one where Triton is installed, whose interpreter runs them on a CPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from mega.core.architecture.layer import Rope
from mega.core.ops.few_rows import plain_place as place
from mega.core.ops.paged_attention import PLAIN, PagedAttention, trusted
from mega.core.ops.rotary import rotary_table
from tests.support.triton import CUDA, DEVICE, needs_kernels

pytestmark = [pytest.mark.gpu, needs_kernels]
PROGRAMS = 528 if CUDA else 8
"""As the kernels have it; the interpreter takes programs one after the other."""


def kernels() -> PagedAttention:
    from mega.core.ops.kernels.paged_attention import PAGED

    return PAGED


def check_paged(rng: random.Random, longest: int = 150) -> dict[str, Any]:
    """Drawn sequences, most of them with one new token: within twice the error of the plain form."""
    dtype = torch.bfloat16 if CUDA else rng.choice([torch.float16, torch.float32])
    kv_heads, repeats, d, block = rng.randint(1, 3), rng.randint(1, 5), rng.choice([8, 32, 40, 64, 128]), 8
    window = rng.choice([None, rng.randint(1, longest)])
    runs = rng.randint(1, 6)
    lengths = np.array([rng.randint(1, longest) for _ in range(runs)])
    counts = np.array([1 if rng.random() < 0.7 else rng.randint(1, int(length)) for length in lengths])
    width = -(-longest // block)
    tables = np.array(rng.sample(range(1, 1 + runs * width), runs * width)).reshape(runs, width)
    pool = torch.randn(1 + runs * width, block, 2, kv_heads, d, device=DEVICE).to(dtype)
    fused = torch.randn(int(counts.sum()), kv_heads * (repeats + 2), d, device=DEVICE).to(dtype)
    q = fused[:, : kv_heads * repeats]  # as it lies in a fused product
    found = []
    programs = PROGRAMS if CUDA else rng.choice([1, 8, 40])
    for attention, wide in ((PLAIN, torch.float64), (PLAIN, dtype), (kernels(), dtype)):
        keys = pool.to(wide)
        pages = attention.pages(counts, lengths, tables, keys, repeats, window)
        with patch("mega.core.ops.kernels.paged_attention.PROGRAMS", programs):
            found.append(attention.attend(q.to(wide), keys.flatten(1), pages).double())
    exact, plain, ours = found
    errors = [float((each - exact).norm() / exact.norm()) for each in (ours, plain)]
    assert ours.shape == exact.shape and errors[0] <= 2 * errors[1] + 2e-7, errors
    return {"dtype": str(dtype).removeprefix("torch."), "runs": runs, "d": d, "window": window, "error": errors[0]}


def test_shares_are_added_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever program ends last; the counters of each launch are left at 0."""
    torch.manual_seed(0)
    monkeypatch.setattr("mega.core.ops.kernels.paged_attention.PROGRAMS", 528 if CUDA else 24)
    dtype = torch.bfloat16 if CUDA else torch.float32
    lengths, tables = np.array([1, 1500 if CUDA else 90, 130]), np.arange(1, 3 * 100 + 1).reshape(3, 100)
    pool = torch.randn(301, 16, 2, 4, 64, device=DEVICE).to(dtype)
    q = torch.randn(3, 8, 64, device=DEVICE).to(dtype)
    pages = kernels().pages(np.ones(3, dtype=np.int64), lengths, tables, pool, 2, None)
    first = kernels().attend(q, pool.flatten(1), pages)
    assert first.isfinite().all() and not pages.ended.any()
    for _ in range(200 if CUDA else 1):
        assert torch.equal(kernels().attend(q, pool.flatten(1), pages), first)
    assert not pages.ended.any()


@pytest.mark.parametrize("keys", [600, 1100])
def test_many_shares_of_eight_heads(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that one step combines, and shares that take two."""
    torch.manual_seed(0)
    monkeypatch.setattr("mega.core.ops.kernels.paged_attention.PROGRAMS", 528 if CUDA else 20)
    dtype, tables = torch.bfloat16 if CUDA else torch.float32, np.arange(1, 71)[None]
    pool = torch.randn(71, 16, 2, 1, 128, device=DEVICE).to(dtype)
    q = torch.randn(1, 8, 128, device=DEVICE).to(dtype)
    ours, plain, exact = (
        each.attend(q.to(wide), pool.to(wide).flatten(1), each.pages(np.ones(1, np.int64), np.array([keys]), *given))
        for each, wide in ((kernels(), dtype), (PLAIN, dtype), (PLAIN, torch.float64))
        for given in [(tables, pool.to(wide), 8, None)]
    )
    error, plain_error = (float((each - exact).norm() / exact.norm()) for each in (ours, plain))
    assert error <= 2 * plain_error + 2e-7, (error, plain_error)


def check_new(rng: random.Random, longest: int = 150) -> dict[str, Any]:
    """Drawn sequences of one new token each, whose keys are turned and kept on the way; all else is left alone."""
    dtype = torch.bfloat16 if CUDA else rng.choice([torch.float16, torch.float32])
    kv_heads, repeats, d, block = rng.randint(1, 3), rng.randint(1, 5), rng.choice([8, 32, 40, 64, 128]), 8
    window, turned = rng.choice([None, rng.randint(1, longest)]), rng.choice([0, d, d // 2, d // 4 * 2])
    runs = rng.randint(1, 6)
    lengths = np.array([rng.randint(1, longest) for _ in range(runs)])
    width, ones = -(-longest // block), np.ones(runs, dtype=np.int64)
    tables = np.array(rng.sample(range(1, 1 + runs * width), runs * width)).reshape(runs, width)
    pool = torch.randn(1 + runs * width, block, 2, kv_heads, d, device=DEVICE).to(dtype)
    fused = torch.randn(runs, kv_heads * (repeats + 2), d, device=DEVICE).to(dtype)
    slots = tables[range(runs), (lengths - 1) // block] * block + (lengths - 1) % block
    found = []
    for attention, wide in ((PLAIN, torch.float64), (PLAIN, dtype), (kernels(), dtype)):
        keys, given = pool.to(wide, copy=True), fused.to(wide, copy=True)
        rotary = (
            rotary_table(torch.from_numpy(lengths).to(DEVICE), Rope(base=10000.0, width=turned), wide)
            if turned
            else None
        )
        pages = attention.pages(ones, lengths, tables, keys, repeats, window)
        if attention.attend_new is None:
            place(given, rotary, keys.view(-1, 2 * kv_heads, d), torch.from_numpy(slots).to(DEVICE), kv_heads * repeats)
            out = attention.attend(given[:, : kv_heads * repeats], keys.flatten(1), pages)
        else:
            with patch("mega.core.ops.kernels.paged_attention.PROGRAMS", PROGRAMS if CUDA else rng.choice([1, 8, 40])):
                new = attention.attend_new(given, rotary, keys.flatten(1), pages)
            assert new is not None
            out = new
        found.append((out.double(), keys.double()))
    errors = []
    for exact, plain, ours in zip(*found, strict=True):
        errors += [float((each - exact).norm() / exact.norm()) for each in (ours, plain)]
        assert ours.shape == exact.shape and errors[-2] <= 2 * errors[-1] + 2e-7, errors
    same = torch.ones(len(pool) * block, dtype=torch.bool)
    same[slots] = False
    kept, before = (each.view(-1, 2 * kv_heads * d)[same.to(DEVICE)] for each in (found[2][1], pool.double()))
    assert torch.equal(kept, before)
    return {"dtype": str(dtype).removeprefix("torch."), "runs": runs, "d": d, "window": window, "turned": turned}


@pytest.mark.parametrize("seed", range(12))
def test_new_keys_are_kept_on_the_way(seed: int) -> None:
    torch.manual_seed(seed)
    check_new(random.Random(seed))


@pytest.mark.parametrize("seed", range(6))
def test_paged_attention(seed: int) -> None:
    torch.manual_seed(seed)
    check_paged(random.Random(seed))


def test_prompts_next_to_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, ones that continue, short ones, and those a window cuts; also as a recorded graph has them."""
    torch.manual_seed(0)
    monkeypatch.setattr("mega.core.ops.kernels.paged_attention.PROGRAMS", PROGRAMS)
    dtype = torch.bfloat16 if CUDA else torch.float32
    counts = np.array([1, 1, 5, 9, 64, 64, 70, 80, 90])
    lengths = np.array([9, 33, 5, 12, 64, 64, 99, 80, 90])
    tables = np.random.default_rng(0).permutation(9 * 13).reshape(9, 13)
    pool = torch.randn(9 * 13, 8, 2, 2, 16, device=DEVICE).to(dtype)
    q = torch.randn(int(counts.sum()), 10, 16, device=DEVICE).to(dtype)[:, :6]
    for window in (None, 90, 7):
        pages = kernels().pages(counts, lengths, tables, pool, 3, window)
        assert len(pages.singles.lengths) == 2 and len(pages.tiles) == 2 + 2 + 3 * 2
        ours = kernels().attend(q, pool.flatten(1), pages).double()
        wide = pool.double()
        exact = PLAIN.attend(q.double(), wide.flatten(1), PLAIN.pages(counts, lengths, tables, wide, 3, window))
        assert float((ours - exact).norm() / exact.norm()) < 4 * torch.finfo(dtype).eps
        recorded = kernels().ragged
        assert recorded is not None
        given = [torch.from_numpy(each).to(DEVICE) for each in (np.where(counts == 1, lengths, 0), tables)]
        tiles = torch.zeros(recorded.most_tiles(len(q), 9), 4, dtype=torch.int64, device=DEVICE)
        tiles[: len(pages.tiles)] = pages.tiles
        again = kernels().attend(q, pool.flatten(1), recorded.pages(given[0], given[1], tiles, pool, window))
        assert torch.equal(again.double(), ours), "with room for more runs and tiles"


def test_shares_without_keys_and_a_window_at_a_tile_s_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shares than tiles; a window that begins where a tile does, or one key beside it."""
    torch.manual_seed(0)
    lengths = np.array([1, 65, 128])
    tables = np.arange(1, 3 * 17 + 1).reshape(3, 17)
    pool = torch.randn(52, 8, 2, 1, 16, device=DEVICE)
    q = torch.randn(3, 1, 16, device=DEVICE)
    monkeypatch.setattr("mega.core.ops.kernels.paged_attention.PROGRAMS", PROGRAMS)
    for window in (1, 64, 65):
        given = (np.ones(3, dtype=np.int64), lengths, tables, pool, 1, window)
        ours, plain = (each.attend(q, pool.flatten(1), each.pages(*given)) for each in (kernels(), PLAIN))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_kernels_that_a_device_runs_wrongly_are_not_trusted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega.core.ops.kernels.paged_attention.PROGRAMS", PROGRAMS)
    pool = torch.zeros(9, 8, 2, 2, 16, device=DEVICE)
    assert trusted(kernels(), pool, 3, 5) is kernels() and not caplog.text

    def fails(*_: Any) -> Any:
        raise AssertionError("cannot be compiled\nhere")

    def wrong(*given: Any) -> torch.Tensor:
        return kernels().attend(*given) * 1.001

    def misplaced(fused: torch.Tensor, rotary: Any, pool: torch.Tensor, pages: Any) -> torch.Tensor | None:
        found = kernels().attend_new
        assert found is not None
        return found(fused, rotary, pool.clone(), pages)

    assert trusted(replace(kernels(), attend_new=misplaced), pool, 3, 5) is PLAIN and "off by" in caplog.text
    assert trusted(replace(kernels(), attend=wrong), pool, 3, 5) is PLAIN and "off by 0.001" in caplog.text
    assert trusted(replace(kernels(), attend=fails), pool, 3, 5) is PLAIN and "(cannot be compiled)" in caplog.text
