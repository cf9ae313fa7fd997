"""A database of generated chunks, by default a million: rates of each stage, memory, and what an index finds.

    python tests/battery/retro_scale.py --shared ../shared/data --work build/scale

1 documents of 32 chunks are generated, each of words of one topic of 2,000
2 `mega retro build`: chunks, vectors by a BERT of two layers of 128 numbers, an index
3 the vectors of 20,000 chunks of further documents are searched for by the index, and by looking at all vectors

The line written has seconds and rates of the stages that were run, the share of the ten nearest that the index finds,
and the most memory of the process. What is in --work is not made again, so a run may be stopped and resumed.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mega.cli import main as mega
from mega.core.data.chunks import ChunkDatabase
from mega.core.data.neighbours import DatabaseManifest
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.retro.database import build_database
from mega.core.retro.embed import open_embedder_of
from mega.core.retro.index import exact_search, open_search
from mega.core.retro.options import DatabaseOptions
from mega.core.retro.stages import Share
from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer

TOPICS, WORDS, CHUNKS_OF_DOCUMENT = 2000, 200, 32
QUERIES, NEAREST = 20_000, 10


def words_of(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Tokens that are a word of letters with the blank before it."""
    names = ((token, tokenizer.decode([token])) for token in range(tokenizer.vocab_size))
    return np.array([token for token, name in names if re.fullmatch(" [a-z]{3,}", name)])


def document(number: int, words: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Words of its topic, frequent ones first, as a function of its number."""
    topic = np.random.default_rng([7, number % TOPICS]).choice(words, WORDS, replace=False)
    shares = 1 / np.arange(1, WORDS + 1)
    return np.random.default_rng([8, number]).choice(topic, length, p=shares / shares.sum())


def prepare(work: Path, shared: Path, tokenizer: Tokenizer, chunks: int, length: int) -> None:
    """The corpus, and a BERT of one step."""
    words, documents = words_of(tokenizer), -(-chunks // CHUNKS_OF_DOCUMENT)
    assert tokenizer.eod is not None
    with IndexedWriter(work / "corpus", np.dtype(np.uint16)) as writer:
        for number in range(documents):
            writer.add([[*document(number, words, CHUNKS_OF_DOCUMENT * length).tolist(), tokenizer.eod]])
    sizes = "--family bert --mock-data --layers 2 --hidden 128 --heads 2 --micro-batch 2 --global-batch 2 --lr 1e-3"
    more = "--seq-length 64 --steps 1 --save-interval 1 --eval-iters 0 --device cpu --tokenizer BertWordPieceLowerCase"
    vocab = ["--vocab-file", str(shared / "bert" / "bert-base-uncased-vocab.txt")]
    if mega(["pretrain", *sizes.split(), *more.split(), *vocab, "--save", str(work / "bert")]):
        raise SystemExit(1)


class Clock:
    """Seconds between the lines of a stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, line: str) -> None:
        print(f"{time.monotonic() - self._last:7.1f} s  {line}", flush=True)
        stage = next(name for word, name in STAGES.items() if word in line)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - self._last
        self._last = time.monotonic()


STAGES = {
    "are cut": "chunks",
    "can be found": "joined",
    "are embedded": "vectors",
    "trained on": "index trained",
    "are added": "index filled",
}
"""What a line of a stage says -> what the stage is called."""


def judge(folder: Path, tokenizer: Tokenizer, load: str, index: str, probes: int) -> dict[str, float]:
    """Recall of the index, and how many searches a second both are."""
    manifest = DatabaseManifest.read(folder)
    chunks = len(ChunkDatabase(folder, manifest.chunk_length, manifest.eod))
    words, length, cpu = words_of(tokenizer), manifest.chunk_length, torch.device("cpu")
    embedder = open_embedder_of(folder, manifest, load, "cpu")
    further = (document(10**8 + number, words, length).tolist() for number in range(QUERIES))
    queries = embedder([tokenizer.decode(ids) for ids in further])
    found, found_in = [], dict[str, float]()
    for name, search in (
        ("index", open_search(folder, manifest, chunks, cpu, index, probes)),
        ("exact", exact_search(folder, manifest, chunks, cpu)),
    ):
        began = time.monotonic()
        found.append(np.concatenate([search(queries[at : at + 1000], NEAREST) for at in range(0, QUERIES, 1000)]))
        found_in[f"searches a second, {name}"] = QUERIES / (time.monotonic() - began)
    shared = [len(set(a) & set(b)) / NEAREST for a, b in zip(found[0].tolist(), found[1].tolist(), strict=True)]
    return {"chunks": chunks, "recall": float(np.mean(shared)), **found_in}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/scale"))
    parser.add_argument("--out", type=Path, default=Path("build/battery/retro_scale.jsonl"))
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--chunk-length", type=int, default=64)
    parser.add_argument("--index", default="IVF1024,Flat")
    parser.add_argument("--probes", type=int, default=32)
    given = parser.parse_args()
    vocab, merges = (str(given.shared / "gpt2" / f"gpt2-{name}") for name in ("vocab.json", "merges.txt"))
    tokenizer = build(tokenizer="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    given.work.mkdir(parents=True, exist_ok=True)
    if not (given.work / "bert").exists():
        prepare(given.work, given.shared, tokenizer, given.chunks, given.chunk_length)
    options = DatabaseOptions(
        directory=str(given.work / "db"),
        embedder=str(given.work / "bert"),
        data_path=("1", str(given.work / "corpus")),
        split="100,0,0",
        chunk_length=given.chunk_length,
        block_size=50_000,
        doc_block_size=2_000,
        index=given.index,
        index_train=100_000,
        device="cpu",
    )
    clock = Clock()
    build_database(options, tokenizer, Share(), clock)
    found: dict[str, float] = judge(given.work / "db", tokenizer, options.embedder, given.index, given.probes)
    found |= {f"seconds, {name}": seconds for name, seconds in clock.seconds.items()}
    found["GiB at most"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("a") as file:
        file.write(json.dumps({**found, "index": given.index, "probes": given.probes}) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
