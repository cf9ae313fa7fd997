"""In every layout one seed trains one model: losses, norms and whole gradients agree with one rank's.

Dropout is on, loss weights are ragged, and the vocabulary divides by no tensor axis, in every row.
"""

from __future__ import annotations

from typing import Any

import pytest

from mega.core.processes.pool import Pool
from mega.core.proof.layouts import LR
from mega.core.proof.parity import Snapshot, compare, snapshots, within
from tests.support.one_process import enough, same_run
from tests.support.runs import small_run

STEPS = (1, 2, 3)
"""Of a reference. `steps_of` says which of them a row compares."""

SP = {"sequence_parallel": True}
WHOLE_BATCH: dict[str, Any] = {"micro_batch": 8}
INTERLEAVED: dict[str, Any] = {"pp": 2, "chunks": 2}
EVERYTHING: dict[str, Any] = {"tp": 2, "pp": 2, "zero": 1, **SP}
OVERLAP: dict[str, Any] = {"tp_overlap": True, **SP}
RECOMPUTED: dict[str, Any] = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}

LAYOUTS = [
    # (model, world, layout)
    ("gpt", 1, WHOLE_BATCH),
    ("gpt", 2, {}),
    ("gpt", 2, {"tp": 2}),
    ("gpt", 4, {"tp": 4, **SP}),
    ("gpt", 4, {"pp": 4}),
    ("gpt", 4, {"zero": 1}),
    ("gpt", 2, {**INTERLEAVED, "tp": 1}),
    ("gpt", 8, EVERYTHING),
    ("llama", 2, {"tp": 2, **SP}),
    ("llama", 4, {"pp": 2, "schedule": "gpipe", "micro_batch": 2}),
    ("llama", 4, {"tp": 2, "zero": 1, "overlap_grad_reduce": False}),
    ("llama", 8, {**EVERYTHING, "chunks": 2}),
    ("gpt", 4, {"pp": 4, "schedule": "zb-h1"}),
    ("gpt", 4, {"zero": 2}),
    ("llama", 4, {"tp": 2, "zero": 3, **SP}),
    ("gpt", 1, {"zero": 3, **RECOMPUTED}),
    ("llama", 4, {"tp": 2, "pp": 2, **SP, **RECOMPUTED}),
    ("gpt", 2, {"tp": 2, **RECOMPUTED, "distribute_saved": True}),
    ("gpt-odd", 2, {"tp": 2, **SP}),
    ("qwen", 4, {"tp": 2, "pp": 2, **SP}),
    ("qwen", 8, {"tp": 4, "zero": 1}),
    ("gpt", 4, {"tp": 4, **OVERLAP}),
    ("gpt-odd", 2, {"tp": 2, **OVERLAP, "recompute": "selective"}),
    ("gpt", 4, {"tp": 2, "pp": 2, "schedule": "zb-h1", **OVERLAP}),
    ("llama", 8, {**EVERYTHING, **OVERLAP, "chunks": 2}),
    ("llama", 8, {"tp": 2, "cp": 2, "zero": 2, **OVERLAP}),
    ("llama", 4, {"tp": 2, "zero": 3, **OVERLAP, **RECOMPUTED}),
    # kv_heads / tp divides by cp but in two rows: the first go by all-to-all where no way is said, the others by ring
    ("gpt", 2, {"cp": 2}),
    ("gpt", 4, {"cp": 4, "cp_comm": "ring"}),
    ("llama", 4, {"cp": 4, "micro_batch": 4}),
    ("llama", 8, {**EVERYTHING, "cp": 2, "chunks": 2}),
    ("gpt-odd", 4, {"cp": 2, "cp_comm": "ring", "zero": 1}),
    # a split of four stages, whose memory rides through three, and stages and chunks that hold both sides
    ("t5", 4, {"tp": 2, "pp": 2, "split_rank": 1, **SP}),
    ("t5", 4, {"pp": 4, "stage_layers": (2, 1, 1, 1), "schedule": "zb-h1"}),
    ("t5", 2, {"pp": 2, "chunks": 2, "stage_layers": (1, 2, 1, 1)}),
    ("t5", 4, {"tp": 2, "zero": 3, **RECOMPUTED}),
    # rules that look at whole tensors: cut over tensor ranks, cut in spans, tied over two stages, kept off the device
    ("llama", 4, {"tp": 2, "zero": 3, **SP, "optimizer": "lamb"}),
    ("gpt", 4, {"tp": 4, "optimizer": "adafactor"}),
    ("gpt", 8, {**EVERYTHING, "optimizer": "adafactor", "optimizer_offload": True}),
    ("qwen", 4, {"cp": 2, "zero": 2, "optimizer": "adafactor"}),
    ("gpt", 4, {"pp": 2, "zero": 1, "optimizer": "sgd"}),
    # and at whole matrices: cut over tensor ranks and in spans, copied over data ranks, kept off the device
    ("llama", 4, {"tp": 2, "zero": 3, **SP, "optimizer": "muon"}),
    ("t5", 4, {"tp": 2, "optimizer": "muon", "optimizer_offload": True}),
    # two losses with divisors of their own, a bias that is cut like the vocabulary, rows judged by one rank
    ("bert", 2, {"tp": 2, **SP}),
    ("bert", 2, {"tp": 2, **OVERLAP}),
    ("bert", 4, {"cp": 2}),
    ("bert", 4, {"cp": 2, "cp_comm": "ring", "zero": 1}),
    ("bert", 8, {**EVERYTHING, "chunks": 2}),
    ("bert-post", 4, {"pp": 4, "schedule": "zb-h1"}),
    # a last layer of only the tokens that losses read, as on one rank; rows with SP or cp run it on all tokens
    ("bert", 4, {"tp": 2, "pp": 2, "zero": 1}),
    ("bert", 4, {"tp": 2, "zero": 3, **RECOMPUTED, "distribute_saved": True}),
    ("bert-post", 2, {"zero": 2}),
    ("bert-post", 4, {"tp": 2, "zero": 3, **SP, **RECOMPUTED}),
]

