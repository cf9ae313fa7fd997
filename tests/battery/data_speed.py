"""`mega preprocess` beside a pure-Python BPE and beside the bare library, in turn in one run: ratios of one machine.

    MEGA_SHARED_DATA=... python tests/battery/data_speed.py

GPT-2 BPE on the novels repeated 40 times, by two processes each time:

    python            regex and a dictionary (one process, a twentieth of the text)
    loop              the library in a bare loop: a script that loads it, reads the JSON lines of its half of the file,
                      calls `encode` for one text after another and drops the ids
    batches           the same with the library's calls for bulk work on 64 texts, ids in one buffer
    loop in memory    the library's calls alone: texts lie in memory, nothing is loaded, parsed or kept
    batches in memory
    mega              the command line, from its start to the finished pair with checksums

The library has one thread in every process. Seconds of the processor stand beside those of the clock, since the machine
may be shared: their ratio says what a quiet machine of two cores would show.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.text import gpt2
from tests.battery.data_ledger import ROOT, run
from tests.support.shared import shared

REPEATS = int(os.environ.get("REPEATS", "40"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
VOCAB, MERGES = (Path(shared(f"gpt2/gpt2-{name}")) for name in ("vocab.json", "merges.txt"))

LIBRARY = """
import json, sys, time
from pathlib import Path
from fastokens import Tokenizer
from mega.core.text import gpt2
import orjson
way, vocab, merges, path, first, last, repeats = sys.argv[1:]
first, last, repeats = int(first), int(last), int(repeats)
library = Tokenizer.from_json_str(gpt2.tokenizer_json(gpt2.read_vocab(Path(vocab)), gpt2.read_merges(Path(merges))))
tokens = 0
"""
IN_MEMORY = """
with open(path, "rb") as file:
    texts = [orjson.loads(line)["text"] for line in file]
library.encode("")
batches = [texts[i : i + 64] for i in range(0, len(texts), 64)]
clock, processor = time.perf_counter(), time.process_time()
for _ in range(repeats):
    if way == "loop in memory":
        for text in texts:
            tokens += len(library.encode(text, split_special_tokens=True).ids)
    else:
        for batch in batches:
            tokens += len(library.encode_batch_flat(batch, split_special_tokens=True)[0]) // 4
print(json.dumps([tokens, time.perf_counter() - clock, time.process_time() - processor]))
"""
FROM_FILE = """
with open(path, "rb") as file:
    at = first
    if first:
        file.seek(first - 1)
        at += len(file.readline()) - 1
    batch = []
    for line in file:
        if at >= last:
            break
        at += len(line)
        text = orjson.loads(line)["text"]
        if way == "loop":
            tokens += len(library.encode(text, split_special_tokens=True).ids)
            continue
        batch.append(text)
        if len(batch) == 64:
            tokens += len(library.encode_batch_flat(batch, split_special_tokens=True)[0]) // 4
            batch = []
    if batch:
        tokens += len(library.encode_batch_flat(batch, split_special_tokens=True)[0]) // 4
