"""`mega preprocess` beside a pure-Python BPE and beside the bare library, all in one run: the ratios of one machine.

    MEGA_SHARED_DATA=... python tests/battery/data_speed.py

GPT-2 BPE on the novels repeated: (1) regex and a dictionary in Python, one process, on a twentieth of the text; (2) the
library in a bare loop of two processes on lists of texts; (3) `preprocess` with two workers, from the file to the pair.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.data.preprocess import preprocess
from mega.core.text import gpt2
from mega.core.text.build import build
from tests.battery.data_ledger import run
from tests.support.shared import shared

REPEATS = int(os.environ.get("REPEATS", "40"))
OPTIONS = {
    "tokenizer": "GPT2BPETokenizer",
    "vocab_file": str(shared("gpt2/gpt2-vocab.json")),
    "merge_file": str(shared("gpt2/gpt2-merges.txt")),
}

_library: Any


def start() -> None:
    global _library
    _library = build(**OPTIONS)
    _library.encode_batch([""])


def encode(texts: list[str]) -> int:
    return len(_library.encode_batch(texts).ids)


def ready(_: int) -> None:
    time.sleep(0.5)


def speed() -> dict[str, Any]:
    lines = gzip.decompress(shared("novels/novels.jsonl.gz").read_bytes())
    texts = [json.loads(line)["text"] for line in lines.splitlines()]
    size = sum(len(text.encode()) for text in texts)
    home = Path(tempfile.mkdtemp(prefix="mega-speed-"))
    with open(home / "a.jsonl", "wb") as file:
        for _ in range(REPEATS):
            file.write(lines)

    merges = gpt2.read_merges(Path(OPTIONS["merge_file"]))
    python = gpt2.reference(gpt2.read_vocab(Path(OPTIONS["vocab_file"])), merges)
    part = texts[::20]
    begin = time.perf_counter()
    python(part)
    slow = sum(len(text.encode()) for text in part) / (time.perf_counter() - begin) / 1e6

    os.environ["RAYON_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(2, get_context("fork"), initializer=start) as pool:
        list(pool.map(ready, range(4)))
        blocks = [texts[i : i + 256] for i in range(0, len(texts), 256)] * REPEATS
        begin = time.perf_counter()
        tokens = sum(pool.map(encode, blocks, chunksize=4))
        bare = REPEATS * size / (time.perf_counter() - begin) / 1e6
    del os.environ["RAYON_NUM_THREADS"]

    begin = time.perf_counter()
    report = preprocess([home / "a.jsonl"], str(home / "out"), OPTIONS, workers=2)
    whole = REPEATS * size / (time.perf_counter() - begin) / 1e6
    assert report.tokens == tokens
    usage = [resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    for path in home.iterdir():
        path.unlink()
    return {
        "MB": round(REPEATS * size / 1e6),
        "python MB/s": round(slow, 2),
        "bare library, 2 processes, MB/s": round(bare, 1),
        "preprocess, 2 workers, MB/s": round(whole, 1),
        "preprocess / python": round(whole / slow, 1),
        "preprocess / bare": round(whole / bare, 2),
        "peak MiB of parent": usage[0],
        "peak MiB of a worker": usage[1],
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    run("data_speed", [("GPT-2 BPE on the novels", speed)])
