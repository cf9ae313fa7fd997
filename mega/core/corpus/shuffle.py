"""Shuffles documents of any total size. The order depends only on the seed and the document indices.

    1 each document gets a random key and is written to the file of its key range
    2 each file is sorted by key, and becomes a part of the output

The input is read only once, and only one file is held in memory at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mega.core.corpus.documents import Work, check_of, each, keep_document
from mega.core.corpus.folder import SURVEY, RunOptions, locked_folder, read_record, write_record
from mega.core.corpus.ledger import StepCounts
from mega.core.corpus.minhash import mixed
from mega.core.corpus.part_files import ReadableDocuments, line_file
from mega.core.corpus.parts import parts
from mega.core.corpus.run import StepOutcome, accepted_identities, begin, finish
from mega.core.untrusted import numbers_below

_BUCKET_BYTES = 1 << 26
_MOST_BUCKETS = 512
_DISTRIBUTED = "distributed.json"
_SEED_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """The step that shuffles documents."""

    name: ClassVar[str] = "shuffle"
    key: ClassVar[str] = ""
    seed: int = 1234
    bucket_bytes: int = _BUCKET_BYTES

    def load(self) -> Work:
        """Return the function that keeps every document unchanged."""
        return each(keep_document)


def shuffle(inputs: Sequence[str | Path], step: Shuffle, options: RunOptions) -> StepOutcome:
    """Write the documents of `inputs` in the order of their random keys. Errors: the same as those of `run.process`."""
    if options.shard != (0, 1):
        raise ValueError("--shard: an order is one of all documents; leave it out")
    paths, identity, repeated = begin(inputs, step, options)
    if repeated is not None:
        return repeated
    with locked_folder(options, accepted_identities(step, paths, options)):
        folder = options.folder / SURVEY
        folder.mkdir(exist_ok=True)
        if not (folder / _DISTRIBUTED).is_file():
            _distribute(paths, step, options, folder)
        distribution = read_record(folder / _DISTRIBUTED) or {}
        counts = StepCounts()
        for number in range(int(numbers_below(distribution)["buckets"])):
            if read_record(sidecar := options.folder / f".00000-{number:06}.json") is None:
                write_record(
                    sidecar, _sort(folder / f"bucket-{number}", options, number, bool(distribution["plain"])).as_json()
                )
        write_record(options.folder / f".00000-{distribution['buckets']:06}.json", distribution["skipped"])
        return finish(step, paths, options, identity, counts)


def _distribute(paths: Sequence[Path], step: Shuffle, options: RunOptions, folder: Path) -> None:
    total = sum(path.stat().st_size for path in paths)
    count = min(max(1, -(-total // step.bucket_bytes)), _MOST_BUCKETS)
    number, plain, skipped = 0, None, StepCounts()
    with contextlib.ExitStack() as open_files:
        files = [open_files.enter_context(open(folder / f"bucket-{i}", "wb")) for i in range(count)]
        for part in parts(paths, part_bytes=options.part_bytes):
            if plain not in (None, part.plain):
                raise ValueError(f"--input {part.source.path}: .txt and JSON lines cannot be shuffled together")
            documents = ReadableDocuments(
                part, step.key, check_of(step), skipped, stop=options.on_error == "stop", samples=options.show_dropped
            )
            lines = [document.line for document in documents]
            numbers = np.arange(number, number + len(lines), dtype=np.uint64)
            keys = mixed(mixed(numbers + _SEED_STEP) ^ np.uint64(step.seed * int(_SEED_STEP) & (1 << 64) - 1))
            for key, line in zip(keys.tolist(), lines, strict=True):
                files[key * count >> 64].write(key.to_bytes(8, "big") + line + b"\n")
            number, plain = number + len(lines), part.plain
            if options.progress is not None:
                options.progress(StepCounts(documents=number), part.end, 2 * total)
    skipped.documents -= number
    write_record(folder / _DISTRIBUTED, {"buckets": count, "plain": plain, "skipped": skipped.as_json()})


def _sort(bucket: Path, options: RunOptions, number: int, plain: bool) -> StepCounts:
    rows = []
    with open(bucket, "rb") as file:
        while key := file.read(8):
            rows.append((key, file.readline()))
    rows.sort()
    with line_file(options.folder, f"00000-{number:06}", plain, options.packed) as output_file:
        for _, line in rows:
            output_file.write(line[:-1])
    size = sum(len(line) for _, line in rows)
    return StepCounts(documents=len(rows), kept=len(rows), written=len(rows), bytes=size)
