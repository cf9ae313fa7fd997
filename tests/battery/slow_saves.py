"""Ranks whose disk is slow, or that are stopped while they save: who is named, and whether the run lives.

    python tests/battery/slow_saves.py [--times 5] [--out rows.jsonl]

Three ranks save by the command line; every sync of the first one's takes long, or stops it. One JSON line a run: case,
exit code, seconds, and what stderr had. `within`: a sync of 3 s, where --timeout-minutes are 12 s and a save takes 27.
`beyond`: a sync of 60 s, with --phase-timeout-minutes of 24 s. `stopped`: SIGSTOP in the first sync.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mega.core.processes.launch import launch

RUN = (
    "pretrain --layers 1 --hidden 8 --heads 1 --seq-length 8 --vocab 64 --mock-data --micro-batch 1 --global-batch 3 "
    "--lr 1e-3 --steps 4 --eval-iters 0 --save-interval 2 --device cpu --timeout-minutes 0.2"
).split()

CASES = {"within": (3.0, []), "beyond": (60.0, ["--phase-timeout-minutes", "0.4"]), "stopped": (0.0, [])}

EXPECTED = {
    "within": (0, ""),
    "beyond": (
        1,
        "mega: the other ranks have waited 24 seconds (--phase-timeout-minutes) for rank 0, which answers: ",
    ),
    "stopped": (1, "mega: rank 0 has not answered for 12 seconds (--timeout-minutes)"),
}


def rank(case: str, place: str) -> int:
    """One rank of a case."""
    from mega.cli import main

    seconds, more = CASES[case]
    sync = os.fsync

    def slow(descriptor: int) -> None:
        if case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(seconds)
        sync(descriptor)

    if os.environ["RANK"] == "0":
        os.fsync = slow  # type: ignore[assignment]
    return main([*RUN, *more, "--save", place])


def play(case: str) -> dict[str, object]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, "--case", case, "--place", place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    code, line = EXPECTED[case]
    lines = [each for each in done.stderr.splitlines() if each.startswith("mega:")]
    good = done.returncode == code and (len(lines) == 1 and lines[0].startswith(line) if line else not lines)
    return {"case": case, "good": good, "code": done.returncode, "seconds": time.monotonic() - began, "lines": lines}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/battery/slow_saves.jsonl"))
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--place", default="")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    if arguments.case:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        sys.exit(launch(3, rank, arguments.case, arguments.place))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(arguments.times):
        for case in CASES:
            row = {"number": number, **play(case)}
            print(json.dumps(row), flush=True)
            with arguments.out.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
