"""What the optimizer holds: bytes, with and without masters, on the device or off it, and on disk."""

from __future__ import annotations

import gc
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.reshard import reshard
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.optim.rule import Rule
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.parity import own_samples, synthetic_batch
from mega.core.training.saves.resume import ResumePoint, restore
from mega.core.training.saves.saver import Saver
from mega.core.training.state import TrainState
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state
from tests.support.ranks import CPU
from tests.support.runs import small_run

ALIGNED: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "vocab": 256,
    "vocab_multiple": 1,
    "seq_length": 64,
    "bucket_size": 40_000_000,
    "global_batch": 4,
}
"""One bucket without padding on up to 4 data ranks, so that bytes per parameter are whole."""

BYTES: dict[str, tuple[dict[str, Any], Fraction, Fraction, Fraction]] = {
    # options; of every rank; shared out; shared out while the update runs
    "fp16 buckets": ({"dtype": "fp16", "loss_scale": 8.0}, *map(Fraction, (4, 12, 16))),
    "bf16 buckets": ({"dtype": "bf16", "grad_dtype": "bf16"}, *map(Fraction, (4, 12, 16))),
    "fp32 buckets": ({"dtype": "bf16"}, *map(Fraction, (6, 12, 12))),
    "fp32 parameters": ({"dtype": "fp32"}, *map(Fraction, (8, 8, 8))),
    "memory-efficient fp16": ({"dtype": "fp16", "loss_scale": 8.0, "masters": False}, *map(Fraction, (4, 8, 16))),
    "sgd": ({"dtype": "fp32", "optimizer": "sgd"}, *map(Fraction, (8, 4, 4))),
}


def state_of(run: RunConfig, rank: int = 0, world: int = 1, groups: Groups | None = None) -> TrainState:
    mesh = build_mesh(run, rank, world, groups)
    return build_state(run, mesh, Device(CPU, "gloo"))


def step(state: TrainState, number: int, lr: float = 1e-2) -> None:
    run = state.run
    assert run.batch.global_batch is not None
    rows = own_samples(run, state.mesh, number * run.batch.global_batch)
    train_step(state, [synthetic_batch(run, samples) for samples in rows], lr, 0.1)


def living(known: set[int], least: int = 100) -> tuple[int, set[int]]:
    """Bytes of the tensors that Python can reach, but for the storages in `known` and those of less than `least`."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would wake lazy things
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes() if storage.nbytes() >= least else 0
    return sum(size for at, size in found.items() if at not in known), set(found)


class Watched:
    """A rule that counts what lives while it moves."""

    def __init__(self, rule: Rule, known: set[int]):
        self.rule, self.known, self.bytes = rule, known, 0

    def step(self, *arguments: Any) -> None:
        self.bytes = max(self.bytes, living(self.known, 1024)[0])  # no row of a batch is so long
        self.rule.step(*arguments)


Bytes = tuple[int, int, int]
"""Parameters, bytes between two steps, bytes while an update runs."""


def measure(groups: Groups, rank: int, runs: dict[str, tuple[RunConfig, Fraction]], world: int) -> dict[str, Bytes]:
    """Job: bytes of each run, with the bytes per parameter that are expected between two steps."""
    _, known = living(set())
    gc.freeze()  # what was there before is known, and no later search walks it
    try:
        return {
            name: _measured(state_of(run, rank, world, groups), known, expected)
            for name, (run, expected) in runs.items()
        }
    finally:
        gc.unfreeze()


def _measured(state: TrainState, known: set[int], per_parameter: Fraction) -> Bytes:
    parameters = sum(weight.numel() for bucket in state.grads.buckets for weight, _, _ in bucket.offsets)
    watched = Watched(state.optimizer.rule, known)
    state.optimizer.rule = watched  # type: ignore[assignment]
    step(state, 0)
    state.grads.wait_param_gather()  # gloo sends updated weights from a copy
    for _ in range(100):  # whose last owner is a thread of gloo, which lets go of it when the host lets it run
        between = living(known)[0]
        if between <= parameters * per_parameter:
            break
        time.sleep(0.05)
    return parameters, between, watched.bytes


@pytest.fixture(scope="module")
def measured(pool: Pool) -> dict[int, list[dict[str, Bytes]]]:
    """Ranks -> what each of them measures."""
    found = {}
    for world in (1, 4):
        runs = {}
        for name, (options, everywhere, shared, _) in BYTES.items():
            run = small_run("gpt", world, zero=1, **ALIGNED, **options, hidden_dropout=0.0, attention_dropout=0.0)
            runs[name] = run, everywhere + shared / world
        found[world] = pool.run(measure, runs, world, world=world)
    return found


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_parameter(measured: dict[int, list[dict[str, Bytes]]], name: str) -> None:
    """4 + 16/d with 16-bit buckets, 6 + 12/d with fp32 ones, 8 + 8/d with fp32 parameters: Megatron-LM's table.

    Its 16 counts the widened gradient, which lives here while a bucket is updated; between steps it is 12.
    """
    _, everywhere, shared, updating = BYTES[name]
    for world, ranks in measured.items():
        for parameters, between, during in (found[name] for found in ranks):
            assert between == parameters * (everywhere + shared / world)
            assert during == parameters * (everywhere + updating / world)


def test_bytes_per_parameter_of_the_later_stages(pool: Pool) -> None:
    """DeepSpeed's table between two steps; blocks are buckets of their own there, so a model without padding in any."""
    shape = {**ALIGNED, "position": "none", "bias": False, "norm": "rmsnorm", "hidden": 256, "vocab": 512}
    runs = {
        f"zero {zero}": (small_run("gpt", 2, zero=zero, dtype="fp16", loss_scale=8.0, **shape), expected)
        for zero, expected in ((2, 2 + Fraction(14, 2)), (3, Fraction(16, 2)))
    }
    for found in pool.run(measure, runs, 2, world=2):
        for name, (_, expected) in runs.items():
            parameters, between, _ = found[name]
            assert between == parameters * expected, name


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_state_on_the_host_changes_no_bit(optimizer: str, dtype: str) -> None:
    held = []
    for offload in (False, True):
        state = state_of(small_run(layers=2, dtype=dtype, optimizer=optimizer, optimizer_offload=offload))
        for number in range(3):
            step(state, number)
        held.append({piece.key: piece.tensor.clone() for piece in state.optimizer_pieces(mine=True)})
        held.append({piece.key: piece.tensor.clone() for piece in state.weight_pieces(mine=True)})
        assert all((owned.master is not None) == (offload or dtype == "bf16") for owned in state.optimizer.shards)
    for mine, theirs in zip(held[:2], held[2:], strict=True):
        assert mine.keys() == theirs.keys(), "the same is written to disk"
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_without_masters(dtype: str) -> None:
    """The first step rounds as masters do; steps below the weights' resolution are lost, which masters add up."""
    options: dict[str, Any] = {"layers": 2, "dtype": dtype, **({"loss_scale": 8.0} if dtype == "fp16" else {})}
    with_, without = (state_of(small_run(**options, masters=masters)) for masters in (True, False))
    assert not any(piece.key.startswith("master/") for piece in without.optimizer_pieces(mine=True))
    for state in (with_, without):
        step(state, 0)
    for mine, theirs in zip(without.grads.buckets, with_.grads.buckets, strict=True):
        assert torch.equal(mine.weights, theirs.weights)
    before = [bucket.weights.clone() for bucket in without.grads.buckets]
    for state in (with_, without):
        for number in range(1, 20):
            step(state, number, lr=1e-5)
    moved = [
        sum(int((bucket.weights != old).sum()) for bucket, old in zip(state.grads.buckets, before, strict=True))
        for state in (without, with_)
    ]
    assert moved[0] < 0.8 * moved[1]


