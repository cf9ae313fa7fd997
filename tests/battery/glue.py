"""MNLI and QQP by a BERT that was pretrained here on novels, against the majority class and against its untrained twin.

    python tests/battery/glue.py --novels novels.jsonl.gz --qqp train.tsv [--mnli train.tsv] [--small] [--work DIR] ...
    python tests/battery/glue.py --bert RUN --shape "--model bert-110m --seq-length 128" --vocab-file vocab.txt ...

BERT             tokenizer, sentences and pretraining; resumed where it was killed
TASK SEED bert   finetuned from it, judged; the same accuracy through transformers after export
TASK SEED new    its twin: the same line without the weights
TASK statement   over seeds and items: the accuracy less the majority class's in standard errors (must be 3), and less
                 the twin's (must be 3 on QQP, reported on MNLI); McNemar's test of each pair of twins

Tables are cut 80/20 by a hash of the pair. What a command made is kept under --work and not made again. Other words are
those of every battery. The default sizes take about 12 minutes of one large GPU; --small is for a CPU. --bert: a run
that was pretrained before, as by novels.py; its sizes are typed again for the twin.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.data_ledger import ROOT, ROWS, Item, run
from tests.support.pairs import COLUMNS, lines, split_pairs

SEEDS = (1, 2, 3, 4, 5)
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """Flags of each command. rows: of a table, None: all. exported: seeds whose model is opened by transformers. twins:
    whether so much pretraining must show on QQP."""

    vocab: int
    shape: str
    machine: str
    pretrain: str
    tune: str
    rows: int | None
    exported: tuple[int, ...]
    twins: bool


LARGE = Size(
    vocab=16384,
    shape="--family bert --layers 12 --hidden 512 --heads 8 --seq-length 128",
    machine="--dtype bf16 --device cuda",
    pretrain="--micro-batch 512 --global-batch 512 --steps 4000 --lr 6e-4 --lr-decay linear --lr-warmup-fraction 0.05",
    tune="--micro-batch 32 --global-batch 32 --epochs 4 --lr 1e-4 --lr-warmup-fraction 0.1",
    rows=None,
    exported=SEEDS,
    twins=True,
)
SMALL = Size(
    vocab=2048,
    shape="--family bert --layers 2 --hidden 64 --heads 2 --seq-length 48",
    machine="--device cpu",
    pretrain="--micro-batch 64 --global-batch 64 --steps 400 --lr 3e-3 --lr-decay linear --lr-warmup-fraction 0.05",
    tune="--micro-batch 32 --global-batch 32 --epochs 2 --lr 1e-3 --lr-warmup-fraction 0.1",
    rows=5000,
    exported=SEEDS[:1],
    twins=False,
)


@dataclass(frozen=True)
class Proof:
    work: Path
    novels: Path
    tables: dict[str, Path]
    size: Size
    bert: Path
    vocab: Path

    def mega(self, line: str, *more: object) -> None:
        """Errors: RuntimeError with what it said."""
        command = [sys.executable, "-m", "mega", *line.split(), *map(str, more)]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if found.returncode:
            raise RuntimeError(found.stderr[-400:])

    @property
    def tokenizer(self) -> list[object]:
        return ["--tokenizer", "BertWordPieceLowerCase", "--vocab-file", self.vocab]

    def pretrained(self) -> dict[str, Any]:
        size, work = self.size, self.work
        work.mkdir(parents=True, exist_ok=True)
        vocabulary = f"train-tokenizer --kind wordpiece --vocab-size {size.vocab}"
        self.mega(vocabulary, "--input", self.novels, "--output-dir", work / "wordpiece")
        sentences = ["--input", self.novels, "--output-prefix", work / "novels", *self.tokenizer]
        self.mega("preprocess --split-sentences --sentence-splitter sentencex", *sentences)
        data = ["--data-path", work / "novels_text_sentence", *self.tokenizer, "--save", work / "bert"]
        rest = "--eval-iters 0 --save-interval 200 --keep-last 2 --resume auto --seed 1"
        self.mega(f"pretrain {size.shape} {size.machine} {size.pretrain} {rest}", *data)
        rows = [json.loads(line) for line in (work / "bert" / "metrics.jsonl").read_text().splitlines()]
        first, *_, last = [row for row in rows if "lm" in row]
        return {"steps": last["step"], "lm first": first["lm"], "lm last": last["lm"], "pair last": last.get("pair")}

    def finetuned(self, task: str, seed: int, start: str) -> dict[str, Any]:
        """Trained and judged; its accuracy here and, of some seeds, through transformers."""
        size, work = self.size, self.work / task
        train, dev = split_pairs(task, self.tables[task], work, size.rows)
        place = work / f"{start}-{seed}"
        score = Path(f"{place}.json")
        if not score.exists():
            begin = ["--load", self.bert] if start == "bert" else [*size.shape.split(), *self.tokenizer]
            length = size.shape.split()[-2:]
            sets = ["--train-data", train, "--valid-data", dev, "--save", place, *begin, *length]
            tune = f"finetune --task {task} {size.tune} {size.machine} --seed {seed} --save-interval 100000"
            self.mega(f"{tune} --eval-iters 0 --keep-last 1 --resume auto", *sets)
            self.mega(f"eval --task {task} {size.machine}", "--load", place, "--valid-data", dev, "--json", score)
        rows = self.predictions(task, seed, start)
        right = sum(row["answer"] == row["label"] for row in rows)
        found = {"correct": right, "total": len(rows), "accuracy": right / len(rows)}
        if seed not in size.exported:
            return found
        theirs = self.by_transformers(task, place, dev)
        other = sum(one["answer"] != two for one, two in zip(rows, theirs, strict=True))
        assert other <= len(rows) // 500, f"{other} of {len(rows)} answers are not those of transformers"
        labels = [row["label"] for row in rows]
        through = sum(one == two for one, two in zip(theirs, labels, strict=True)) / len(rows)
        return {**found, "transformers": through, "other answers": other}

    def predictions(self, task: str, seed: int, start: str) -> Rows:
        path = self.work / task / f"{start}-{seed}-predictions.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def by_transformers(self, task: str, place: Path, dev: Path) -> list[int]:
        """Answers of the exported model to rows that are packed with its own tokenizer."""
        import torch
        from transformers import AutoTokenizer, MegatronBertForSequenceClassification

        folder = Path(f"{place}-hf")
        if not folder.exists():
            self.mega("convert-llama --to hf", "--load-dir", place, "--save-dir", folder)
        device = "cuda" if "cuda" in self.size.machine else "cpu"
        model: Any = MegatronBertForSequenceClassification.from_pretrained(folder)
        model.to(device).eval()
        tokenizer, most = AutoTokenizer.from_pretrained(folder), int(self.size.shape.split()[-1])
        found = []
        for line in lines(dev)[1:]:
            first, second = (
                tokenizer(line.split("\t")[at], add_special_tokens=False)["input_ids"] for at in COLUMNS[task]
            )
            ids = [tokenizer.cls_token_id, *first, tokenizer.sep_token_id, *second][: most - 1]
            ids.append(tokenizer.sep_token_id)
            types = [int(at >= min(len(first) + 2, len(ids))) for at in range(len(ids))]
            with torch.no_grad():
                given = torch.tensor([ids], device=device), torch.tensor([types], device=device)
                found.append(int(model(input_ids=given[0], token_type_ids=given[1]).logits.argmax()))
        return found

    def statement(self, task: str) -> dict[str, Any]:
        """What the issue asks for. Errors: AssertionError where it does not hold."""
        train = lines(self.work / task / "train.tsv")[1:]
        most = statistics.mode(line.split("\t")[-1] for line in train)
        known: dict[str, list[Rows]] = {
            start: [self.predictions(task, seed, start) for seed in SEEDS] for start in ("bert", "new")
        }
        right = {
            start: [[float(row["answer"] == row["label"]) for row in rows] for rows in each]
            for start, each in known.items()
        }
        dev = lines(self.work / task / "dev.tsv")[1:]
        majority = [float(line.split("\t")[-1] == most) for line in dev]
        above = excess(right["bert"], [majority] * len(SEEDS))
        twins = excess(right["bert"], right["new"])
        pairs = [mcnemar(one, two) for one, two in zip(right["bert"], right["new"], strict=True)]
        found = {
            "accuracy": [round(statistics.fmean(each), 4) for each in right["bert"]],
            "twin": [round(statistics.fmean(each), 4) for each in right["new"]],
            "majority": round(statistics.fmean(majority), 4),
            "above majority": above,
            "above twin": twins,
            "mcnemar z": pairs,
            "items": len(majority),
        }
        assert above["errors"] >= 3, found
        assert task != "qqp" or not self.size.twins or twins["errors"] >= 3, found
        return found


def excess(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, float]:
    """Mean difference over seeds and items, its standard error, and how many of these it is.

    Items are a sample, and so are seeds: the variance is that of the items' means over seeds, by their number, and that
    of the seeds' means over items, by theirs.

    >>> excess([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]], [[0.0, 1.0, 0.0, 0.0]] * 2)
    {'mean': 0.625, 'error': 0.27, 'errors': 2.31}
    """
    by_seed = [[one - two for one, two in zip(*each, strict=True)] for each in zip(ours, theirs, strict=True)]
    by_item = [statistics.fmean(each) for each in zip(*by_seed, strict=True)]
    seeds = [statistics.fmean(each) for each in by_seed]
    error = math.sqrt(statistics.variance(by_item) / len(by_item) + statistics.variance(seeds) / len(seeds))
    mean = statistics.fmean(by_item)
    return {"mean": round(mean, 4), "error": round(error, 4), "errors": round(mean / max(error, 1e-12), 2)}


def mcnemar(ours: list[float], theirs: list[float]) -> float:
    """(b - c) / sqrt(b + c) of the items that only one of two has right.

    >>> mcnemar([1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0])
    0.58
    """
    better = sum(one > two for one, two in zip(ours, theirs, strict=True))
    worse = sum(one < two for one, two in zip(ours, theirs, strict=True))
    return round((better - worse) / math.sqrt(max(better + worse, 1)), 2)


def items(proof: Proof) -> list[Item]:
    found: list[Item] = [("BERT", proof.pretrained)] if proof.bert == proof.work / "bert" else []
    for task in proof.tables:
        for seed in SEEDS:
            for start in ("bert", "new"):
                found.append((f"{task} {seed} {start}", functools.partial(proof.finetuned, task, seed, start)))
        found.append((f"{task} statement", functools.partial(proof.statement, task)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--novels", type=Path)
    parser.add_argument("--mnli", type=Path)
    parser.add_argument("--qqp", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--bert", type=Path)
    parser.add_argument("--vocab-file", type=Path)
    parser.add_argument("--shape")
    parser.add_argument("--tune")
    asked, rest = parser.parse_known_args()
    if (asked.bert is None) == (asked.novels is None) or (asked.bert is None) != (asked.vocab_file is None):
        parser.error("either --novels, or --bert with --vocab-file")
    name = "glue-small" if asked.small else "glue"
    tables = {task: path.resolve() for task in ("qqp", "mnli") if (path := getattr(asked, task)) is not None}
    work = (asked.work or ROWS / name).resolve()
    size = SMALL if asked.small else LARGE
    size = replace(size, shape=asked.shape or size.shape, tune=asked.tune or size.tune)
    bert, vocab = asked.bert or work / "bert", asked.vocab_file or work / "wordpiece" / "vocab.txt"
    novels = (asked.novels or Path()).resolve()
    run(name, items(Proof(work, novels, tables, size, bert.resolve(), vocab.resolve())), rest)


if __name__ == "__main__":
    main()
