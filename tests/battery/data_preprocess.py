"""5,000 documents in every wrapping, in shards, with 1 .. 4 workers, and killed at 30 random moments: the same bytes.

MEGA_SHARED_DATA=... python tests/battery/data_preprocess.py [item ...]
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.data.preprocessing.merge import merge
from mega.core.data.preprocessing.preprocess import preprocess
from tests.battery.data_ledger import ROOT, run
from tests.support.shared import shared

TOKENIZER = {
    "tokenizer": "GPT2BPETokenizer",
    "vocab_file": str(shared("gpt2/gpt2-vocab.json")),
    "merge_file": str(shared("gpt2/gpt2-merges.txt")),
}
HOME = Path(tempfile.mkdtemp(prefix="mega-data-"))
LINES = gzip.decompress(shared("novels/novels.jsonl.gz").read_bytes()).splitlines(keepends=True)[:5000]


def source() -> Path:
    path = HOME / "a.jsonl"
    if not path.exists():
        path.write_bytes(b"".join(LINES))
    return path


def digest(prefix: str) -> str:
    return hashlib.sha256(b"".join(Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx"))).hexdigest()


def made(name: str, *inputs: Any, **options: Any) -> str:
    report = preprocess(inputs, str(HOME / name), TOKENIZER, append_eod=True, overwrite=True, **options)
    assert report.documents == 5000, report.documents
    return digest(report.outputs[0])


def expected() -> str:
    path = HOME / "expected"
    if not path.exists():
        path.write_text(made("expected", source()))
    return path.read_text()


def wrapping(kind: str) -> Any:
    def prove() -> dict[str, Any]:
        path = HOME / f"{kind}"
        data = source().read_bytes()
        texts = [json.loads(line)["text"] for line in LINES]
        if kind == "gz":
            path = path.with_suffix(".jsonl.gz")
            path.write_bytes(gzip.compress(data))
        elif kind == "bz2":
            import bz2

            path = path.with_suffix(".jsonl.bz2")
            path.write_bytes(bz2.compress(data, 1))
        elif kind == "xz":
            import lzma

            path = path.with_suffix(".jsonl.xz")
            path.write_bytes(lzma.compress(data, preset=1))
        elif kind == "zst":
            import zstandard

            path = path.with_suffix(".jsonl.zst")
            path.write_bytes(zstandard.compress(data))
        elif kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            path = path.with_suffix(".parquet")
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=700)
        elif kind == "txt":
            path.mkdir()
            for i, text in enumerate(texts):
                (path / f"{i:05}.txt").write_bytes(text.encode())
        elif kind == "dataset":
            import pyarrow

            path.mkdir()
            table = pyarrow.table({"text": texts})
            with pyarrow.ipc.new_stream(path / "data-0.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=1000)
            (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
        assert made(f"out-{kind}", path) == expected()
        return {"documents": 5000}

    return prove


def workers(count: int) -> Any:
    def prove() -> dict[str, Any]:
        assert made(f"workers-{count}", source(), workers=count) == expected()
        return {}

    return prove


def shards(count: int) -> Any:
    def prove() -> dict[str, Any]:
        parts = [
            preprocess(
                [source()], f"{HOME}/s{i}-{count}", TOKENIZER, append_eod=True, overwrite=True, shard=(i, count)
            ).outputs[0]
            for i in range(count)
        ]
        merge(parts, f"{HOME}/merged-{count}")
        assert digest(f"{HOME}/merged-{count}") == expected()
        return {}

    return prove


SCRIPT = """
import json, sys
from mega.core.data import sources
from mega.core.data.preprocessing.preprocess import preprocess
sources.BLOCK_BYTES = 50_000
print("on", flush=True)
preprocess([sys.argv[1]], sys.argv[2], json.loads(sys.argv[3]), append_eod=True, resume=True, save_every=0.02)
"""


def started(prefix: str) -> subprocess.Popen[bytes]:
    """A run that goes on where the last one on this prefix stopped, past its imports."""
    command = [sys.executable, "-c", SCRIPT, str(source()), prefix, json.dumps(TOKENIZER)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@functools.cache
def length() -> float:
    """Seconds of a run that nobody kills."""
    process, begin = started(f"{HOME}/length"), time.perf_counter()
    assert process.wait() == 0
    return time.perf_counter() - begin


def kill(number: int) -> Any:
    """Kill -9 at a random moment of a run, three times over, then resume to the end."""

    def prove() -> dict[str, Any]:
        rng, prefix, kills, ended = random.Random(number), f"{HOME}/k{number}", 0, 0
        while kills < 3:
            process = started(prefix)
            time.sleep(rng.random() * length())
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            if process.wait() == -9:
                kills += 1
            else:  # nothing is left to be killed: from the beginning
                assert process.returncode == 0, process.returncode
                ended += 1
                for path in HOME.glob(f"k{number}_*"):
                    path.unlink()
        assert started(prefix).wait() == 0
        assert digest(f"{prefix}_text_document") == expected()
        left = [path.name for path in HOME.glob(f"k{number}*") if path.suffix not in (".bin", ".idx", ".json")]
        assert not left, left
        return {"kills": kills, "ended before": ended, "length": round(length(), 2)}

    return prove


ITEMS = [
    *((f"wrapping {kind}", wrapping(kind)) for kind in ("gz", "xz", "bz2", "zst", "parquet", "txt", "dataset")),
    *((f"workers {count}", workers(count)) for count in (1, 2, 3, 4)),
    *((f"shards {count}", shards(count)) for count in (2, 7)),
    *((f"kill {number}", kill(number)) for number in range(10)),
]

if __name__ == "__main__":
    try:
        run("data_preprocess", ITEMS)
    finally:
        shutil.rmtree(HOME)
