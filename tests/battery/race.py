"""RACE from its archives as shipped: trained, killed and resumed; scored, killed and resumed; on two tensor ranks.

trained     a few steps on the train archive, of a small new BERT, from a folder and from the archive: the same bits
resumed     the training killed by SIGKILL after its first checkpoint, and resumed: the same bits
tp2         the same training on two tensor ranks: the same losses to 1e-4
scored      the dev archive whole, 4,887 questions
killed      two tensor ranks killed by SIGKILL in the middle of that, resumed by one: the same answer to every question
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import CheckpointStore
from tests.battery.data_ledger import ROOT, Item, run
from tests.battery.evaluation import folder, mega
from tests.support.archives import unpack
from tests.support.shared import shared

SHAPE = "--family bert --layers 2 --hidden 32 --heads 4 --seq-length 96".split()
RUN = "--task race --micro-batch 4 --global-batch 8 --steps 6 --save-interval 3 --lr 1e-3 --log-interval 1".split()
QUESTIONS = 4887


def tune(save: str, data: Path, *flags: object) -> list[str]:
    """A line that trains, into a place of that name."""
    vocabulary = ["--vocab-file", shared("bert/bert-base-uncased-vocab.txt"), "--device", "cpu"]
    words = ["finetune", *SHAPE, *RUN, *vocabulary, "--train-data", data, "--save", folder() / save]
    return [str(word) for word in (*words, "--eval-iters", 0, "--resume", "auto", *flags)]


def score(out: Path, *flags: object) -> list[str]:
    load, data = folder() / "archive", shared("race/RACE-dev.tar.gz")
    words = ["eval", "--task", "race", "--load", load, "--valid-data", data, "--device", "cpu", "--json", out]
    return [str(word) for word in (*words, "--micro-batch", 16, *flags)]


def interrupted(words: list[str], sign: Path) -> None:
    """Run a line until `sign` is there, then kill all of its processes."""
    command = [sys.executable, "-m", "mega", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and not sign.exists():
        time.sleep(0.01)
    assert process.poll() is None, "ended before it was killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def trained() -> Path:
    mega(*tune("archive", shared("race/RACE-train-1200.tar.gz")))
    return folder() / "archive"


def losses(name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder() / name / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def same(one: str, other: str) -> None:
    first, second = (CheckpointStore(folder() / name).open(6) for name in (one, other))
    assert set(first.tensors) == set(second.tensors) and not list(diff(first, second))


def from_both() -> dict[str, Any]:
    trained()
    with tarfile.open(shared("race/RACE-train-1200.tar.gz")) as archive:
        unpack(archive, folder() / "unpacked")
    mega(*tune("folder", folder() / "unpacked"))
    same("archive", "folder")
    return {"losses": losses("archive")}


def resumed() -> dict[str, Any]:
    trained()
    line = tune("killed", shared("race/RACE-train-1200.tar.gz"))
    interrupted(line, folder() / "killed" / "step-0000003")
    steps = CheckpointStore(folder() / "killed").steps()
    mega(*line)
    same("archive", "killed")
    return {"killed with": steps}


def two_ranks() -> dict[str, Any]:
    trained()
    data = shared("race/RACE-train-1200.tar.gz")
    mega(*tune("tp2", data, "--nproc", 2, "--tp", 2, "--sequence-parallel"))
    worst = max(abs(one / two - 1) for one, two in zip(losses("archive"), losses("tp2"), strict=True))
    assert worst <= 1e-4, worst
    return {"worst": worst}


@functools.cache
def whole() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures, and the answer to every question."""
    trained()
    mega(*score(out := folder() / "whole.json"))
    return read(out)


def read(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    kept = json.loads(out.read_text())
    rows = [json.loads(line) for line in Path(kept["predictions"]).read_text().splitlines()]
    return {figure["name"]: figure["value"] for figure in kept["figures"]} | {"kept": kept}, rows


def scored() -> dict[str, Any]:
    figures, rows = whole()
    assert figures["total"] == len(rows) == QUESTIONS
    assert sum(row["answer"] == row["label"] for row in rows) == figures["correct"]
    return {"accuracy": figures["accuracy"], "total": figures["total"], "seconds of it": figures["kept"]["seconds"]}


def killed() -> dict[str, Any]:
    _, expected = whole()
    out = folder() / "killed.json"
    interrupted(score(out, "--nproc", 2, "--tp", 2), partial := Path(f"{out}.partial"))
    done = json.loads(partial.read_text())["examples"]
    assert 0 < done < QUESTIONS and not out.exists()
    mega(*score(out))
    figures, rows = read(out)
    assert figures["kept"]["resumed_after"] == done
    far = max(
        abs(a - b)
        for one, two in zip(rows, expected, strict=True)
        for a, b in zip(one["probabilities"], two["probabilities"], strict=True)
    )
    assert far <= 1e-5 and [row["uid"] for row in rows] == [row["uid"] for row in expected], far
    return {"killed after": done, "of": QUESTIONS, "largest difference of a probability": far}


ITEMS: list[Item] = [
    ("trained", from_both),
    ("resumed", resumed),
    ("tp2", two_ranks),
    ("scored", scored),
    ("killed", killed),
]

if __name__ == "__main__":
    run("race", ITEMS)
