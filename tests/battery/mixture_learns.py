"""A small mixture of experts learns English novels better than its dense twin of equal active size.

seed N   two byte models from one seed, of equal layers, heads, data and steps: a dense network of width 256, and 8
         experts of width 128 of which every token passes 2. Their losses on three novels that neither has seen.
all      the seeds' differences: their mean is beyond three standard errors. It reads the rows of the seeds.

$MEGA_LEARNS_FLAGS is added to both command lines (another rate, a device); the rows keep it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.data_ledger import ROWS, Item, run
from tests.support.shared import shared

SEEDS, STEPS, ERRORS, EVERY = 3, 3000, 3.0, 2
"""EVERY: of the passages, one of how many is read."""
FLAGS = os.environ.get("MEGA_LEARNS_FLAGS", "")
HELD_OUT = ("Hardy_Tess", "Doyle_Lost", "Stevenson_Treasure")
LINE = (
    "pretrain --family llama --norm rmsnorm --activation swiglu --position rope --no-bias --tied "
    "--layers 2 --hidden 64 --heads 4 --vocab 257 --hidden-dropout 0 --attention-dropout 0 --tokenizer NullTokenizer "
    "--vocab-size 256 --seq-length 128 --micro-batch 64 --global-batch 64 --lr 2e-3 --lr-decay cosine "
    f"--lr-warmup-steps 100 --steps {STEPS} --eval-iters 48 --eval-interval {STEPS} --log-interval 200 --no-progress"
)
MODELS = {"dense": "--ffn 256", "mixture": "--ffn 256 --experts 8 --expert-ffn 128 --balance-loss 0.01"}


@lru_cache(maxsize=1)
def corpora() -> tuple[str, str]:
    """Token files of bytes: of the novels that are learnt, and of those that are not, one passage of EVERY."""
    folder = Path(tempfile.mkdtemp(prefix="mega-learns-"))
    with gzip.open(shared("novels/novels.jsonl.gz"), "rt", encoding="utf-8") as file:
        passages = [json.loads(line) for line in file]
    found = []
    for name, held in (("learnt", False), ("unseen", True)):
        texts = folder / f"{name}.jsonl"
        mine = [each["text"] for each in passages if each["id"].startswith(HELD_OUT) == held][::EVERY]
        rows = [{"text": " ".join(map(str, text.encode()))} for text in mine]
        texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = f"preprocess --input {texts} --output-prefix {folder / name} --tokenizer NullTokenizer --vocab-size 256"
        mega(*words.split())
        found.append(str(next(folder.glob(f"{name}*.bin"))).removesuffix(".bin"))
    return found[0], found[1]


def mega(*words: str) -> str:
    made = subprocess.run([sys.executable, "-m", "mega", *words], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-800:]
    return made.stdout


def learnt(model: str, seed: int) -> float:
    """The loss on the unseen novels after the last step."""
    train, unseen = corpora()
    with tempfile.TemporaryDirectory(prefix="mega-learns-") as home:
        data = f"--train-data {train} --valid-data {unseen} --seed {seed} --metrics {home}/metrics.jsonl"
        mega(*f"{LINE} {MODELS[model]} {data} {FLAGS}".split())
        rows = [json.loads(line) for line in (Path(home) / "metrics.jsonl").read_text().splitlines()]
    return next(float(row["valid_loss"]) for row in reversed(rows) if "valid_loss" in row)


def prove(seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {model: learnt(model, seed) for model in MODELS}
    return found | {"gain": found["dense"] - found["mixture"], "flags": FLAGS}


def together() -> dict[str, Any]:
    rows = [json.loads(line) for line in (ROWS / "mixture_learns.jsonl").read_text().splitlines()]
    latest = {row["item"]: row for row in rows if row.get("ok") and row["item"].startswith("seed ")}
    gains = [row["gain"] for row in latest.values()]
    assert len(gains) >= SEEDS, f"{len(gains)} seeds are known"
    mean, error = statistics.mean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    assert mean > ERRORS * error, f"{mean} against {error}"
    return {"gain": mean, "standard_error": error, "errors": mean / error}


def items() -> Iterator[Item]:
    for seed in range(1, SEEDS + 1):
        yield f"seed {seed}", lambda seed=seed: prove(seed)  # type: ignore[misc]
    yield "all", together


if __name__ == "__main__":
    run("mixture_learns", items())
