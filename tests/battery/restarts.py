"""Ranks and hosts that are lost under --max-restarts: whether the run goes on, from where, how soon, and who is named.

    python tests/battery/restarts.py [kill stop host cut poisson] [--times N] [--out rows.jsonl]

Makes four hosts of two ranks from nothing: network namespaces on a switch where they can be made, else four launchers
on the loopback interface. One job takes ten faults, one in each stretch of STRETCH steps at a random step; after each
stretch, weights and moments of the save are compared with those of a run that nothing disturbed. One JSON line a fault:
seconds until ranks were started again and until a step was made, the line about the restart, and whether the save is
bitwise equal; one more a job: processes and files that were left. `kill`: SIGKILL of a random rank. `stop`: SIGSTOP,
with --timeout-minutes 0.25. `host`: SIGKILL of all processes of a random host, for which a spare is there. `cut`: the
link of a random host is cut, three times a job. `poisson`: SIGKILL of random ranks, of one a host, at intervals of
--mean seconds for --minutes; `goodput` is the share of the time that was spent in steps which count, `but_faults` the
share that kills did not take: from one to the next step, and steps that were made twice. Ranks that start again import
nothing, so both are net of imports of torch and gross.
Rows that are in --out already are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.support.hosts import Host, hosts

STRETCH, FAULTS, COUNT, NPROC = 30, 10, 4, 2

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --global-batch 8 "
    f"--lr 1e-3 --eval-iters 0 --device cpu --log-interval 1000 --zero 1 --save-interval {STRETCH}"
).split()

PORT = 29617

POISSON = "--layers 2 --hidden 256 --heads 4 --seq-length 256 --vocab 256 --save-interval 300".split()
"""Of steps of half a second on two cores, so that they and not what is between them take the time."""

TIMES = {"cut": 3}
"""Faults of a job, where not FAULTS."""


class Fleet:
    """Four hosts, and spares, that run one job. place: of its saves and temporary files. nproc: ranks of each."""

    def __init__(self, made: list[Host] | None, place: Path, words: list[str], spares: int = 0, nproc: int = NPROC):
        self.made, self.place, self.words, self.nproc = made, place, words, nproc
        self.first = (made[0].address if made else "127.0.0.1"), PORT
        self.jobs: list[tuple[str, subprocess.Popen[str]]] = []
        self.lines: list[tuple[float, str, str]] = []
        self.known: set[int] = set()
        (place / "tmp").mkdir(parents=True)
        for number in range(COUNT + spares):
            self.start(number)

    def start(self, number: int) -> None:
        variables = {"MASTER_ADDR": self.first[0], "MASTER_PORT": str(self.first[1]), "TMPDIR": str(self.place / "tmp")}
        hosted = ["--nproc", str(self.nproc), "--hosts", str(COUNT), "--max-restarts", "3", "--peer-copy-interval", "5"]
        command = [sys.executable, "-m", "mega", *RUN, *hosted, *self.words, "--save", str(self.place / "run")]
        variables["OMP_NUM_THREADS"] = "1"
        if self.made:
            name, job = (
                self.made[number % len(self.made)].name,
                self.made[number % len(self.made)].start(command, variables),
            )
        else:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            name, job = "", subprocess.Popen(command, env={**os.environ, **variables}, text=True, **pipes)  # type: ignore[call-overload]
        self.jobs.append((name, job))
        threading.Thread(target=self._read, args=(name, job), daemon=True).start()

    def _read(self, name: str, job: subprocess.Popen[str]) -> None:
        assert job.stdout is not None
        for line in job.stdout:
            self.lines.append((time.monotonic(), name, line.rstrip()))
            if led := re.search(r"MASTER_ADDR (\S+) MASTER_PORT (\d+)", line):
                self.first = led[1], int(led[2])

    def ranks(self, job: subprocess.Popen[str]) -> list[int]:
        """The ranks of a host, which are the fork server's children."""
        found = [rank for server in _children(job.pid) for rank in _children(server)]
        self.known |= {job.pid, *_children(job.pid), *found}
        return found

    def running(self) -> list[tuple[str, subprocess.Popen[str]]]:
        return [(name, job) for name, job in self.jobs if job.poll() is None and len(self.ranks(job)) == self.nproc]

    def step(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            rows = (self.place / "run/metrics.jsonl").read_text().splitlines()
            return max(int(json.loads(row)["step"]) for row in rows[-3:])
        return 0

    def wait(self, step: int, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while self.step() < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {step} within {seconds:.0f} s: {self.lines[-6:]}")
            time.sleep(0.02)

    def wait_spares(self, seconds: float = 240) -> None:
        """Until those that were started beyond the four have joined."""
        deadline = time.monotonic() + seconds
        while sum("is a spare" in line for _, _, line in list(self.lines)) < len(self.jobs) - COUNT:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a spare did not join within {seconds:.0f} s: {self.lines[-6:]}")
            time.sleep(0.05)

    def restart(self, since: float, seconds: float = 240) -> tuple[float, str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for moment, _, line in list(self.lines):
                if moment > since and line.startswith("mega: restart "):
                    return moment, line
            if all(job.poll() is not None for _, job in self.jobs):
                break
            time.sleep(0.02)
        raise TimeoutError(f"no restart within {seconds:.0f} s: {self.lines[-6:]}")

    def end(self) -> dict[str, Any]:
        """Wait for all; what is left of them."""
        codes = [job.wait(timeout=240) for _, job in self.jobs]
        deadline = time.monotonic() + 15
        while (alive := [pid for pid in self.known if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return {"codes": codes, "alive": alive, "files": [path.name for path in (self.place / "tmp").iterdir()]}

    def close(self) -> None:
        for _, job in self.jobs:
            for pid in (*self.ranks(job), *_children(job.pid), job.pid) if job.poll() is None else ():
                _kill(pid)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def tensors(place: Path, step: int) -> dict[str, bytes]:
    files = sorted((place / f"step-{step:07}").glob("*.safetensors"))
    return {f"{path.name} {name}": array.tobytes() for path in files for name, array in load_file(path).items()}


def undisturbed(steps: int, ranks: int = COUNT * NPROC) -> tuple[Path, float]:
    """The saves of a run of so many ranks on one host, made once; and its seconds a step."""
    place = Path(tempfile.gettempdir()) / f"mega-undisturbed-{steps}-{ranks}-{os.getuid()}"
    if not (place / f"step-{steps:07}").exists():
        shutil.rmtree(place, ignore_errors=True)
        command = [sys.executable, "-m", "mega", *RUN, "--steps", str(steps), "--nproc", str(ranks)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--save", str(place)], check=True, capture_output=True, env=environ)
    rows = [json.loads(row) for row in (place / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(row["seconds"] for row in rows if "seconds" in row)
    return place, seconds[len(seconds) // 2]


def strike(kind: str, fleet: Fleet, chance: random.Random) -> tuple[str, str]:
    """One fault; the name of the host that has it, and what was hit."""
    name, job = chance.choice(fleet.running())
    if kind == "cut":
        switch, _, number = name.rpartition("-")
        subprocess.run(["ip", "-n", f"{switch}-switch", "link", "set", f"port{number}", "down"], check=True)
        return name, "its link"
    if kind == "host":
        lost = [*fleet.ranks(job), *_children(job.pid), job.pid]
        for pid in lost:
            _kill(pid)
        return name, "all of it"
    place = chance.randrange(fleet.nproc)
    _kill(fleet.ranks(job)[place], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    return name, f"local rank {place}"


def mend(name: str) -> None:
    """The link of a host that was cut."""
    switch, _, number = name.rpartition("-")
    subprocess.run(["ip", "-n", f"{switch}-switch", "link", "set", f"port{number}", "up"], check=True)


def play(kind: str, seed: int, made: list[Host] | None) -> Iterator[dict[str, Any]]:
    """One job with its faults."""
    steps, chance = STRETCH * (FAULTS + 1), random.Random(f"{kind} {seed}")
    reference, _ = undisturbed(steps)
    with tempfile.TemporaryDirectory(prefix="mega-restarts-") as folder:
        minutes = "0.25" if kind == "stop" else "3"
        words = ["--steps", str(steps), "--timeout-minutes", minutes]
        fleet = Fleet(made, Path(folder), words, spares=int(kind in ("host", "cut")))
        try:
            for number in range(TIMES.get(kind, FAULTS)):
                at = STRETCH * number + chance.randint(3, STRETCH - 3)
                fleet.wait(at)
                fleet.wait_spares()
                began = time.monotonic()
                name, what = strike(kind, fleet, chance)
                row: dict[str, Any] = {
                    "kind": kind,
                    "job": seed,
                    "number": number,
                    "step": at,
                    "host": name,
                    "what": what,
                }
                moment, line = fleet.restart(began)
                resumed = int(found[1]) if (found := re.search(r"from step (\d+)", line)) else 0
                fleet.wait(resumed + 1)
                row |= {"restart_s": round(moment - began, 2), "line": line, "resumed": resumed}
                row["step_s"] = round(_moved(fleet, moment) - began, 2)
                if kind == "host":
                    fleet.start(chance.randrange(COUNT))
                elif kind == "cut":
                    mend(name)
                    fleet.start(int(name.rpartition("-")[2]))
                fleet.wait(STRETCH * (number + 1) + 1)
                step = STRETCH * (number + 1)
                row["equal"] = tensors(fleet.place / "run", step) == tensors(reference, step)
                row["named"] = not name or name in line
                yield row
            yield {"kind": kind, "job": seed, "number": "end", **fleet.end()}
        finally:
            fleet.close()


def _moved(fleet: Fleet, since: float) -> float:
    """When the ranks that were started again had made a step: rank 0 prints the first one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for moment, _, line in list(fleet.lines):
            if moment > since and line.startswith("step "):
                return moment
        time.sleep(0.02)
    return float("nan")


def poisson(minutes: float, mean: float, seed: int, copies: int, made: list[Host] | None) -> dict[str, Any]:
    """Goodput under kills at random times."""
    steps, chance = 100_000, random.Random(f"poisson {seed}")
    with tempfile.TemporaryDirectory(prefix="mega-restarts-") as folder:
        words = ["--steps", str(steps), "--timeout-minutes", "1", "--keep-last", "2", *POISSON]
        words += ["--peer-copy-interval", str(copies)]
        fleet = Fleet(made, Path(folder), words, nproc=1)
        try:
            fleet.wait(10)
            began, first, kills = time.monotonic(), fleet.step(), []
            while (now := time.monotonic()) < began + 60 * minutes:
                pause = min(chance.expovariate(1 / mean), began + 60 * minutes - now)
                time.sleep(pause)
                if time.monotonic() < began + 60 * minutes and fleet.running():
                    kills.append((time.monotonic(), fleet.step()))
                    strike("kill", fleet, chance)
            seconds, made_steps = time.monotonic() - began, fleet.step() - first
            rows = [json.loads(row) for row in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
            took = {row["step"]: row["seconds"] for row in rows if "seconds" in row and row["step"] > first}
            restarts = sum(line.startswith("mega: restart ") for _, _, line in fleet.lines) // COUNT
            lost = [_lost(fleet, *kill) for kill in kills]
        finally:
            fleet.close()
    figures: dict[str, Any] = {"kind": "poisson", "job": seed, "number": 0, "minutes": minutes, "mean": mean}
    figures |= {"copies": copies, "kills": len(kills), "lost": lost}
    figures |= {"restarts": restarts, "steps": made_steps, "load": os.getloadavg()[0]}
    usual = statistics.median(took.values())
    faults = sum(each["step_s"] + usual * each["steps"] for each in lost if each)
    figures |= {"step_s": round(usual, 4), "goodput": round(sum(took.values()) / seconds, 3)}
    return {**figures, "but_faults": round(1 - faults / seconds, 3)}


def _lost(fleet: Fleet, killed: float, step: int) -> dict[str, float]:
    """What a kill after a step cost: seconds to the restart and to the next step, and steps made twice."""
    lines = [(moment - killed, line) for moment, _, line in fleet.lines if moment > killed]
    restarts = [(after, line) for after, line in lines if line.startswith("mega: restart ")]
    steps = [after for after, line in lines if line.startswith("step ") and restarts and after > restarts[0][0]]
    if not steps:
        return {}
    found = re.search(r"from step (\d+)", restarts[0][1])
    again = step - (int(found[1]) if found else 0)
    return {"restart_s": round(restarts[0][0], 2), "step_s": round(steps[0], 2), "steps": again}


@contextlib.contextmanager
def fleet_of(namespaces: bool) -> Iterator[list[Host] | None]:
    """Hosts in namespaces, if they can be made."""
    if not namespaces:
        yield None
        return
    with hosts(COUNT) as made:
        yield made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=["kill", "stop", "host"])
    parser.add_argument("--times", type=int, help="jobs of each kind [kill 5, stop 2, host 1]")
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--loopback", action="store_true", help="no namespaces")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--mean", type=float, default=180)
    parser.add_argument("--copies", type=int, default=10, help="steps between two copies in memory under poisson")
    parser.add_argument("--out", type=Path, default=Path("build/battery/restarts.jsonl"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    there: list[Mapping[str, Any]] = []
    if arguments.out.exists():
        there = [json.loads(row) for row in arguments.out.read_text().splitlines()]
    with fleet_of(not arguments.loopback) as made, arguments.out.open("a") as out:
        for kind in arguments.kinds:
            for seed in range(arguments.first, arguments.times or {"kill": 5, "stop": 2}.get(kind, 1)):
                done = sum(row["kind"] == kind and row["job"] == seed for row in there)
                if done > TIMES.get(kind, FAULTS) or (kind == "poisson" and done):
                    continue
                rows = (
                    [poisson(arguments.minutes, arguments.mean, seed, arguments.copies, made)]
                    if kind == "poisson"
                    else play(kind, seed, made)
                )
                for row in rows:
                    print(json.dumps(row), flush=True)
                    out.write(json.dumps(row) + "\n")
                    out.flush()


if __name__ == "__main__":
    main()
