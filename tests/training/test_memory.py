"""Copies of the state in hosts' memory: what is left of them when a host or a rank is lost, and what is taken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.training.saves.memory import HEADER, PeerCopies
from mega.core.training.state import TrainState
from mega.core.training.wire import build_mesh, build_state
from tests.support.runs import small_run


def held(state: TrainState) -> list[torch.Tensor]:
    return [piece.tensor for piece in (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False))]


def copy_and_lose(groups: Groups, rank: int, run: RunConfig, place: str, lost: int | None, fault: str) -> object:
    """Job: two hosts of one rank take copies at steps 1 and 2; what a rank that starts again has afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.setenv("LOCAL_RANK", "0")
        folder, device = Path(place) / f"host-{rank}", Device.choose("cpu", 0, "auto")
        folder.mkdir()
        state = build_state(run, build_mesh(run, rank, 2, groups), device)
        copies, moments = PeerCopies(state, folder), {}
        for step in (1, 2):
            for number, tensor in enumerate(held(state)):
                tensor.add_(step + number / 7 + rank)
            state.progress.step, state.progress.consumed, state.optimizer.updates = step, 10 * step, step
            copies.take()
            copies.wait()
            moments[step] = [tensor.clone() for tensor in held(state)]
        state.exchange(None)
        if rank == lost and fault == "host":
            shutil.rmtree(folder)
            folder.mkdir()
        for path in folder.glob(f"rank-{lost}.*") if fault == "torn" else ():
            with open(path, "r+b") as file:  # of the newer step, on both hosts
                if b'"step": 2,' in file.read(HEADER):
                    file.seek(0)
                    file.write(bytes(HEADER))
        for path in damaged(folder, lost, rank, fault):
            with open(path, "r+b") as file:
                file.seek(HEADER + 8)
                file.write(b"damaged!")
        again = build_state(run, build_mesh(run, rank, 2, groups), device)
        found = PeerCopies(again, folder)
        if fault == "older":
            return found.restore(2), again.progress.step
        taken, step = found.restore(0), again.progress.step
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(held(again), moments[step], strict=True))
        for owned in again.optimizer.shards:
            same &= owned.master is None or owned.has_master or torch.equal(owned.master, owned.bucket.own_weights)
        left = [header["step"] for _, header in found._files.headers()]
        return taken, step, again.progress.consumed, again.optimizer.updates, same, max(left)


def damaged(folder: Path, owner: int | None, rank: int, fault: str) -> list[Path]:
    """The files of this host whose state is to be another one than was written: of the newer step."""
    hosts = {"own": [owner], "both": [0, 1]}.get(fault, [])
    paths = folder.glob(f"rank-{owner}.*") if rank in hosts else ()
    return [path for path in paths if b'"step": 2,' in path.read_bytes()[:HEADER]]


@pytest.mark.parametrize(
    ("lost", "fault", "step", "precision"),
    [
        (None, "", 2, {"dtype": "bf16"}),
        (None, "", 2, {"dtype": "fp32", "optimizer_offload": True}),
        (0, "host", 2, {"dtype": "bf16", "embedding_fp32": True, "optimizer_offload": True}),
        (1, "host", 2, {"dtype": "bf16"}),
        (1, "torn", 1, {"dtype": "bf16"}),
        (1, "own", 2, {"dtype": "bf16"}),
        (0, "both", 1, {"dtype": "bf16"}),
    ],
)
def test_the_newest_step_of_which_all_is_left(
    lost: int | None, fault: str, step: int, precision: dict[str, Any], tmp_path: Path, pool: Pool
) -> None:
    """ "own": a copy is damaged on its own host, so that another host's is taken; "both": on both."""
    run = small_run(world=2, zero=1, save=str(tmp_path / "a"), save_interval=1, **precision)
    found = pool.run(copy_and_lose, run, str(tmp_path), lost, fault, world=2)
    assert found == [(True, step, 10 * step, step, True, step)] * 2


def test_a_newer_save_counts(tmp_path: Path, pool: Pool) -> None:
    run = small_run(world=2, save=str(tmp_path / "a"), save_interval=1)
    assert pool.run(copy_and_lose, run, str(tmp_path), None, "older", world=2) == [(False, 0)] * 2