print(json.dumps([tokens, 0, 0]))
"""

Seconds = tuple[float, float]
"""Of the clock, and of the processor."""


def bare(way: str, source: Path, expected: int) -> Seconds:
    """Two processes of the library; expected: the tokens that they must find."""
    middle, end = source.stat().st_size // 2, source.stat().st_size
    script = LIBRARY + (IN_MEMORY if "memory" in way else FROM_FILE)
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}
    clock, processor = time.perf_counter(), _children()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, way, VOCAB, MERGES, source, str(first), str(last), str(REPEATS // 2)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        )
        for first, last in ((0, middle), (middle, end))
    ]  # fmt: skip
    told = [json.loads(process.communicate()[0]) for process in running]
    assert sum(found[0] for found in told) == expected, (told, expected)
    if "memory" not in way:
        return time.perf_counter() - clock, _children() - processor
    return max(found[1] for found in told), sum(found[2] for found in told)


def mega(source: Path, home: Path, expected: int) -> Seconds:
    command: list[str | Path] = [
        sys.executable, "-m", "mega", "preprocess", "--overwrite", "--input", source, "--output-prefix", home / "out",
        "--workers", "2", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", VOCAB, "--merge-file", MERGES,
    ]  # fmt: skip
    clock, processor = time.perf_counter(), _children()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = time.perf_counter() - clock, _children() - processor
    assert json.loads((home / "out_text_document.json").read_text())["counts"][2] == expected
    return found


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def speed() -> dict[str, Any]:
    lines = gzip.decompress(shared("novels/novels.jsonl.gz").read_bytes())
    texts = [json.loads(line)["text"] for line in lines.splitlines()]
    megabytes = REPEATS * sum(len(text.encode()) for text in texts) / 1e6
    python = gpt2.reference(gpt2.read_vocab(VOCAB), gpt2.read_merges(MERGES))
    with tempfile.TemporaryDirectory(prefix="mega-speed-") as name:
        home = Path(name)
        (home / "once.jsonl").write_bytes(lines)
        with open(home / "many.jsonl", "wb") as file:
            for _ in range(REPEATS):
                file.write(lines)
        _, engine = gpt2.choose_engine(gpt2.read_vocab(VOCAB), gpt2.read_merges(MERGES))
        expected = REPEATS * len(engine(texts).ids)
        rows: dict[str, list[Seconds]] = {}
        for _ in range(ROUNDS):
            part = texts[::20]
            clock, processor = time.perf_counter(), time.process_time()
            python(part)
            scale = REPEATS * len(texts) / len(part) / 2  # all of it, in two processes
            slow = (time.perf_counter() - clock) * scale, (time.process_time() - processor) * scale * 2
            rows.setdefault("python", []).append(slow)
            for way in ("loop in memory", "batches in memory", "loop", "batches"):
                source = home / ("once.jsonl" if "memory" in way else "many.jsonl")
                rows.setdefault(way, []).append(bare(way, source, expected))
            rows.setdefault("mega", []).append(mega(home / "many.jsonl", home, expected))
    found: dict[str, Any] = {"MB": round(megabytes), "rounds": ROUNDS}
    for kind, name in enumerate(("clock", "processor")):
        for way, seconds in rows.items():
            found[f"{way}, s of {name}"] = round(statistics.median(row[kind] for row in seconds), 2)
        for way in list(rows)[:-1]:
            ratios = [other[kind] / own[kind] for other, own in zip(rows[way], rows["mega"], strict=True)]
            found[f"mega / {way}, by {name}"] = round(statistics.median(ratios), 2)
    assert found["mega / loop, by processor"] >= 0.8 and found["mega / python, by processor"] >= 10, found
    return found | {"load": round(os.getloadavg()[0], 1)}


PEAK = """
import json, resource, sys
from mega.core.data.preprocessing.preprocess import preprocess
preprocess([sys.argv[1]], sys.argv[2], json.loads(sys.argv[3]), workers=2, overwrite=True)
print(json.dumps([resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]))
"""


def memory() -> dict[str, Any]:
    """Peak memory of the parent and of the larger worker, on 40 times the text and on 4 times."""
    lines = gzip.decompress(shared("novels/novels.jsonl.gz").read_bytes())
    tokenizer = {"tokenizer": "GPT2BPETokenizer", "vocab_file": str(VOCAB), "merge_file": str(MERGES)}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mega-speed-") as home:
        for repeats in (4, 40):
            with open(f"{home}/a.jsonl", "wb") as file:
                for _ in range(repeats):
                    file.write(lines)
            command = [sys.executable, "-c", PEAK, f"{home}/a.jsonl", f"{home}/out", json.dumps(tokenizer)]
            parent, worker = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
            assert parent < 1024 and worker < 200 + 200, (parent, worker)
            found |= {f"parent, MiB, x{repeats}": parent, f"worker, MiB, x{repeats}": worker}
    return found


if __name__ == "__main__":
    run("data_speed", [("GPT-2 BPE on the novels", speed), ("peak memory", memory)])
