"""What neighbours are worth: held-out parts of 20 novels, judged with true neighbours, with those of others, with none.

    python tests/battery/retro_novels.py --shared ../shared/data --work build/novels

1 of each novel the first parts are trained on and the last ones held out; two tokenizers are trained on the former
2 a BERT of two layers is trained, which embeds the chunks; `mega retro build` and `query`
3 a GPT with a retriever is trained, and the same GPT without
4 each held-out sample is judged by the first: its loss with its own neighbours, with those of other samples drawn at
  random, and with none. The line written has the mean differences and their standard errors, over samples

About fifteen minutes of one core. A stage whose result is in --work is not run again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from mega.cli import main as mega
from mega.core.batch import NeighbourBatch
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.data.indexed import token_dtype
from mega.core.data.neighbours import NeighbourDataset
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.inference.loading.load import load_model, load_tokenizer, open_model
from mega.core.text.build import build
from mega.core.training.kinds.pretraining import datasets

NOVELS, HELD_OUT = 20, 10
"""Novels, and parts of each (about 4,000 characters) that are held out."""
SHUFFLES = 3
"""Other samples whose neighbours each sample is judged with."""
SIZES = "--layers 4 --heads 4 --activation gelu --position rope --hidden-dropout 0 --attention-dropout 0"
RETRIEVER = (
    "--retriever --retro-layers 1 3 --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0 --retro-gate 2"
)
BERT = "--family bert --heads 4 --micro-batch 32 --global-batch 32 --lr 1e-3 --eval-iters 0 --split 100,0,0"


def run(*words: str) -> None:
    began = time.monotonic()
    code = mega(list(words))
    print(f"{' '.join(words[:2])}: {time.monotonic() - began:.0f} s", flush=True)
    if code:
        raise SystemExit(code)


class Experiment:
    """Folders of one experiment, and the commands that fill them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.work, self.shared, self.device = options.work, options.shared, options.device
        self.steps, self.bert_steps, self.parts = options.steps, options.bert_steps, options.parts
        self.hidden, self.batch, work = options.hidden, options.batch, options.work
        self.chunk, self.length = options.chunk, 4 * options.chunk
        self.bert_sizes = f"--layers {options.bert_layers} --hidden {options.bert_hidden} --seq-length {2 * self.chunk}"
        bpe, words = work / "bpe", work / "wordpiece"
        files = f"--vocab-file {bpe / 'vocab.json'} --merge-file {bpe / 'merges.txt'}"
        self.gpt = f"--tokenizer GPT2BPETokenizer {files}".split()
        self.bert = f"--tokenizer BertWordPieceLowerCase --vocab-file {words / 'vocab.txt'}".split()
        self.blend = ["--data-path", "1", str(work / "novels"), "--split", f"{self.parts},{HELD_OUT},0"]
        self.embedder = ["--embedder", str(work / "bert")]

    @property
    def sizes(self) -> list[str]:
        batch = (
            f"--seq-length {self.length} --micro-batch {self.batch} --global-batch {self.batch} --hidden {self.hidden}"
        )
        rate = f"--lr {0.4 / self.hidden:.2g} --lr-warmup-fraction 0.05 --lr-decay cosine --device {self.device}"
        steps = f"--steps {self.steps} --eval-interval {self.steps} --eval-iters 50 --log-interval 50"
        return [*SIZES.split(), *batch.split(), *rate.split(), *steps.split()]

    @property
    def reading(self) -> list[str]:
        return [
            *self.sizes,
            *RETRIEVER.split(),
            "--retro-chunk-length",
            str(self.chunk),
            "--retro",
            str(self.work / "db"),
            *self.blend,
            *self.gpt,
        ]

    def texts(self) -> None:
        """Parts of novels as one corpus: those that are trained on first, novel by novel, then those held out."""
        parts = defaultdict[str, list[str]](list)
        with gzip.open(self.shared / "novels" / "novels.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                found = json.loads(line)
                parts[found["id"].rpartition("-")[0]].append(found["text"])
        chosen = [each for each in parts.values() if len(each) >= self.parts + HELD_OUT][:NOVELS]
        assert len(chosen) == NOVELS, len(chosen)
        trained = [text for novel in chosen for text in novel[: self.parts]]
        held = [text for novel in chosen for text in novel[-HELD_OUT:]]
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "trained.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in trained))
        for kind, folder, vocab in (("bpe", "bpe", "2000"), ("wordpiece", "wordpiece", "4000")):
            flags = ["--kind", kind, "--vocab-size", vocab, "--output-dir", str(self.work / folder)]
            run("train-tokenizer", "--input", str(self.work / "trained.jsonl"), *flags)
        vocab, merges = (str(self.work / "bpe" / name) for name in ("vocab.json", "merges.txt"))
        words = build(tokenizer="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
        assert words.eod is not None
        with IndexedWriter(self.work / "novels", token_dtype(words.vocab_size)) as writer:
            for text in (*trained, *held):
                writer.add([[*words.encode(text), words.eod]])
        sentences = f"--split-sentences --output-prefix {self.work / 'sentences'} --workers 1".split()
        run("preprocess", "--input", str(self.work / "trained.jsonl"), *self.bert, *sentences)

    def train(self) -> None:
        data = ["--data-path", str(next(self.work.glob("sentences*.idx")).with_suffix(""))]
        steps = ["--steps", str(self.bert_steps), "--save-interval", str(self.bert_steps)]
        if not (self.work / "bert").exists():
            run(
                "pretrain",
                *BERT.split(),
                *self.bert_sizes.split(),
                "--device",
                self.device,
                *self.bert,
                *data,
                *steps,
                "--save",
                str(self.work / "bert"),
            )
        sizes = f"--chunk-length {self.chunk} --block-size 20000 --device {self.device}".split()
        run("retro", "build", "--directory", str(self.work / "db"), *self.embedder, *sizes, *self.blend, *self.gpt)
        run("retro", "query", *self.reading, *self.embedder, "--candidates", "40", "--saved", "4")
        saved = ["--save-interval", str(self.steps), "--save"]
        for name, words in (("retro", self.reading), ("plain", [*self.sizes, *self.blend, *self.gpt])):
            if not (self.work / name).exists():
                metrics = ["--metrics", str(self.work / f"{name}.jsonl")]
                run("pretrain", *words, *metrics, *saved, str(self.work / name))

    @torch.no_grad()
    def judge(self, most: int) -> dict[str, float]:
        """Mean losses, and mean differences with their standard errors, of up to so many held-out samples."""
        opened = open_model(str(self.work / "retro"))
        stage, tokenizer = load_model(opened), load_tokenizer(opened)
        flags: dict[str, object] = {
            **{"data_path": tuple(self.blend[1:3]), "split": self.blend[4], "retro": str(self.work / "db")},
            **{"steps": self.steps, "eval_interval": self.steps, "eval_iters": 50, "global_batch": self.batch},
            **{"micro_batch": self.batch, "seq_length": self.length, "device": "cpu", "retriever": True, "layers": 4},
            **{"retro_layers": (1, 3), "retro_chunk_length": self.chunk, "vocab": tokenizer.vocab_size},
        }
        data = datasets(resolve(compose(flags={**flags, "hidden": self.hidden, "heads": 4}), 1), tokenizer)
        valid = cast(NeighbourDataset, data.valid)
        batch = self.batch
        count = min(most, len(valid)) // batch * batch
        drawn = torch.Generator().manual_seed(1)
        others = torch.stack([torch.randperm(count, generator=drawn) for _ in range(SHUFFLES)], 1).tolist()
        losses: dict[str, list[float]] = {"true": [], "shuffled": [], "none": []}
        for first in range(0, count, batch):
            numbers = range(first, first + batch)
            own, none = [valid[number] for number in numbers], [valid.alone()[number] for number in numbers]
            shuffled = [
                [
                    sample._replace(neighbours=valid[other].neighbours, found=valid[other].found)
                    for sample, other in zip(own, (others[number][turn] for number in numbers), strict=True)
                ]
                for turn in range(SHUFFLES)
            ]
            for name, sets in (("true", [own]), ("shuffled", shuffled), ("none", [none])):
                found = torch.stack([_losses(stage, valid.collate(samples, first)) for samples in sets])
                losses[name] += found.mean(0).tolist()
        figures = _differences({name: torch.tensor(each, dtype=torch.float64) for name, each in losses.items()})
        return {"neighbours of the same novel": self.same_novel(valid, count), **figures}

    def same_novel(self, valid: NeighbourDataset, count: int) -> float:
        """The share of the neighbours of held-out samples that come from the sample's own novel."""
        trained, hits, neighbours = NOVELS * self.parts, 0, 0
        for number in range(count):
            novels = {(document - trained) // HELD_OUT for _, document in valid._dataset.documents(number)}
            chunks = self.length // self.chunk
            for found in valid._neighbours[slice(number * chunks, (number + 1) * chunks)].flatten().tolist():
                neighbours += 1
                hits += found >= 0 and int(valid._database.chunks[found, 1]) // self.parts in novels
        return hits / neighbours


def _losses(stage: nn.Module, batch: NeighbourBatch) -> torch.Tensor:
    """Of each row, the mean of its labels."""
    logits = stage(batch, outputs=True).outputs.transpose(1, 2)
    return F.cross_entropy(logits, batch.labels, reduction="none").mean(1)


def _differences(losses: dict[str, torch.Tensor]) -> dict[str, float]:
    found: dict[str, float] = {"samples": len(losses["true"])}
    found |= {f"loss {name}": float(each.mean()) for name, each in losses.items()}
    for name in ("shuffled", "none"):
        gain = losses[name] - losses["true"]
        found[f"gain over {name}"] = float(gain.mean())
        found[f"standard error over {name}"] = float(gain.std() / math.sqrt(len(gain)))
        found[f"errors over {name}"] = found[f"gain over {name}"] / found[f"standard error over {name}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/novels"))
    parser.add_argument("--out", type=Path, default=Path("build/battery/retro_novels.jsonl"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--bert-steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--parts", type=int, default=40, help="of each novel that are trained on")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a chunk; a sample has four")
    parser.add_argument("--bert-layers", type=int, default=2)
    parser.add_argument("--bert-hidden", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="of training; losses are judged on the CPU")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("NLTK_DATA", str(given.shared / "nltk_data"))
    began, cpu = time.monotonic(), time.process_time()
    experiment = Experiment(given)
    if not (given.work / "novels.idx").exists():
        experiment.texts()
    experiment.train()
    found: dict[str, float] = experiment.judge(given.samples)
    found |= {
        "steps": given.steps,
        "hidden": given.hidden,
        "batch": given.batch,
        "seconds": time.monotonic() - began,
        "cpu seconds": time.process_time() - cpu,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("a") as file:
        file.write(json.dumps(found) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
