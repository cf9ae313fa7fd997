"""Retro on one GPU: chunks embedded a second against the BERT alone, and a training step against a GPT's.

    python -m tests.gpu.retro --shared ../shared/data --work /tmp/retro --out rows.jsonl [--chunks 100000] [--small]

    embedding   `mega retro build` of generated chunks of 64 tokens, by a BERT of 12 layers of 768 numbers, in fp32 and
                in bf16: the rate of its stage `vectors`, and of the forward passes of the same rows that lie on the
                device already
    training    a GPT of 24 layers of 1,024 numbers, 512 tokens, bf16, with and without a retriever: seconds of a step,
                their ratio, and the ratio of the operations (mega/core/flops.py)

A JSON line a row. --small: tiny shapes, to try this file on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mega.cli import main as mega
from mega.core.bench.training import measure
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.data.chunks import ChunkDatabase
from mega.core.data.neighbours import DatabaseManifest
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.device import Device
from mega.core.flops import model_flops_per_token
from mega.core.processes.connect import connect, disconnect
from mega.core.retro.database import build_database
from mega.core.retro.embed import open_embedder_of
from mega.core.retro.options import DatabaseOptions
from mega.core.retro.stages import Share
from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer
from tests.battery.retro_scale import CHUNKS_OF_DOCUMENT, Clock, document, words_of

LENGTH = 64


def prepare(work: Path, shared: Path, tokenizer: Tokenizer, chunks: int, *, small: bool) -> None:
    """The corpus, and a BERT of one step."""
    words = words_of(tokenizer)
    assert tokenizer.eod is not None
    with IndexedWriter(work / "corpus", np.dtype(np.uint16)) as writer:
        for number in range(-(-chunks // CHUNKS_OF_DOCUMENT)):
            writer.add([[*document(number, words, CHUNKS_OF_DOCUMENT * LENGTH).tolist(), tokenizer.eod]])
    sizes = "--layers 2 --hidden 128 --heads 2" if small else "--layers 12 --hidden 768 --heads 12"
    more = "--family bert --mock-data --micro-batch 2 --global-batch 2 --lr 1e-3 --seq-length 128 --steps 1"
    rest = f"--save-interval 1 --eval-iters 0 --tokenizer BertWordPieceLowerCase --save {work / 'bert'}"
    vocab = ["--vocab-file", str(shared / "bert" / "bert-base-uncased-vocab.txt")]
    if mega(["pretrain", *sizes.split(), *more.split(), *rest.split(), *vocab]):
        raise SystemExit(1)


def embedding(
    work: Path, tokenizer: Tokenizer, dtype: Literal["fp32", "bf16"], device: Device, batch: int
) -> dict[str, Any]:
    folder = work / f"db-{dtype}-{batch}"
    options = DatabaseOptions(
        directory=str(folder), embedder=str(work / "bert"), data_path=("1", str(work / "corpus")), split="100,0,0",
        chunk_length=LENGTH, embed_batch=batch, embed_dtype=dtype, block_size=50_000,
    )  # fmt: skip
    clock = Clock()
    build_database(options, tokenizer, Share(), clock)
    manifest = DatabaseManifest.read(folder)
    database = ChunkDatabase(folder, LENGTH, manifest.eod)
    embedder = open_embedder_of(folder, manifest, options.embedder, str(device.torch))
    rows = next(embedder._windows(tokenizer.decode(database.ids(chunk).tolist()) for chunk in range(4096)))
    rows = sorted(rows, key=len)
    vectors = embedder._vectors
    batches = [vectors._batch_of(rows[at : at + batch]) for at in range(0, len(rows), batch)]

    def forward() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            for each in batches:
                vectors._stage.stream(each, None)
        device.synchronize()
        return time.perf_counter() - began

    alone = sorted(forward() for _ in range(7))[3]
    rate = len(database) / clock.seconds["vectors"]
    return {
        "row": f"embedding, {dtype}, batches of {batch}", "device": device.name, "chunks": len(database),
        "chunks_per_second": rate, "forward_chunks_per_second": len(rows) / alone, "share": rate * alone / len(rows),
        "cut_per_second": len(database) / clock.seconds["chunks"],
    }  # fmt: skip


def training(out: Any, *, small: bool) -> None:
    world, device, groups = connect("auto")
    sizes = (
        {"layers": 12, "hidden": 64, "heads": 4, "vocab": 512}
        if small
        else {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 50304}
    )
    for micro in (2,) if small else (4, 16):
        flags: dict[str, Any] = {
            **sizes,
            "seq_length": 512,
            "micro_batch": micro,
            "global_batch": 4 * micro,
            "lr": 1e-4,
        }
        flags |= {"dtype": "fp32" if small else "bf16", "recompute": "none", "steps": 100}
        found = {}
        for retriever in (False, True):
            run = resolve(compose(None, {"family": "gpt", **flags, "retriever": retriever}), 1)
            speed = measure("retro", run, world.rank, 1, device, groups, repeats=5, warmup=3)
            found[retriever] = speed.seconds, model_flops_per_token(run)
            out({"row": f"{'Retro' if retriever else 'GPT'}, micro batch {micro}", **speed.fields()})
        seconds, operations = (found[True][at] / found[False][at] for at in (0, 1))
        out(
            {
                "row": f"step ratio, micro batch {micro}",
                "seconds": seconds,
                "operations": operations,
                "over": seconds / operations,
            }
        )
    disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="training,embedding")
    given = parser.parse_args()

    def out(row: dict[str, Any]) -> None:
        print(json.dumps({name: value for name, value in row.items() if name not in ("steps", "work")}), flush=True)
        with open(given.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    if "training" in given.only:
        training(out, small=given.small)
    if "embedding" in given.only:
        vocab, merges = (str(given.shared / "gpt2" / f"gpt2-{name}") for name in ("vocab.json", "merges.txt"))
        tokenizer = build(tokenizer="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
        given.work.mkdir(parents=True, exist_ok=True)
        prepare(given.work, given.shared, tokenizer, given.chunks, small=given.small)
        rows: tuple[tuple[Literal["fp32", "bf16"], int], ...] = (("fp32", 128), ("bf16", 128), ("bf16", 1024))
        for dtype, batch in rows:
            out(embedding(given.work, tokenizer, dtype, Device.choose(), batch))


if __name__ == "__main__":
    main()