_references: dict[tuple[Any, ...], list[Snapshot]] = {}


def reference(pool: Pool, model: str, dtype: str, optimizer: str = "adam", **size: int) -> list[Snapshot]:
    """One rank, one sample at a time. size: how much smaller than `small_run` the run is."""
    key = model, dtype, optimizer, *size.values()
    if key not in _references:
        run = small_run(model, dtype=dtype, lr=LR[dtype], optimizer=optimizer, **size)
        _references[key] = snapshots(pool, run, 1, STEPS)
    return _references[key]


def steps_of(layout: dict[str, Any]) -> tuple[int, ...]:
    """The second step sees an update. The third sees moments, which rows with these options cut or keep elsewhere."""
    return (1, 3) if {"zero", "optimizer"} & set(layout) else (1, 2)


def check(pool: Pool, model: str, world: int, layout: dict[str, Any], dtype: str) -> None:
    size, steps = enough(world, layout), steps_of(layout)
    whole = reference(pool, model, dtype, layout.get("optimizer", "adam"), **size)
    found = snapshots(pool, small_run(model, world, dtype=dtype, lr=LR[dtype], **layout, **size), world, steps)
    same_run(steps, [whole[step - 1] for step in steps], found, dtype)


def name(row: Any) -> str | None:
    if not isinstance(row, dict):
        return str(row)
    return "-".join(f"{key}={value}" for key, value in row.items()) or "dp"


@pytest.mark.parametrize(("model", "world", "layout"), LAYOUTS, ids=name)
def test_fp64(pool: Pool, model: str, world: int, layout: dict[str, Any]) -> None:
    check(pool, model, world, layout, "fp64")


@pytest.mark.parametrize(("model", "world", "layout"), [("llama", 8, EVERYTHING)], ids=name)
def test_fp32(pool: Pool, model: str, world: int, layout: dict[str, Any]) -> None:
    check(pool, model, world, layout, "fp32")


@pytest.mark.parametrize("model", ["gpt", "qwen", "bert"])
def test_every_part_of_the_run_is_felt(pool: Pool, model: str) -> None:
    """The comparison is not one of zeros: clipping is at work, every gradient moves, dropout drops."""
    first, _, later = reference(pool, model, "fp64")
    assert first.grad_norm > 1.0 or later.grad_norm > 1.0
    floor = 1e-6 * first.grad_norm
    # A key bias shifts a query's scores alike, so its gradient is zero, but for dropout and norms of heads.
    still = [
        name
        for name, gradient in first.gradients.items()
        if float(gradient.abs().max()) < floor and "k_proj.bias" not in name
    ]
    assert not still
    undropped = snapshots(pool, small_run(model, lr=LR["fp64"], hidden_dropout=0.0, attention_dropout=0.0), 1, (1,))
    assert abs(undropped[0].loss - first.loss) > 1e-6


def test_the_comparison_sees_one_part_in_1e9(pool: Pool) -> None:
    """And names the tensor."""
    expected = reference(pool, "gpt", "fp64")
    loss, norm, gradients = expected[0].loss, expected[0].grad_norm, dict(expected[0].gradients)
    key = "grads/model.norm.weight"
    gradients[key] = gradients[key] * (1 + 1e-9)
    (difference,) = compare("fp64", (1,), expected[:1], [Snapshot(loss, norm, gradients)])
    assert difference.tensor == key and not within("fp64", difference)
