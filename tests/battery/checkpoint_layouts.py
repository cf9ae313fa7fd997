"""300 random pairs of layouts: what one saved, the other restores and saves again; and some go on with it.

pair N   every rank of both layouts is built in this process, with random weights, masters and moments that are
         functions of the logical tensor. All that any rank of the second layout restores, replicas included, and
         all that it saves again must be these values, byte for byte.
next N   pairs of at most 4 ranks, as processes: the first layout trains two steps, saves, takes the next step; the
         second restores and takes the next step too. Losses within 1e-12 in fp64, 2e-6 in fp32.
mixture N  100 pairs as `pair`, of models with experts, which layouts share over ranks of their own (ep, etp).

Every sixth pair of either kind has another optimizer than Adam: SGD, LAMB, Adafactor in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mega.core.untrusted import Json

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.pieces import Box, Piece
from mega.core.checkpoint.own.store import Checkpoint, CheckpointStore, locate
from mega.core.config.check import check
from mega.core.config.resolve import data_parallel, resolve
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.proof.parity import LOSS_BOUND, own_samples, synthetic_batch
from mega.core.training.saves.resume import ResumePoint, restore
from mega.core.training.saves.saver import Saver
from mega.core.training.state import TrainState
from mega.core.training.step import train_step
from mega.core.training.wire import build_mesh, build_state
from tests.battery.data_ledger import Item, run
from tests.support.runs import MODELS, small_options

PAIRS, NEXT, MIXTURES = 300, 40, 100
MOST_RANKS, MOST_PROCESSES = 8, 4
OTHERS = ("sgd", "lamb", "adafactor")
LR = {"fp64": 1e-2, "fp32": 1.5e-4, "bf16": 1e-3, "fp16": 1e-3}


def some_layout(rng: random.Random, shared: dict[str, Any], model: str, most: int) -> tuple[RunConfig, int]:
    """A run that can be on at most so many ranks, and its ranks."""
    while True:
        tp, pp = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 3, 4))
        cp, dp = rng.choice((1, 1, 1, 2)), rng.choice((1, 2, 2, 3, 4))
        world = tp * pp * cp * dp
        if world > most:
            continue
        options: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "zero": rng.randrange(4)}
        options["sequence_parallel"] = tp > 1 and rng.random() < 0.5
        options["bucket_size"] = rng.choice((500, 3000, 10**6))
        if pp > 1 and rng.random() < 0.3:
            options["chunks"] = 2
        if "experts" in shared:
            options |= {"ep": rng.choice((1, 2, 2, 4)), "etp": rng.choice((None, 1, 1, 2))}
        stages = pp * options.get("chunks", 1)
        if pp > 1 and rng.random() < 0.6 and shared["layers"] >= stages:
            cuts = sorted(rng.sample(range(1, shared["layers"]), stages - 1))
            bounds = [0, *cuts, shared["layers"]]
            options["stage_layers"] = tuple(b - a for a, b in itertools.pairwise(bounds))
        try:
            found = small_options(model, **shared, **options)
            check(found, world)
        except ValueError:
            continue
        return resolve(found, world), world


def pair(
    number: int, most: int, dtypes: Sequence[str], *, experts: bool = False
) -> tuple[tuple[RunConfig, int], tuple[RunConfig, int]]:
    rng = random.Random(number)
    model, dtype = rng.choice(("gpt", "llama") if experts else list(MODELS)), rng.choice(dtypes)
    shared = {
        "layers": rng.choice((3, 4, 5)),
        "vocab": rng.choice((257, 97, 131)),
        "global_batch": 12,
        "steps": 3,
        "mock_data": True,
        "dtype": dtype,
        "lr": LR[dtype],
        "save": "unused",
        "save_interval": 1,
        "optimizer": OTHERS[number // 6 % 3] if number % 6 == 5 and not experts else "adam",
    }
    if experts:
        shared |= {"experts": rng.choice((4, 8)), "expert_ffn": rng.choice((8, 16)), "experts_from": rng.choice((0, 1))}
        if rng.random() < 0.5:
            shared |= {"router_score": "sigmoid", "balance_bias": True, "shared_ffn": 16}
    return some_layout(rng, shared, model, most), some_layout(rng, shared, model, most)


@functools.lru_cache(maxsize=2000)
def whole(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a logical tensor holds; masters and weights are one number, rounded for the latter."""
    kind, _, name = key.partition("/")
    seed = zlib.crc32(("value/" if kind in ("weights", "master") else f"{kind}/").encode() + name.encode())
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(torch.promote_types(dtype, torch.float32)).to(dtype)


def part(piece: Piece) -> torch.Tensor:
    origin = Box((0,) * len(piece.whole), piece.whole)
    return whole(piece.key, piece.whole, piece.tensor.dtype)[piece.box.inside(origin)]


def all_pieces(state: TrainState) -> list[Piece]:
    return [*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False)]


def saved_by(states: list[TrainState], directory: Path) -> Checkpoint:
    """What `Saver` does on each rank, for all of them in one process."""
    run = states[0].run
    kept = [[*state.weight_pieces(mine=True), *state.optimizer_pieces(mine=True)] for state in states]
    meta: dict[str, Json] = {
        "config": dataclasses.asdict(run),
        "progress": dataclasses.asdict(states[0].progress),
        "updates": 2,
    }
    store = CheckpointStore(directory)
    store.save_all(2, kept, meta)
    checkpoint = store.open(2)
    checkpoint.verify()
    return checkpoint


