"""MNLI and QQP by a BERT that was pretrained here on novels, against the majority class and against its untrained twin.

    python tests/battery/glue.py --novels novels.jsonl.gz --qqp train.tsv [--mnli train.tsv] [--small] [--work DIR] ...
    python tests/battery/glue.py --bert RUN --shape "--model bert-110m --seq-length 128" --vocab-file vocab.txt \\
        --qqp train.tsv [--seeds 10] ...

BERT             tokenizer, sentences and pretraining; resumed where it was killed
TASK try K       the K-th recipe of finetuning (each --tune is one), trained on a part of the training rows and judged
                 by their rest; with one recipe there is nothing to try
TASK SEED bert   finetuned from it by the recipe that did best, judged; the same answers by transformers after export
TASK SEED new    its twin: the same line without the weights
TASK statement   over seeds and items: the accuracy less the majority class's in standard errors (must be 3), and less
                 the twin's (must be 3 on QQP, reported on MNLI); McNemar's test of each pair of twins

Tables are cut 80/20 by a hash of the pair. What a command made is kept under --work and not made again. Other words are
those of every battery. The default sizes take about 12 minutes of one large GPU; --small is for a CPU. --bert: a run
that was pretrained before, as by novels.py, so there is no item BERT; --shape has its sizes, typed again for the twin,
and --seq-length, by which both are finetuned. --seeds: finetunings of each, 5 if not said. Several processes may share
--work and --out, each with its own items; those of a task begin when all its recipes have been tried.

MNLI has up to three hypotheses a premise, each with another label: a model that knows the premises of training by heart
is worse than chance, so its recipes are short.
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

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """Flags of each command. tunes: recipes of finetuning. rows: of a table, None: all. exported: of BERT's seeds,
    how many of the first are opened by transformers. twins: whether so much pretraining must show on QQP.
    seeds: their number."""

    vocab: int
    shape: str
    machine: str
    pretrain: str
    tunes: tuple[str, ...]
    rows: int | None
    exported: int
    twins: bool
    seeds: int = 5

    @property
    def length(self) -> int:
        """Tokens of a pair. Errors: ValueError where `shape` does not say it."""
        words = self.shape.split()
        return int(words[words.index("--seq-length") + 1])


LARGE = Size(
    vocab=16384,
    shape="--family bert --layers 12 --hidden 512 --heads 8 --seq-length 128",
    machine="--dtype bf16 --device cuda",
    pretrain="--micro-batch 512 --global-batch 512 --steps 4000 --lr 6e-4 --lr-decay linear --lr-warmup-fraction 0.05",
    tunes=tuple(
        f"--micro-batch 32 --global-batch 32 --epochs {epochs} --lr {rate} --lr-warmup-fraction 0.1"
        for epochs, rate in ((1, "1e-4"), (2, "3e-5"), (2, "1e-4"), (3, "5e-5"), (4, "1e-4"))
    ),
    rows=None,
    exported=5,
    twins=True,
)
SMALL = Size(
    vocab=2048,
    shape="--family bert --layers 2 --hidden 64 --heads 2 --seq-length 48",
    machine="--device cpu",
    pretrain="--micro-batch 64 --global-batch 64 --steps 400 --lr 3e-3 --lr-decay linear --lr-warmup-fraction 0.05",
    tunes=("--micro-batch 32 --global-batch 32 --epochs 2 --lr 1e-3 --lr-warmup-fraction 0.1",),
    rows=5000,
    exported=1,
    twins=False,
)


@dataclass(frozen=True)
class Proof:
    """novels: what `bert` is pretrained on; None where it was before, with the vocabulary `vocab`."""

    work: Path
    novels: Path | None
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
    def seeds(self) -> range:
        return range(1, self.size.seeds + 1)

    @property
    def tokenizer(self) -> list[object]:
        return ["--tokenizer", "BertWordPieceLowerCase", "--vocab-file", self.vocab]

    def pretrained(self) -> dict[str, Any]:
        size, work = self.size, self.work
        assert self.novels is not None
        work.mkdir(parents=True, exist_ok=True)
        vocabulary = f"train-tokenizer --kind wordpiece --vocab-size {size.vocab}"
        self.mega(vocabulary, "--input", self.novels, "--output-dir", work / "wordpiece")
        sentences = ["--input", self.novels, "--output-prefix", work / "novels", *self.tokenizer]
        self.mega("preprocess --split-sentences --sentence-splitter sentencex", *sentences)
        data = ["--data-path", work / "novels_text_sentence", *self.tokenizer, "--save", self.bert]
        rest = "--eval-iters 0 --save-interval 200 --keep-last 2 --resume auto --seed 1"
        self.mega(f"pretrain {size.shape} {size.machine} {size.pretrain} {rest}", *data)
        rows = [json.loads(line) for line in (self.bert / "metrics.jsonl").read_text().splitlines()]
        first, *_, last = [row for row in rows if "lm" in row]
        return {"steps": last["step"], "lm first": first["lm"], "lm last": last["lm"], "pair last": last.get("pair")}

    def tried(self, task: str, number: int) -> dict[str, Any]:
        """The accuracy of a recipe on training rows that it was not given."""
        train, _ = self.parts(task)
        inner = split_pairs(task, train, self.work / task / "inner", byte=1)
        place = self.work / task / f"try-{number}"
        accuracy = self.scored(task, self.size.tunes[number], 0, "bert", inner, place)
        return {"recipe": self.size.tunes[number], "accuracy": accuracy}

    def recipe(self, task: str) -> str:
        """The one of the best accuracy. Errors: FileNotFoundError where one has not been tried."""
        tunes, folder = self.size.tunes, self.work / task
        if len(tunes) == 1:
            return tunes[0]
        return tunes[max(range(len(tunes)), key=lambda number: accuracy_in(folder / f"try-{number}.json"))]

    def parts(self, task: str) -> tuple[Path, Path]:
        return split_pairs(task, self.tables[task], self.work / task, self.size.rows)

    def scored(self, task: str, tune: str, seed: int, start: str, parts: tuple[Path, Path], place: Path) -> float:
        """Finetuned on the first part and judged by the second in fp32, once; the accuracy."""
        size, (train, dev), score = self.size, parts, Path(f"{place}.json")
        if not score.exists():
            begin = ["--load", self.bert] if start == "bert" else [*size.shape.split(), *self.tokenizer]
            sets = ["--train-data", train, "--valid-data", dev, "--save", place, *begin, "--seq-length", size.length]
            line = f"finetune --task {task} {tune} {size.machine} --seed {seed} --save-interval 100000 --no-save-optim"
            self.mega(f"{line} --eval-iters 0 --keep-last 1", *sets)
            judge = f"eval --task {task} {size.machine.replace('bf16', 'fp32')}"
            self.mega(judge, "--load", place, "--valid-data", dev, "--json", score)
        return accuracy_in(score)

    def finetuned(self, task: str, seed: int, start: str) -> dict[str, Any]:
        """Trained and judged; its accuracy here and, of some seeds, through transformers.

        right: a bit an item, in hex: the statement can be made of rows whose machine is gone."""
        size, (train, dev), place = self.size, self.parts(task), self.work / task / f"{start}-{seed}"
        tune = self.recipe(task)
        self.scored(task, tune, seed, start, (train, dev), place)
        rows = self.predictions(task, seed, start)
        right = [row["answer"] == row["label"] for row in rows]
        found = {"correct": sum(right), "total": len(rows), "accuracy": sum(right) / len(rows), "recipe": tune}
        found["right"] = f"{int(''.join(map(str, map(int, right))), 2):x}"
        if start == "new" or seed > size.exported:
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
        model: Any = MegatronBertForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        model.to(device).eval()
        tokenizer, most = AutoTokenizer.from_pretrained(folder), self.size.length
        rows = []
        for line in lines(dev)[1:]:
            first, second = (
                tokenizer(line.split("\t")[at], add_special_tokens=False)["input_ids"] for at in COLUMNS[task]
            )
            ids = [tokenizer.cls_token_id, *first, tokenizer.sep_token_id, *second][: most - 1]
            ids.append(tokenizer.sep_token_id)
            rows.append((ids, [int(at >= min(len(first) + 2, len(ids))) for at in range(len(ids))]))
        found: list[int] = []
        for begin in range(0, len(rows), 64):
            some = rows[begin : begin + 64]
            given = torch.zeros(3, len(some), max(len(ids) for ids, _ in some), dtype=torch.long)
            for at, (ids, types) in enumerate(some):
                given[:, at, : len(ids)] = torch.tensor([ids, types, [1] * len(ids)])
            names = ("input_ids", "token_type_ids", "attention_mask")
            with torch.no_grad():
                answers = model(**dict(zip(names, given.to(device), strict=True))).logits.argmax(-1)
            found += answers.tolist()
        return found

    def statement(self, task: str) -> dict[str, Any]:
        """What the issue asks for. Errors: AssertionError where it does not hold."""
        train = lines(self.work / task / "train.tsv")[1:]
        most = statistics.mode(line.split("\t")[-1] for line in train)
        known: dict[str, list[Rows]] = {
            start: [self.predictions(task, seed, start) for seed in self.seeds] for start in ("bert", "new")
        }
        right = {
            start: [[float(row["answer"] == row["label"]) for row in rows] for rows in each]
            for start, each in known.items()
        }
        dev = lines(self.work / task / "dev.tsv")[1:]
        majority = [float(line.split("\t")[-1] == most) for line in dev]
        above = excess(right["bert"], [majority] * len(self.seeds))
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


def accuracy_in(score: Path) -> float:
    """Of what `mega eval --json` wrote."""
    figures = json.loads(score.read_text())["figures"]
    return float(next(figure["value"] for figure in figures if "accuracy" in figure["name"]))


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
    found: list[Item] = [] if proof.novels is None else [("BERT", proof.pretrained)]
    for task in proof.tables:
        if len(proof.size.tunes) > 1:
            tries = range(len(proof.size.tunes))
            found += [(f"{task} try {number}", functools.partial(proof.tried, task, number)) for number in tries]
        for seed in proof.seeds:
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
    parser.add_argument("--tune", action="append")
    parser.add_argument("--seeds", type=int)
    asked, rest = parser.parse_known_args()
    pretrained = (asked.bert, asked.shape, asked.vocab_file)
    if (asked.bert is None) == (asked.novels is None) or (asked.bert is not None and None in pretrained):
        parser.error("either --novels, or --bert with --shape and --vocab-file")
    if asked.shape is not None and "--seq-length" not in asked.shape.split():
        parser.error(f"--shape {asked.shape!r}: must have a --seq-length")
    name = "glue-small" if asked.small else "glue"
    tables = {task: path.resolve() for task in ("qqp", "mnli") if (path := getattr(asked, task)) is not None}
    work = (asked.work or ROWS / name).resolve()
    size = SMALL if asked.small else LARGE
    shape, tunes, seeds = asked.shape or size.shape, tuple(asked.tune or size.tunes), asked.seeds or size.seeds
    size = replace(size, shape=shape, tunes=tunes, seeds=seeds)
    if asked.novels is None:
        novels, bert, vocab = None, asked.bert.resolve(), asked.vocab_file.resolve()
    else:
        novels, bert, vocab = asked.novels.resolve(), work / "bert", work / "wordpiece" / "vocab.txt"
    run(name, items(Proof(work, novels, tables, size, bert, vocab)), rest)


if __name__ == "__main__":
    main()
