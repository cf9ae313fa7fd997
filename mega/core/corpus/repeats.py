"""Finds documents, paragraphs or URLs that occurred before. Keys are stored on disk, so memory is bounded.

1 a survey computes a 128-bit key for every item, part by part
2 the keys are distributed over files by value, so equal keys are in the same file
3 each file is sorted; all items with equal keys except the first are marked
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.folder import write_record
from mega.core.files import whole_file

Keys = NDArray[np.uint64]
"""Keys as uint64 [items, 2]. An item whose key is zero never counts as a repetition."""

_KEYS_TOGETHER = 1 << 21
_MOST_FILES = 256
_MARKS, _BEGINS = "repeats.bin", "repeats.json"


def keys_of(items: Iterable[bytes | None]) -> Keys:
    """Compute a key for each item. The key of None is zero.

    >>> keys_of([b"a", None, b"a"]).tolist()[1:]
    [[0, 0], [9189440641721877287, 9099881824081077545]]
    """
    digests = [bytes(16) if item is None else hashlib.blake2b(item, digest_size=16).digest() for item in items]
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def mark_repeats(folder: Path, parts: Sequence[str]) -> None:
    """Mark repeated items, and write the marks to a file that `repeats` reads. Keys are read from the array `keys` in
    the notes of all parts. The first item with each key is not marked."""
    begins, total = {}, 0
    for part in parts:
        begins[part] = total
        total += len(notes(folder, part)["keys"])
    count = min(max(1, -(-total // _KEYS_TOGETHER)), _MOST_FILES)
    _distribute(folder, parts, [folder / f"keys-{i}.tmp" for i in range(count)])
    marks = np.zeros(total, np.bool_)
    for i in range(count):
        path = folder / f"keys-{i}.tmp"
        keyed_items = np.fromfile(path, "<u8").reshape(-1, 3)
        order = np.lexsort((keyed_items[:, 1], keyed_items[:, 0]))  # stable: items with equal keys stay in input order
        keyed_items = keyed_items[order]
        same = (
            (keyed_items[1:, 0] == keyed_items[:-1, 0])
            & (keyed_items[1:, 1] == keyed_items[:-1, 1])
            & keyed_items[1:, :2].any(1)
        )
        marks[keyed_items[1:, 2][same]] = True
        path.unlink()
    with whole_file(folder / _MARKS) as file:
        file.write(marks.tobytes())
    write_record(folder / _BEGINS, begins | {"": total})


def _distribute(folder: Path, parts: Sequence[str], paths: Sequence[Path]) -> None:
    with contextlib.ExitStack() as open_files:
        files = [open_files.enter_context(open(path, "wb")) for path in paths]
        begin = 0
        for part in parts:
            keys = notes(folder, part)["keys"]
            numbers = np.arange(begin, begin + len(keys), dtype=np.uint64)
            rows = np.column_stack([keys, numbers])
            owners = keys[:, 0] % np.uint64(len(paths))
            for i, file in enumerate(files):
                file.write(rows[owners == i].tobytes())
            begin += len(keys)


def notes(folder: Path, part: str) -> Mapping[str, NDArray[Any]]:
    """Read the arrays that the survey of an input part wrote."""
    arrays: Mapping[str, NDArray[Any]] = np.load(folder / f"{part}.npz", allow_pickle=False)
    return arrays


def repeats(folder: Path, part: str) -> NDArray[np.bool_]:
    """Return, for every item of an input part, whether an equal item precedes it in the input."""
    begins = json.loads((folder / _BEGINS).read_bytes())
    ends = sorted(begins.values())
    begin = begins[part]
    end = next((value for value in ends if value > begin), begin)
    with open(folder / _MARKS, "rb") as file:
        file.seek(begin)
        return np.frombuffer(file.read(end - begin), np.bool_)