def prove_pair(number: int, *, experts: bool = False) -> dict[str, Any]:
    dtypes = ("fp64", "fp32", "bf16", "fp16")
    (run_a, world_a), (run_b, world_b) = pair(number, MOST_RANKS, dtypes, experts=experts)
    home = Path(tempfile.mkdtemp(prefix="mega-pair-"))
    try:
        before = [make(None, rank, run_a, world_a) for rank in range(world_a)]
        for piece in (piece for state in before for piece in all_pieces(state)):
            piece.tensor.detach().copy_(part(piece))
        first = saved_by(before, home / "a")
        after = [make(None, rank, run_b, world_b) for rank in range(world_b)]
        held = 0
        for state in after:
            restore(state, ResumePoint(locate(first.path), weights_only=False))
            for piece in all_pieces(state):
                assert torch.equal(piece.tensor, part(piece)), f"{piece.key} at {piece.start} of rank {state.mesh.rank}"
                held += piece.tensor.numel()
        second = saved_by(after, home / "b")
        different = [difference.key for difference in diff(first, second)]
        assert not different, different[:5]
        return {**told(run_a, world_a, run_b, world_b), "tensors": len(first.tensors), "elements held": held}
    finally:
        shutil.rmtree(home)


def make(groups: Groups | None, rank: int, run: RunConfig, world: int) -> TrainState:
    mesh = build_mesh(run, rank, world, groups)
    return build_state(run, mesh, Device.choose("cpu"))


def step(state: TrainState) -> float:
    progress, run = state.progress, state.run
    batches = [synthetic_batch(run, rows) for rows in own_samples(run, state.mesh, progress.consumed)]
    report = train_step(state, batches, run.optimizer.lr or 0.0, run.optimizer.weight_decay)
    progress.step += 1
    progress.consumed += run.batch.global_batch or 0
    return float(report.loss)


def first(groups: Groups, rank: int, run: RunConfig, world: int) -> float:
    """Job: two steps, a save, the loss of the third."""
    state = make(groups, rank, run, world)
    for _ in range(2):
        step(state)
    Saver(state).save()
    return step(state)


def second(groups: Groups, rank: int, run: RunConfig, world: int, source: str) -> float:
    """Job: restore, save, the loss of the third step."""
    state = make(groups, rank, run, world)
    restore(state, ResumePoint(locate(Path(source)), weights_only=False))
    Saver(state).save()
    return step(state)


def prove_next(number: int, pool: Pool) -> dict[str, Any]:
    from tests.battery import checkpoint_layouts as here  # jobs must be importable by name

    (run_a, world_a), (run_b, world_b) = pair(1000 + number, MOST_PROCESSES, ("fp64", "fp32"))
    home = Path(tempfile.mkdtemp(prefix="mega-next-"))
    try:
        run_a, run_b = (
            dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, save=str(home / name)))
            for run, name in ((run_a, "a"), (run_b, "b"))
        )
        loss_a = pool.run(here.first, run_a, world_a, world=world_a)[0]
        saved = CheckpointStore(home / "a").open(2)
        loss_b = pool.run(here.second, run_b, world_b, str(saved.path), world=world_b)[0]
        different = [difference.key for difference in diff(saved, CheckpointStore(home / "b").open(2))]
        assert not different, different[:5]
        error = abs(loss_a - loss_b) / abs(loss_a)
        assert error <= LOSS_BOUND[run_a.precision.dtype], f"next loss {loss_b} instead of {loss_a}"
        return {**told(run_a, world_a, run_b, world_b), "loss": error}
    finally:
        shutil.rmtree(home)


def told(run_a: RunConfig, world_a: int, run_b: RunConfig, world_b: int) -> dict[str, Any]:
    model = run_a.model
    kind = f"{model.family} {'tied' if model.tied else 'untied'} {model.layers} layers vocab {model.vocab}"
    return {
        "model": kind,
        "optimizer": run_a.optimizer.optimizer,
        "dtype": run_a.precision.dtype,
        "from": named(run_a, world_a),
        "to": named(run_b, world_b),
    }


def named(run: RunConfig, world: int) -> str:
    p = run.parallel
    cuts = f" stages {'-'.join(map(str, p.stage_layers))}" if p.stage_layers else ""
    experts = f" ep{p.ep} etp{p.etp}" if run.model.experts else ""
    return f"tp{p.tp} cp{p.cp} pp{p.pp}x{p.chunks} dp{data_parallel(run, world)} zero{p.zero}{experts}{cuts}"


def items(pool: Pool) -> Iterator[Item]:
    for number in range(PAIRS):
        yield f"pair {number}", lambda number=number: prove_pair(number)  # type: ignore[misc]
    for number in range(MIXTURES):
        yield f"mixture {number}", lambda number=number: prove_pair(2000 + number, experts=True)  # type: ignore[misc]
    for number in range(NEXT):
        yield f"next {number}", lambda number=number: prove_next(number, pool)  # type: ignore[misc]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with Pool(MOST_PROCESSES) as pool:
        run("checkpoint_layouts", items(pool))
