"""BERT and T5 on English novels cut into sentences, and BERT on Google's own TFRecords: from text to a falling loss.

bert, t5               trained for --seconds, then judged by three novels that they have not seen: loss against the best
                       guess that does not look at the text (the unigram of the training labels), in nats; for BERT also
                       how often the order of two parts is found, in standard errors above always giving one answer
bert killed, t5 killed tp 2 x pp 2 with sequence parallelism, and an encoder's stage before a decoder's; the loss falls;
                       all ranks killed by SIGKILL and resumed: equal metrics, and equal bytes of weights and moments
records                BERT on Google's TFRecords in both layouts of 2 ranks: equal losses, which fall

    python tests/battery/novels.py bert --seconds 480 --model "--model bert-110m --norm-placement pre --dtype bf16 \\
        --micro-batch 256 --global-batch 256 --seq-length 128 --lr 5e-4"

Of `bert` and `t5`, --model replaces sizes and rates by any flags of `mega pretrain`. A first launch measures how long a
step takes and notes how many fit into --seconds; one that was cut short resumes from its last save under --work.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.sections import DataConfig, MaskingConfig
from mega.core.data.build import build_datasets
from mega.core.text.build import build
from tests.battery.data_ledger import ROOT, ROWS, run
from tests.support.shared import shared

HELD_OUT = ("Hardy_Tess", "Doyle_Lost", "Stevenson_Treasure")
EXTRA = {"bert": 0, "t5": 100}
PROBE = 12
"""Steps by which the time of one is measured, without the first two."""

SMALL = {
    "bert": "--family bert --layers 3 --hidden 128 --heads 4 --seq-length 128 --micro-batch 32 --global-batch 32 "
    "--lr 3e-3 --device cpu",
    "t5": "--family t5 --layers 2 --decoder-layers 2 --hidden 128 --heads 4 --seq-length 128 --decoder-seq-length 48 "
    "--micro-batch 32 --global-batch 32 --lr 3e-3 --device cpu",
}
"""What one core trains in half an hour."""

TINY = "--hidden 64 --heads 4 --seq-length 64 --micro-batch 2 --global-batch 8 --lr 3e-3 --device cpu --nproc {ranks} "
KILLED = {
    "bert": "--family bert --layers 4 --tp 2 --pp 2 --sequence-parallel " + TINY.format(ranks=4),
    "t5": "--family t5 --layers 2 --decoder-layers 2 --decoder-seq-length 32 --pp 2 --split-rank 1 "
    + TINY.format(ranks=2),
}
STEPS, INTERVAL = 60, 20


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=1700.0)
    parser.add_argument("--model", default=None)
    parser.add_argument("--work", type=Path, default=ROWS / "novels")
    known, _ = parser.parse_known_args()
    return known


def mega(*words: object) -> list[str]:
    return [sys.executable, "-m", "mega", *map(str, words)]


def done(*words: object) -> None:
    found = subprocess.run(mega(*words), cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(found.stderr[-400:])


def words_of(family: str) -> list[str]:
    """The tokenizer's flags."""
    vocabulary = shared("bert/bert-base-uncased-vocab.txt")
    flags = ["--tokenizer", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
    return flags + ["--vocab-extra-ids", str(EXTRA[family])] * (EXTRA[family] > 0)


def corpora(work: Path) -> tuple[Path, Path]:
    """Prefixes of sentences to train on and of those that are held out, whole novels each."""
    prefixes = work / "seen_text_sentence", work / "unseen_text_sentence"
    if not all(prefix.with_suffix(".idx").exists() for prefix in prefixes):
        work.mkdir(parents=True, exist_ok=True)
        for name in ("seen", "unseen"):
            with gzip.open(shared("novels/novels.jsonl.gz"), "rt", encoding="utf-8") as file:
                lines = [line for line in file if json.loads(line)["id"].startswith(HELD_OUT) == (name == "unseen")]
            (work / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
            cut = ["--split-sentences", "--sentence-splitter", "sentencex", *words_of("bert"), "--overwrite"]
            done("preprocess", "--input", work / f"{name}.jsonl", "--output-prefix", work / name, *cut)
    return prefixes


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def value(flags: list[str], flag: str) -> str:
    return flags[len(flags) - flags[::-1].index(flag)]


def samples(family: str, prefix: Path, flags: list[str], count: int) -> Any:
    """What `mega pretrain` reads of a held-out file, and one pass at the most of one that it trains on."""
    vocabulary = str(shared("bert/bert-base-uncased-vocab.txt"))
    tokenizer = build(tokenizer="BertWordPieceLowerCase", vocab_file=vocabulary, vocab_extra_ids=EXTRA[family])
    decoder = int(value(flags, "--decoder-seq-length")) if "--decoder-seq-length" in flags else 128
    return build_datasets(
        DataConfig(valid_data=(str(prefix),)),
        seq_length=int(value(flags, "--seq-length")),
        seed=1234,
        vocab=tokenizer.vocab_size,
        samples=(0, count, 0),
        tokenizer=tokenizer,
        masking=MaskingConfig(sample_kind=family, decoder_seq_length=decoder),  # type: ignore[arg-type]
    ).valid


def labels(dataset: Any, count: int) -> np.ndarray:
    rows = (dataset[number] for number in range(count))
    return np.concatenate([row.labels[row.loss_mask == 1] for row in rows])


def guessing(family: str, seen: Path, unseen: Path, flags: list[str], count: int) -> dict[str, float]:
    """The loss of the labels of `count` held-out samples by how frequent each is in training, and the share of parts in
    the commoner order."""
    # Sentences are shared out so that a sample has about as many tokens as it may have.
    first = samples(family, seen, flags, 1)
    held_out = samples(family, unseen, flags, count)
    frequent = np.bincount(labels(first, len(first)), minlength=31000) + 0.1
    found = {"unigram": float(-np.log(frequent / frequent.sum())[labels(held_out, count)].mean())}
    if family == "bert":
        swapped = np.mean([held_out[number].is_random for number in range(count)])
        found["chance"] = float(max(swapped, 1 - swapped))
    return found


def trained(family: str) -> dict[str, Any]:
    """Train for the time that was asked for, and compare with guesses."""
    asked = options()
    seen, unseen = corpora(asked.work)
    flags, folder = shlex.split(asked.model or SMALL[family]), asked.work / family
    batch = int(value(flags, "--global-batch"))
    count = len(samples(family, unseen, flags, 1)) // batch * batch
    rest = [*words_of(family), "--train-data", str(seen), "--valid-data", str(unseen), "--log-interval", "10"]
    plan = folder / "plan.json"
    if not plan.exists():
        shutil.rmtree(folder, ignore_errors=True)
        few = ["--steps", str(PROBE), "--log-interval", "1", "--eval-iters", "0"]
        done("pretrain", *flags, *rest, *few, "--metrics", folder / "metrics.jsonl")
        times = sorted(row["seconds"] for row in metrics(folder)[2:] if "seconds" in row)
        steps = max(50, int(asked.seconds / times[len(times) // 2]))
        plan.write_text(json.dumps({"steps": steps, "flags": flags}))
        (folder / "metrics.jsonl").unlink()
    noted = json.loads(plan.read_text())
    assert noted["flags"] == flags, f"{folder} is of other flags; give another --work"
    steps, begin = noted["steps"], time.perf_counter()
    length = ["--steps", str(steps), "--lr-decay-style", "linear", "--lr-warmup-fraction", "0.05"]
    saves = ["--save", str(folder), "--save-interval", str(max(1, steps // 10)), "--keep-last", "2", "--resume", "auto"]
    judged = ["--eval-interval", str(steps + 1), "--eval-iters", str(count // batch)]
    done("pretrain", *flags, *rest, *length, *saves, *judged)
    last = [row for row in metrics(folder) if "valid_loss" in row][-1]
    guess = guessing(family, seen, unseen, flags, count)
    loss = last["valid_lm" if family == "bert" else "valid_loss"]
    found = {"flags": " ".join(flags), "steps": steps, "samples": steps * batch, "held out": count, "loss": loss}
    found |= {**guess, "nats below": guess["unigram"] - loss, "minutes": (time.perf_counter() - begin) / 60}
    if family == "bert":
        error = math.sqrt(guess["chance"] * (1 - guess["chance"]) / count)
        found |= {
            "order": last["valid_pair_accuracy"],
            "errors above": (last["valid_pair_accuracy"] - guess["chance"]) / error,
        }
    assert found["nats below"] > 0, found
    return found


def rows(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> what was logged of it, but for times."""
    names = ("loss", "lm", "pair", "pair_accuracy", "grad_norm")
    return {row["step"]: {name: row[name] for name in names if name in row} for row in metrics(folder) if "lr" in row}


def killed(family: str) -> dict[str, Any]:
    """One run straight, one killed after its first save: the same numbers and bytes, on falling losses."""
    work = options().work
    seen, unseen = corpora(work)
    straight, broken = work / f"{family}-straight", work / f"{family}-killed"
    for folder in (straight, broken):
        shutil.rmtree(folder, ignore_errors=True)
    rest = [*words_of(family), "--train-data", str(seen), "--valid-data", str(unseen), "--steps", str(STEPS)]
    rest += ["--save-interval", str(INTERVAL), "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "20"]
    line = ["pretrain", *shlex.split(KILLED[family]), *rest, "--resume", "auto"]
    done(*line, "--save", straight)
    process = subprocess.Popen(
        mega(*line, "--save", broken),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not (broken / f"step-{INTERVAL:07d}").exists():
        assert process.poll() is None, (process.stderr.read() if process.stderr else b"")[-400:]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    at = max(CheckpointStore(broken).steps())
    assert at < STEPS, "killed too late"
    done(*line, "--save", broken)
    found, again = rows(straight), rows(broken)
    assert found == again and len(found) == STEPS
    first, second = CheckpointStore(straight).open(STEPS), CheckpointStore(broken).open(STEPS)
    assert set(first.tensors) == set(second.tensors) and not list(diff(first, second))
    name = "lm" if family == "bert" else "loss"
    begin, end = (float(np.mean([found[step][name] for step in steps])) for steps in (range(1, 4), range(51, 61)))
    assert end < begin - 1
    return {"killed after": at, "of": STEPS, "tensors": len(first.tensors), "first": begin, "last": end}


def records() -> dict[str, Any]:
    """30 steps of 8 on the 60 examples."""
    work = options().work
    found = []
    for name, layout in (("tp2", "--tp 2 --sequence-parallel"), ("pp2", "--pp 2")):
        folder = work / f"records-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        flags = f"--use-tfrecords --max-preds-per-seq 20 --train-data {shared('bert_tfrecord/tf_examples.tfrecord')}"
        line = f"{TINY.format(ranks=2)} --family bert --layers 2 {layout} --seq-length 128 {flags} --steps 30"
        line += f" --eval-iters 0 --log-interval 1 --metrics {folder / 'metrics.jsonl'}"
        done("pretrain", *shlex.split(line), *words_of("bert"))
        found.append([row["lm"] for row in rows(folder).values()])
    apart = max(abs(a / b - 1) for a, b in zip(*found, strict=True))
    begin, end = float(np.mean(found[0][:3])), float(np.mean(found[0][-3:]))
    assert len(found[0]) == 30 and apart < 2e-4 and end < begin - 1, (apart, begin, end)
    return {"steps": 30, "first": begin, "last": end, "apart": apart}


ITEMS = [
    ("bert killed", lambda: killed("bert")),
    ("t5 killed", lambda: killed("t5")),
    ("records", records),
    ("bert", lambda: trained("bert")),
    ("t5", lambda: trained("t5")),
]

if __name__ == "__main__":
    own = ("--seconds", "--model", "--work")
    left = [word for at, word in enumerate(sys.argv[1:], 1) if word not in own and sys.argv[at - 1] not in own]
    run("novels", ITEMS, left)
