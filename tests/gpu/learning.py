"""Held-out loss of GPT-2 124M on real text: Muon against AdamW with more tokens, and fp8 against bf16; one GPU.

    python -m tests.gpu.learning --seen novels_text_document --unseen held_out_text_document --out rows.jsonl
        [--steps 2000] [--at-once 3] [--seconds 500] [--only "tune;fp8;muon"]

    tune    AdamW and Muon with one seed and each of RATES; the best rate of each optimizer is taken for `muon`
    muon    two more seeds of each: AdamW for all steps, Muon for 0.8 of the steps, each with a whole schedule
    fp8     the first seed of AdamW at its first rate, in fp8 by both scalings

Both files have GPT-2's tokens. Each run is `mega pretrain` as a user types it. Each run is one JSON line with the
training losses in tenths of the run, and the losses on the held-out file, and runs that the file already has are not
repeated. No run knows of another run's result but for the rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
RATES = {"adam": (6e-4, 3e-4, 1e-3, 2e-3), "muon": (6e-4, 1e-3, 2e-3)}
SEEDS = (1, 2, 3)
SHARE = 0.8
"""Tokens that Muon is given, as a share of AdamW's tokens."""
COMMON = (
    "--model gpt2-124m --seq-length 1024 --micro-batch 8 --global-batch 8 --vocab 50257 --dtype bf16 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --lr-decay cosine --adam-beta2 0.95 --weight-decay 0.1 "
    "--eval-iters 48 --log-interval 100 --no-progress"
).split()
FORMS = {
    "bf16": (),
    "fp8": ("--fp8",),
    "fp8 block": ("--fp8", "--fp8-scaling", "block"),
}


class Case(NamedTuple):
    """One run."""

    optimizer: str
    form: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.optimizer} {self.form} {self.rate:g} seed {self.seed}"


def words(case: Case, asked: argparse.Namespace) -> list[str]:
    steps = round(asked.steps * (SHARE if case.optimizer == "muon" else 1))
    sizes = ["--steps", steps, "--eval-interval", max(1, steps // 4), "--lr-warmup-steps", steps // 20]
    rate = ["--lr", case.rate, "--min-lr", case.rate / 10, "--seed", case.seed, "--optimizer", case.optimizer]
    if case.optimizer == "muon":
        rate += ["--muon-factor", 0.2, "--muon-nesterov"]
    files = ["--train-data", asked.seen, "--valid-data", asked.unseen]
    return [*COMMON, *map(str, [*sizes, *rate, *files]), *FORMS[case.form], *asked.more.split()]


def trained(case: Case, asked: argparse.Namespace, left: float) -> Row:
    """Train once and return the row of this run."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        command = [sys.executable, "-m", "mega", "pretrain", *words(case, asked), "--metrics", str(file)]
        command += ["--data-cache", folder]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return {"row": case.name, "error": "out of time"}
        if ended.returncode:
            lines = [line for line in ended.stderr.splitlines() if not line.startswith("frame #")]
            return {"row": case.name, "error": "\n".join(lines)[-2000:]}
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["valid_loss"] for row in rows if "valid_loss" in row]
    tenth = max(1, len(losses) // 10)
    tenths = [round(statistics.mean(losses[at : at + tenth]), 5) for at in range(0, len(losses), tenth)]
    return {
        "row": case.name, **case._asdict(), "steps": len(losses), "held_out": held_out, "tenths": tenths,
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def cases(part: str, rows: Sequence[Row]) -> Iterator[Case]:
    if part == "tune":
        yield from (Case(optimizer, "bf16", rate, SEEDS[0]) for optimizer in RATES for rate in RATES[optimizer])
    elif part == "fp8":
        yield from (Case("adam", form, RATES["adam"][0], SEEDS[0]) for form in FORMS)
    else:
        yield from (Case(optimizer, "bf16", best(optimizer, rows), seed) for seed in SEEDS for optimizer in RATES)


def best(optimizer: str, rows: Sequence[Row]) -> float:
    """Return the rate with which the first seed of the optimizer ends at the lowest held-out loss."""
    ended = {
        row["rate"]: row["held_out"][-1]
        for row in rows
        if row.get("optimizer") == optimizer and row["form"] == "bf16" and row["seed"] == SEEDS[0]
    }
    return min(ended, key=lambda rate: ended[rate]) if ended else RATES[optimizer][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seen", required=True)
    parser.add_argument("--unseen", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=3, help="number of runs that share the GPU")
    parser.add_argument("--seconds", type=float, default=500.0, help="runs that take longer than this are stopped")
    parser.add_argument("--only", default="tune;fp8;muon", help="parts, with ; between")
    parser.add_argument("--more", default="", help="further flags of `mega pretrain`")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    rows = [row for row in rows if "error" not in row]
    end, failed = time.monotonic() + asked.seconds, False
    for part in asked.only.split(";"):
        known = {row["row"] for row in rows}
        with ThreadPoolExecutor(asked.at_once) as pool:
            left = [case for case in cases(part, rows) if case.name not in known]
            found = pool.map(lambda case: trained(case, asked, max(1.0, end - time.monotonic())), left)
            for row in found:
                failed |= "error" in row
                rows += [row] if "error" not in row else []
                with asked.out.open("a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file, flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