def keep(groups: Groups, rank: int, run: RunConfig, world: int, source: str | None, steps: tuple[int, ...]) -> None:
    """Job: begin, or resume from a checkpoint; take these steps; save."""
    state = state_of(run, rank, world, groups)
    if source is not None:
        restore(state, ResumePoint(locate(Path(source)), weights_only=False))
    for number in steps:
        step(state, number)
        state.progress.step = number + 1
    Saver(state).save()


MIXED = {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True, "global_batch": 4}


@pytest.mark.parametrize(
    ("rule", "layers", "others"),
    [
        ("adafactor", 2, [{"tp": 4}, {"zero": 3, "optimizer_offload": True}]),
        ("lamb", 2, [{"zero": 2}]),
        ("sgd", 4, [{"pp": 4}]),
    ],
)
def test_any_layout_reads_any_other(
    pool: Pool, tmp_path: Path, rule: str, layers: int, others: list[dict[str, Any]]
) -> None:
    """Saved by 8 ranks in one layout and saved again by 4 in another, or cut again: every byte is there unchanged.

    And a run that resumes from it is bitwise the run that never stopped.
    """
    values = {"optimizer": rule, "layers": layers, "dtype": "fp32"}
    run = small_run("gpt", 8, **values, save=str(tmp_path / "first"), **MIXED)
    pool.run(keep, run, 8, None, (0,), world=8)
    first = CheckpointStore(tmp_path / "first").open(1)
    for number, layout in enumerate(others):
        again = small_run("gpt", 4, **values, save=str(tmp_path / str(number)), **layout)
        pool.run(keep, again, 4, str(first.path), (), world=4)
        assert not list(diff(first, CheckpointStore(tmp_path / str(number)).open(1)))
    reshard(tmp_path / "first", tmp_path / "cut", Layout(1, 2))
    assert not list(diff(first, CheckpointStore(tmp_path / "cut").open(1)))
    pool.run(keep, run, 8, str(first.path), (1,), world=8)
    straight = small_run("gpt", 8, **values, save=str(tmp_path / "straight"), **MIXED)
    pool.run(keep, straight, 8, None, (0, 1), world=8)
    resumed, unbroken = (CheckpointStore(tmp_path / name).open(2) for name in ("first", "straight"))
    assert not list(diff(resumed, unbroken))


def test_one_rules_state_is_not_anothers(tmp_path: Path) -> None:
    run = small_run(layers=2, save=str(tmp_path))
    Saver(state_of(run)).save()
    other = state_of(small_run(layers=2, optimizer="lamb"))
    with pytest.raises(CheckpointError, match=r"--optimizer lamb: .* holds the state of adam"):
        restore(other, ResumePoint(locate(tmp_path), weights_only=False))
