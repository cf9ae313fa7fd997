"""Four jobs of 16 processes on one cache, all at once; whoever builds is killed at random moments; stale, half-written
and foreign files lie there before. 20 rounds: every process that lives reads the same arrays, the right ones.

    python tests/battery/data_race.py [item ...]
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.data.cache import Arrays, cached
from mega.core.data.order import blend_order, sample_order
from tests.battery.data_ledger import run

JOBS, PROCESSES, KILLS = 4, 16, 6
LENGTHS = np.random.default_rng(0).integers(1, 500, 20_000, np.int32)
FORK = multiprocessing.get_context("fork")


def order() -> Arrays:
    return vars(sample_order(LENGTHS, 0, len(LENGTHS), seq_length=128, samples=50_000, seed=1))


def blend() -> Arrays:
    return dict(zip(("chosen", "numbers"), blend_order([0.2, 0.3, 0.5], 100_000), strict=True))


ENTRIES = [
    ({"kind": "order"}, ("documents", "samples", "shuffle"), order),
    ({"kind": "blend"}, ("chosen", "numbers"), blend),
]


def digest(arrays: Arrays, names: tuple[str, ...]) -> str:
    found = hashlib.sha256()
    for name in names:
        found.update(f"{arrays[name].dtype} {arrays[name].shape}".encode())
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()


def process(directory: Path, seed: int, told: Connection, gate: Event) -> None:
    """One rank of a job: says "builds" and "writes" whenever it does, and in the end what it read."""
    rng, found = random.Random(seed), []
    gate.wait()
    for key, names, compute in ENTRIES:

        def build(compute: Any = compute) -> Arrays:
            told.send("builds")
            time.sleep(rng.random() * 0.1)
            arrays: Arrays = compute()
            told.send("writes")
            return arrays

        found.append(digest(cached(directory, key, names, build), names))
    told.send(found)


def rubbish(directory: Path, rng: random.Random) -> None:
    """What crashes and other programs leave: cut entries, entries of another key, temporary files, old directories."""
    other = directory / "other"
    for key, names, compute in ENTRIES:
        cached(other, key, names, compute)
    entries = sorted(other.glob("*.safetensors"))
    contents = [entry.read_bytes() for entry in entries]
    for entry, content, foreign in zip(entries, contents, reversed(contents), strict=True):
        kind = rng.choice(("cut", "foreign", "absent", "bytes"))
        if kind != "absent":
            damaged = {"cut": content[: rng.randrange(len(content))], "foreign": foreign, "bytes": rng.randbytes(5000)}
            (directory / entry.name).write_bytes(damaged[kind])
        (directory / f"{entry.name}.0123456789ab.tmp").write_bytes(content[: rng.randrange(len(content))])
        (directory / entry.stem).mkdir(exist_ok=True)


def race(number: int) -> Any:
    def prove() -> dict[str, Any]:
        rng = random.Random(number)
        expected = [digest(compute(), names) for _, names, compute in ENTRIES]
        with tempfile.TemporaryDirectory(prefix="mega-race-") as name:
            directory = Path(name)
            rubbish(directory, rng)
            living: dict[Any, Any] = {}
            gate = FORK.Event()  # all at once
            started = builds = kills = agree = 0

            def start() -> None:
                nonlocal started
                mine, theirs = FORK.Pipe(duplex=False)
                child = FORK.Process(target=process, args=(directory, 1000 * number + started, theirs, gate))
                child.start()
                theirs.close()
                living[mine] = child
                started += 1

            for _ in range(JOBS * PROCESSES):
                start()
            gate.set()
            begin = time.monotonic()
            while living:
                assert time.monotonic() - begin < 240, "hangs"
                for told in wait(list(living), timeout=1):
                    assert isinstance(told, Connection)
                    child = living[told]
                    try:
                        message = told.recv()
                    except EOFError:
                        raise AssertionError(f"a process ended with {child.exitcode} and told nothing") from None
                    builds += message == "builds"
                    if message in ("builds", "writes"):
                        if kills < KILLS and rng.random() < 0.7:
                            time.sleep(rng.random() * 0.03)
                            if child.exitcode is not None:  # it was quicker
                                continue
                            os.kill(child.pid, signal.SIGKILL)
                            child.join()
                            kills += 1
                            del living[told]
                            start()  # the job is launched again
                        continue
                    assert message == expected, "other arrays"
                    agree += 1
                    child.join()
                    assert child.exitcode == 0, child.exitcode
                    del living[told]
            assert agree == JOBS * PROCESSES and kills, (agree, kills, builds, started)
            left = sorted(path.name for path in directory.iterdir() if path.suffix == ".tmp")
            assert not left, left
            for key, names, _ in ENTRIES:
                assert digest(cached(directory, key, names, never), names) in expected
        return {"processes": started, "killed while building": kills, "builds": builds, "agree": agree}

    return prove


def never() -> Arrays:
    raise AssertionError("the entry that is left on the disk is not whole")


if __name__ == "__main__":
    run("data_race", [(f"round {number}", race(number)) for number in range(20)])
