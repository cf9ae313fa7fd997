"""What the guards of a run cost: one run by turns without an audit, with one every 5 steps, and with skipped spikes.

    python -m tests.gpu.guards --out rows.jsonl [--ranks 2] [--rounds 2] [--device cpu]

GPT 345M on data ranks through `mega pretrain`, a JSON line a run. `step`: seconds of a step by the clock, from the line
of one step in metrics.jsonl to that of a later one. In the end a line says what one audit takes, which share of a run
that is with the default interval, and what --on-spike skip adds to a step, of the least seconds of every kind.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mega.core.config.run import Options
from tests.gpu.layouts import append

KINDS: Mapping[str, Sequence[str]] = {
    "no audit": ("--audit-interval", "0"),
    "audit": ("--audit-interval", "5"),
    "skip": ("--audit-interval", "0", "--on-spike", "skip", "--on-nan", "skip"),
}
FIRST, STEPS, INTERVAL = 20, 70, 5
SIZES = {
    "cuda": "--model gpt2-345m --dtype bf16 --micro-batch 16 --global-batch 64",
    "cpu": "--layers 2 --hidden 32 --heads 2 --seq-length 32 --vocab 512 --micro-batch 1 --global-batch 4",
}


def seconds_of(kind: str, ranks: int, device: str) -> float:
    """Of a step, in the mean over those after FIRST."""
    with tempfile.TemporaryDirectory() as place:
        metrics = Path(place) / "metrics.jsonl"
        line = [
            *(sys.executable, "-m", "mega", "pretrain", *SIZES[device].split(), *KINDS[kind], "--mock-data"),
            *("--steps", str(STEPS), "--lr", "1e-4", "--eval-iters", "0", "--nproc", str(ranks), "--device", device),
            *("--metrics", str(metrics), "--no-progress", "--hidden-dropout", "0", "--attention-dropout", "0"),
        ]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        began, first = 0.0, 0
        while process.poll() is None:
            if (steps := steps_in(metrics)) >= FIRST and not first:
                began, first = time.perf_counter(), steps
            if steps >= STEPS:
                break
            time.sleep(0.002)
        ended = time.perf_counter()
        said, _ = process.communicate()
        if process.returncode or not first:
            raise RuntimeError(said[-1500:])
        return (ended - began) / (STEPS - first)


def steps_in(metrics: Path) -> int:
    return metrics.read_text().count('"grad_norm"') if metrics.exists() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    asked = parser.parse_args(arguments)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(asked.rounds):
        for kind, times in found.items():
            times.append(seconds_of(kind, asked.ranks, asked.device))
            append(asked.out, {"row": f"guards: {kind}", "ranks": asked.ranks, "turn": turn, "step": times[-1]})
    plain, audited, skipped = (min(found[kind]) for kind in KINDS)
    audit, every = INTERVAL * (audited - plain), Options().runtime.audit_interval
    shares = {"audit_share": audit / (every * plain), "skip_share": skipped / plain - 1}
    append(asked.out, {"row": "guards", "ranks": asked.ranks, "step": plain, "audit": audit, **shares})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
