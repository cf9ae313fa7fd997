"""Loss curves on real text: the fast operators and --fp8 against `--ops reference`, one process, every run a JSON line.

    python tests/gpu/curves.py --data-path novels_text_document --out rows.jsonl [--steps 200] [--only llama]

Every run is `mega pretrain` as a user types it. Judged behind the first tenth of the steps, in which a loss falls
fastest: bf16 within 1e-2 relative of the reference at every step, fp8 within 1e-2 in the mean of each tenth.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mega import cli

COMMON = (
    "--seq-length 1024 --micro-batch 8 --global-batch 16 --vocab 50257 --dtype bf16 --hidden-dropout 0 "
    "--attention-dropout 0 --lr 3e-4 --lr-warmup-steps 40 --adam-beta2 0.95 --eval-iters 0 --split 1,0,0 "
    "--log-interval 50 --no-progress"
).split()
"""A calm beginning: at twice the rate, and beta2 0.999, the Llama's loss leaps at step 25, any rounding decides where
it lands, and curves that are all right lie 1.4 % apart."""
MODELS: Mapping[str, Sequence[str]] = {
    "gpt": "--model gpt2-124m".split(),
    "gpt-dropout": "--model gpt2-124m --hidden-dropout 0.1 --attention-dropout 0.1".split(),
    "llama": ("--family llama --layers 12 --hidden 768 --heads 12 --kv-heads 4 --ffn 2048 --positions 1024".split()),
}
RUNS: Mapping[str, Sequence[str]] = {
    "reference": ("--ops", "reference"),
    "fast": (),
    "fp8": ("--fp8",),
}
BOUND = 1e-2


def losses(words: Sequence[str]) -> list[float]:
    """Loss of every step of one run."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        code = cli.main(["pretrain", *words, "--metrics", str(metrics), "--data-cache", folder])
        if code:
            raise RuntimeError(f"mega pretrain ended with {code}")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def distance(found: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Largest relative difference of a step, and of the mean of a tenth of the run, behind the first tenth."""
    tenth = max(1, len(reference) // 10)
    pairs = list(zip(found, reference, strict=True))[tenth:]
    tenths = [pairs[at : at + tenth] for at in range(0, len(pairs), tenth)]
    means = [(sum(a for a, _ in part), sum(b for _, b in part)) for part in tenths]
    return max(abs(a / b - 1) for a, b in pairs), max(abs(a / b - 1) for a, b in means)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-path", required=True, help="prefix of GPT-2 tokens")
    parser.add_argument("--out", required=True, help="file that gets one JSON line a run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default=",".join(MODELS), help="models")
    parser.add_argument("--runs", default=",".join(RUNS), help="runs; the first is what the others are compared with")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    wrong = []
    for model in asked.only.split(","):
        reference: list[float] = []
        for run in asked.runs.split(","):
            begin = time.perf_counter()
            words = [*COMMON, *MODELS[model], *RUNS[run], "--data-path", asked.data_path, "--steps", str(asked.steps)]
            found = losses([*words, "--device", asked.device])
            reference = reference or found
            step, tenth = distance(found, reference)
            fine = {"fast": step <= BOUND, "fp8": tenth <= BOUND}.get(run, True)
            wrong += [] if fine else [f"{model} {run}"]
            row = {"model": model, "run": run, "fine": fine, "step": step, "tenth": tenth, "last": found[-1]}
            print(json.dumps(row), flush=True)
            with open(asked.out, "a", encoding="utf-8") as file:
                seconds = time.perf_counter() - begin
                file.write(json.dumps({**row, "seconds": seconds, "losses": found}) + "\n")
    print(f"outside: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
