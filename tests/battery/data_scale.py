"""The order of samples at the sizes of real corpora: 100 million documents, a blend of 100 million samples, 2,000
prefixes, a resume far on, one sample. Seconds are of the processor, as the machine may be shared; memory is the peak.

    python tests/battery/data_scale.py [item ...]      # needs 4 GB in /dev/shm, or in TMPDIR
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.data.indexed import CODES, HEADER, MAGIC
from tests.battery.data_ledger import ROOT, run

MEMORY = Path("/dev/shm")
HOME = Path(tempfile.mkdtemp(prefix="mega-scale-", dir=MEMORY if MEMORY.is_dir() else None))

START = """
import json, resource, sys, time
import numpy as np
from mega.core.config.sections import DataConfig
from mega.core.data.build import build_datasets
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
words, seq_length, samples, home, splits = json.loads(sys.argv[1])
begin, wall, before = time.process_time(), time.perf_counter(), peak()
made = build_datasets(DataConfig(data_path=tuple(words), split=splits, data_cache=home + "/cache"),
    seq_length=seq_length, seed=1, vocab=60000, samples=tuple(samples))
found = {"CPU s": round(time.process_time() - begin, 2), "wall s": round(time.perf_counter() - wall, 2),
    "peak MiB": peak(), "samples": len(made.train)}
"""


def child(body: str, *arguments: Any) -> dict[str, Any]:
    """What a fresh process tells."""
    command = [sys.executable, "-c", START + body + "\nprint(json.dumps(found))", json.dumps(arguments)]
    found: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    return found


def corpus(name: str, lengths: Any) -> str:
    """A pair of `lengths` whose ids are all 0: its .bin is a hole."""
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], out=offsets[1:])
    tokens = int(offsets[-1]) + int(lengths[-1])
    with open(HOME / f"{name}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[np.dtype("<u2")], len(lengths), len(lengths) + 1))
        for array in (lengths.astype("<i4"), 2 * offsets, np.arange(len(lengths) + 1)):
            file.write(array.data)
    with open(HOME / f"{name}.bin", "wb") as file:
        file.truncate(2 * tokens)
    note = {"counts": [len(lengths), len(lengths), tokens], "smallest": 0, "largest": 0}
    (HOME / f"{name}.json").write_text(json.dumps(note))
    return str(HOME / name)


def lengths(documents: int, most: int) -> Any:
    return np.random.default_rng(0).integers(1, most, documents, np.int32)


def hundred_million() -> dict[str, Any]:
    """50 thousand million tokens: the first start, and one that finds everything in the cache."""
    prefix = corpus("large", lengths(100_000_000, 1000))
    work = ([prefix], 2048, [24_000_000, 0, 0], str(HOME), "1,0,0")
    cold, warm = child("", *work), child("", *work)
    assert cold["CPU s"] < 300 and cold["peak MiB"] < 8 << 10, cold
    assert warm["CPU s"] < 20, warm
    return {"documents": 100_000_000, "first": cold, "again": warm}


def two_thousand() -> dict[str, Any]:
    """Prefixes of training, validation and test each: 6,000 orders and three blends."""
    sizes = lengths(100, 300)
    words = [word for i in range(2000) for word in (str(1 + i % 7), corpus(f"p{i}", sizes))]
    work = (words, 64, [1_000_000, 10_000, 10_000], str(HOME), "90,5,5")
    cold, warm = child("", *work), child("", *work)
    assert warm["CPU s"] < 10, warm
    return {"prefixes": 2000, "first": cold, "again": warm}


def blend() -> dict[str, Any]:
    body = """
from mega.core.data.order import blend_order
weights = [1.0, 2.5, 0.01, 7.0, 3.3, 0.4, 1.1, 0.9, 12.0, 5.0]
begin = time.process_time()
chosen, numbers = blend_order(weights, 100_000_000)
found = {"CPU s": round(time.process_time() - begin, 1), "peak MiB": peak()}
counts = np.bincount(chosen)
assert abs(counts - 1e8 * np.array(weights) / sum(weights)).max() < 2
assert all((numbers[chosen == i][[0, -1]] == [0, counts[i] - 1]).all() for i in range(10))
"""
    found = child(body, [corpus("tiny", lengths(100, 300))], 64, [10, 0, 0], str(HOME), "1,0,0")
    assert found["CPU s"] < 120 and found["peak MiB"] < 4 << 10
    return {"samples": 100_000_000, "datasets": 10, **found}


def resume() -> dict[str, Any]:
    """From the start of the process's work to the first batch, at the first and at the last step."""
    prefix = corpus("middle", lengths(1_000_000, 1000))
    child("", [prefix], 2048, [240_000, 0, 0], str(HOME), "1,0,0")  # fills the cache
    found = {}
    for step in (0, 15_000, 29_999):
        body = f"""
from mega.core.data.batches import Batches
begin = time.process_time()
reader = Batches(made.train, micro_batch=8, vocab=60000)
reader.take({step} * 8, 1)
found["first batch ms"] = round(1e3 * (time.process_time() - begin), 1)
"""
        told = child(body, [prefix], 2048, [240_000, 0, 0], str(HOME), "1,0,0")
        found[f"step {step}"] = {"build CPU s": told["CPU s"], "first batch ms": told["first batch ms"]}
    times = [row["build CPU s"] + row["first batch ms"] / 1e3 for row in found.values()]
    assert max(times) < min(times) + 0.3, found
    return found


def one_sample() -> dict[str, Any]:
    """dataset[i], warm, for sequences of 1024 over documents of 400 to 1000 tokens: at most 4 of them."""
    prefix = corpus("warm", np.random.default_rng(0).integers(400, 1000, 100_000, np.int32))
    body = """
from mega.core.data.dataset import BlendedDataset
assert isinstance(made.train, BlendedDataset) == (len(words) > 1)
chosen = np.random.default_rng(1).integers(0, len(made.train), 500).tolist()
times = []
for _ in range(200):
    begin = time.process_time()
    for i in chosen:
        made.train[i]
    times.append((time.process_time() - begin) / len(chosen) * 1e6)
found = {"us": round(float(np.median(times)), 1), "best us": round(min(times), 1)}
"""
    alone = child(body, [prefix], 1024, [60_000, 0, 0], str(HOME), "1,0,0")
    blended = child(body, ["1", prefix, "2", prefix], 1024, [30_000, 0, 0], str(HOME), "1,0,0")
    assert alone["best us"] < 20 and blended["best us"] < 20, (alone, blended)
    return {"one corpus": alone, "blend of two": blended}


ITEMS = [
    ("one sample", one_sample),
    ("resume", resume),
    ("2,000 prefixes", two_thousand),
    ("blend of 100 M samples", blend),
    ("100 M documents", hundred_million),
]

if __name__ == "__main__":
    try:
        run("data_scale", ITEMS)
    finally:
        shutil.rmtree(HOME)
