"""SIGKILL of all ranks at random moments of saving: 100 times at once, 100 times behind the run.

Four ranks (dp 4, ZeRO 1, bf16 with masters) save without a pause, every number of a checkpoint being its step;
behind the run the numbers change as soon as the save has been asked for. After the kill the newest checkpoint is at
least the last that was said to be saved, verifies, and holds its step in every element; the next run can save.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.device import Device
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.training.saves.saver import Saver
from mega.core.training.wire import build_state
from tests.battery.data_ledger import Item, run
from tests.support.runs import small_run

WORLD, KILLS = 4, 100


def rank_body(rank: int, home: Path, behind: bool) -> None:
    """Save until killed; rank 0 writes down each step that it was told of."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{home / 'meeting'}", rank=rank, world_size=WORLD)
    options: dict[str, Any] = {"save": str(home / "run"), "save_interval": 1, "keep_last": 2, "async_save": behind}
    resolved = small_run(world=WORLD, layers=1, zero=1, dtype="bf16", **options)
    state = build_state(resolved, Mesh(rank, dp=WORLD, groups=Groups("gloo")), Device.choose("cpu"))
    said = os.open(home / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(line: str) -> None:
        if rank == 0:
            os.write(said, f"{line.split()[2]}\n".encode())

    saver = Saver(state, report=say)
    tensors = [
        piece.tensor.detach() for piece in (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False))
    ]
    for step in range(1, 250):  # bf16 holds every whole number up to 256
        for tensor in tensors:
            tensor.fill_(step)
        state.progress.step = step
        saver.save()
        for tensor in tensors:
            tensor.fill_(-1)
        saver.look()


def when_said(home: Path, saves: int) -> float:
    """Wait until rank 0 was told of so many saves; the time then."""
    deadline = time.monotonic() + 120
    while not (home / "said").exists() or (home / "said").read_text().count("\n") < saves:
        assert time.monotonic() < deadline, "the first saves never came"
        time.sleep(0.001)
    return time.monotonic()


def prove(number: int, behind: bool) -> dict[str, Any]:
    rng = random.Random(1000 * behind + number)
    home = Path(tempfile.mkdtemp(prefix="mega-kill-"))
    ranks: list[int] = []
    try:
        for rank in range(WORLD):
            child = os.fork()
            if not child:
                try:
                    rank_body(rank, home, behind)
                finally:
                    os._exit(3)
            ranks.append(child)
        one = when_said(home, 1)
        began = when_said(home, 2)
        moment = rng.uniform(0, 3)  # in saves, so that any moment of a save is as likely on any machine
        time.sleep(moment * (began - one))
        for child in ranks:
            os.kill(child, signal.SIGKILL)
        codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks}
        ranks = []
        assert -signal.SIGKILL in codes and codes <= {-signal.SIGKILL, 3}, codes  # 3: saw another one die first
        killed = time.monotonic() - began
        said = int((home / "said").read_text().split()[-1])
        store = CheckpointStore(home / "run")
        unfinished = len(list(store.directory.glob("*.tmp")))
        newest = store.newest()
        assert newest is not None and newest >= said, (newest, said)
        checkpoint = store.open(newest)
        for key, (whole, dtype) in checkpoint.tensors.items():
            tensor = torch.zeros(whole, dtype=dtype)
            checkpoint.read([Piece(key, whole, (0,) * len(whole), tensor)])
            assert bool((tensor == newest).all()), f"step {newest}: {key}"
        store.save(900, [Piece("w", (1,), (0,), torch.ones(1))], {})
        assert store.newest() == 900 and not list(store.directory.glob("*.tmp"))
        return {"after": round(killed, 3), "said": said, "newest": newest, "unfinished": unfinished}
    finally:
        for child in ranks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        shutil.rmtree(home, ignore_errors=True)


ITEMS: list[Item] = [
    (f"{'behind' if behind else 'at once'} {number}", lambda number=number, behind=behind: prove(number, behind))  # type: ignore[misc]
    for behind in (False, True)
    for number in range(KILLS)
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    run("checkpoint_kills", ITEMS)
