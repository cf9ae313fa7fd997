"""Token files cut at 200 offsets and with 200 bits flipped, each of .bin and .idx, mapped and not: an error that names
the file, or (where only a checksum can know) an error of `verify`; never a sample that differs in silence from a pair
that opens.

And 10,000 hostile documents: each is skipped, counted and named, and what goes in comes out or is skipped.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.data.indexed import IndexedDataset, token_dtype
from mega.core.data.inspect import verify
from mega.core.data.preprocessing.preprocess import preprocess
from mega.core.data.preprocessing.writer import IndexedWriter
from tests.battery.data_ledger import ROOT, run

HOME = Path(tempfile.mkdtemp(prefix="mega-damage-"))


def pair() -> Path:
    rng = random.Random(0)
    with IndexedWriter(HOME / "a", token_dtype(1000)) as writer:
        for _ in range(500):
            writer.add([[rng.randrange(1000) for _ in range(rng.randrange(30))] for _ in range(rng.randrange(4))])
    return HOME / "a"


def damage(end: str, kind: str, way: str) -> Any:
    """200 cuts or flips of one file of the pair, opened through a map, or read piece by piece."""

    def prove() -> dict[str, Any]:
        prefix, rng = pair(), random.Random(f"{end} {kind}")
        path = Path(f"{prefix}.{end}")
        whole = path.read_bytes()
        right = [sequence.tolist() for sequence in map(IndexedDataset(prefix).get, range(len(IndexedDataset(prefix))))]
        at_open = at_verify = wrong = 0
        for _ in range(200):
            if kind == "cut":
                path.write_bytes(whole[: rng.randrange(len(whole))])
            else:
                at = rng.randrange(len(whole))
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
            try:
                found = IndexedDataset(prefix, mmap=way == "mmap")
            except ValueError as error:
                assert str(HOME / "a.") in str(error), error
                at_open += 1
                continue
            wrong += [found[i].tolist() for i in range(len(found))] != right
            try:
                verify(str(prefix), lambda line: None)
            except ValueError as error:
                assert str(path) in str(error), error
                at_verify += 1
        path.write_bytes(whole)
        assert at_open + at_verify == 200 and (kind != "cut" or at_open == 200), (at_open, at_verify)
        assert end == "bin" or wrong <= at_verify <= 4, wrong  # all but the inside of the document index is checked
        return {"found when opened": at_open, "found by verify": at_verify, "of these wrong ids": wrong, "silent": 0}

    return prove


def cut_under_way() -> dict[str, Any]:
    """The .bin cut at 200 offsets after it was opened: without a map, every sample that is gone is an error."""
    prefix, rng = pair(), random.Random(2)
    path = Path(f"{prefix}.bin")
    whole = path.read_bytes()
    right = IndexedDataset(prefix)
    every = [right[i].tolist() for i in range(len(right))]
    errors = 0
    for _ in range(200):
        found = IndexedDataset(prefix, mmap=False)
        path.write_bytes(whole[: rng.randrange(len(whole))])
        for i, expected in enumerate(every):
            try:
                assert found[i].tolist() == expected
            except ValueError as error:
                assert str(path) in str(error)
                errors += 1
        path.write_bytes(whole)
    return {"samples": 200 * len(every), "errors": errors, "wrong": 0}


def hostile() -> dict[str, Any]:
    rng = random.Random(1)
    bad: list[Callable[[], bytes]] = [
        lambda: b'{"text": "\xff\xfe"}',
        lambda: b'{"text": "\\ud800"}',
        lambda: b"[" * 100_000,
        lambda: b'{"a":' * 100_000,
        lambda: b'{"text": 1}',
        lambda: b'{"text": null}',
        lambda: b'{"text": {"text": "a"}}',
        lambda: b"null",
        lambda: b'{"other": "a"}',
        lambda: b'{"text": "a"',
        lambda: b'{"text": "a"} x',
        lambda: bytes(rng.randrange(256) for _ in range(40)).replace(b"\n", b"") or b"x",
        lambda: b'{"text": "\x00"}',
        lambda: b"\xff\xfe" + '{"text": "a"}'.encode("utf-16-le").replace(b"\n", b""),
    ]
    good: list[Callable[[], bytes]] = [
        lambda: b'{"text": ""}',
        lambda: b'{"text": "a\\u0000b"}',
        lambda: b'{"text": "<|endoftext|>"}\r',
        lambda: json.dumps({"text": "x" * rng.randrange(1 << 16)}).encode(),
        lambda: b'{"text": "a", "text": "b"}',
        lambda: b"",
        lambda: b" \t\r",
    ]
    lines = [rng.choice(bad if rng.random() < 0.5 else good)() for _ in range(10_000)]
    lines[5000] = b'{"text": "' + b"y" * (100 << 20) + b'"}'
    lines[6000] = b'{"text": "' + b"z" * (140 << 20) + b'"}'
    path = HOME / "hostile.jsonl"
    path.write_bytes(b"\n".join(lines))
    blanks = sum(not line.strip() for line in lines[5000:6001])
    tokenizer = {"tokenizer": "BertWordPieceLowerCase", "vocab_file": str(HOME / "vocab.txt")}
    (HOME / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    del lines[5000:6001]
    blank = sum(not line.strip() for line in lines) + blanks
    script = (
        "import json, resource, sys; from mega.core.data.preprocessing.preprocess import preprocess;"
        "r = preprocess(sys.argv[1:2], sys.argv[2], json.loads(sys.argv[3]), overwrite=True, on_error='skip');"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024;"
        "print(json.dumps([r.documents, r.skipped, r.reasons, peak]))"
    )
    command = [sys.executable, "-c", script, str(path), str(HOME / "h"), json.dumps(tokenizer)]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300).stdout
    documents, skipped, reasons, peak = json.loads(told)
    assert documents + skipped + blank == 10_000, (documents, skipped, blank)
    assert skipped >= 4000 and all("hostile.jsonl:" in reason for reason in reasons)
    assert IndexedDataset(HOME / "h_text_document").documents == documents
    assert peak < 1024 + 200, peak
    return {"documents": documents, "skipped": skipped, "blank": blank, "peak MiB": peak}


def bomb() -> dict[str, Any]:
    """1 GiB of one line in a megabyte of gzip."""
    import gzip

    path = HOME / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b'{"text": "1"}\n{"text": "')
        for _ in range(1 << 10):
            file.write(b"0" * (1 << 20))
        file.write(b'"}\n{"text": "2"}\n')
    report = preprocess(
        [path], str(HOME / "b"), {"tokenizer": "NullTokenizer", "vocab_size": 9}, overwrite=True, on_error="skip"
    )
    assert (report.documents, report.skipped) == (2, 1)
    return {"packed bytes": path.stat().st_size, "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


ITEMS = [
    *(
        (f"{kind} {end}, {way}", damage(end, kind, way))
        for end in ("bin", "idx")
        for kind in ("cut", "flip")
        for way in ("mmap", "no mmap")
    ),
    ("cut while it is read, no mmap", cut_under_way),
    ("gzip bomb", bomb),
    ("hostile documents", hostile),
]

if __name__ == "__main__":
    try:
        run("data_damage", ITEMS)
    finally:
        shutil.rmtree(HOME)
