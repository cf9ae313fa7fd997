"""Two tensor ranks of one thread each against one process of two threads, on a CPU, by turns.

    python -m tests.battery.serving_ranks --out rows.jsonl [--rounds 12] [--loads stream many prompts]

`mega bench serve`'s engine on a Llama of 134 million parameters with random weights in fp32. Both are loaded at the
same time and take turns; the one that waits sleeps. A JSON line a load: tokens a second of both, and the ratio of the
two in a round, [median, least, most]. Rounds in which other processes had more than --busy of a core do not count, up
to --patience rounds a load; where none counts, all do, and the line says how much others had. `work`: seconds of the
processor that one process of one thread takes, over twice those of rank 0, its waiting included: what two ranks would
reach of two threads that lose nothing, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mega.core.bench.load import Load, run_on_engine, summary
from mega.core.bench.serving import ServingBench, engine_of_plan
from mega.core.config.compose import compose
from mega.core.config.resolve import model_alone
from mega.core.inference.options import EngineOptions
from mega.core.parallel.mesh import Mesh
from mega.core.processes.connect import connect
from mega.core.processes.launch import launch

SHAPE = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 2048, "vocab": 32000, "positions": 1024}
LOADS = {"stream": Load(0, 1, 32, 24), "many": Load(0, 16, 32, 8), "prompts": Load(0, 2, 256, 1)}
WAIT = 0.002


def rank(tp: int, folder: str) -> int:
    """Answer `go-N` files, which name a load, by `done-N`, until one is empty."""
    world, device, groups = connect("cpu")
    mesh = Mesh(world.rank, tp=tp, groups=groups)
    model = model_alone(compose("tiny-llama", flags=SHAPE))
    options = EngineOptions(max_requests=16, cache_tokens=16 * 512)
    plan = ServingBench(model=model, engine=options, tp=tp, dtype="fp32")
    engine, _ = engine_of_plan(plan, mesh, device)
    if engine is None:
        return 0
    place, number = Path(folder), 0
    while True:
        go = place / f"go-{number}"
        if not go.exists():
            time.sleep(WAIT)
            continue
        name = go.read_text()
        if not name:
            engine.close()
            return 0
        process, load = time.process_time(), LOADS[name]
        row = summary(load, run_on_engine(engine, load))
        found = {"tokens_per_second": row.tokens_per_second, "seconds": row.seconds}
        done = place / f"part-{number}"
        done.write_text(json.dumps({**found, "processor": time.process_time() - process}))
        done.rename(place / f"done-{number}")
        number += 1


class Side:
    """One of the two, as processes of their own."""

    def __init__(self, tp: int, threads: int):
        self.folder = tempfile.TemporaryDirectory()
        self._number = 0
        command = [sys.executable, "-m", "tests.battery.serving_ranks", "--side", str(tp), self.folder.name]
        self._process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)})

    def run(self, name: str) -> dict[str, float]:
        """others: cores that other processes had meanwhile."""
        began, before = time.monotonic(), _others()
        place, number = Path(self.folder.name), self._number
        self._number += 1
        (place / "go").write_text(name)
        (place / "go").rename(place / f"go-{number}")
        while not (done := place / f"done-{number}").exists():
            assert self._process.poll() is None
            time.sleep(WAIT)
        found: dict[str, float] = json.loads(done.read_text())
        return {**found, "others": (_others() - before) / (time.monotonic() - began)}

    def close(self) -> None:
        (Path(self.folder.name) / f"go-{self._number}").write_text("")
        self._process.wait()
        self.folder.cleanup()


def _others() -> float:
    """Seconds of the processor that all but this process's descendants have had since the machine started."""
    fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = sum(fields) - fields[3] - fields[4]  # not idle, nor waiting for a disk
    parents, times = dict[int, int](), dict[int, int]()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (place / "stat").read_text().rpartition(")")[2].split()
            parents[int(place.name)], times[int(place.name)] = int(stat[1]), int(stat[11]) + int(stat[12])
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return (busy - sum(times.get(pid, 0) for pid in own)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/battery/serving_ranks.jsonl"))
    parser.add_argument("--rounds", type=int, default=12, help="rounds that count")
    parser.add_argument("--busy", type=float, default=0.2)
    parser.add_argument("--patience", type=int, default=60)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        from tests.battery import serving_ranks  # by name, for the ranks

        raise SystemExit(launch(int(given.side[0]), serving_ranks.rank, int(given.side[0]), given.side[1]))
    sides = {"one process": Side(1, 2), "two ranks": Side(2, 1), "one thread": Side(1, 1)}
    for name in given.loads:
        rounds: list[dict[str, dict[str, float]]] = []
        for turn in range(1 + given.patience):
            both = {side: each.run(name) for side, each in sides.items()}
            rounds += [both] if turn else []
            quiet = [each for each in rounds if max(row["others"] for row in each.values()) <= given.busy]
            if len(quiet) >= given.rounds:
                break
        found = {side: [each[side] for each in quiet or rounds] for side in sides}
        speeds = {side: [row["tokens_per_second"] for row in rows] for side, rows in found.items()}
        ratios = [two / one for one, two in zip(speeds["one process"], speeds["two ranks"], strict=True)]
        row: dict[str, Any] = {"load": name}
        row |= {side: round(statistics.median(each), 1) for side, each in speeds.items()}
        row |= {"ratio": [round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))]}
        alone, first = ([each["processor"] for each in found[side]] for side in ("one thread", "two ranks"))
        row |= {"work": round(statistics.median(alone) / 2 / statistics.median(first), 3)}
        others = statistics.median(each["others"] for rows in found.values() for each in rows)
        row |= {"rounds": len(quiet or rounds), "of": len(rounds), "others": round(others, 2)}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    for each in sides.values():
        each.close()


if __name__ == "__main__":
    main()
