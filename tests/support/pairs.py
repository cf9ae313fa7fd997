"""GLUE's tables cut in two by a fixed hash of the pair: what is trained on, and what is judged, always alike."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mega.core.files import whole_file

COLUMNS = {"mnli": (8, 9), "qqp": (3, 4)}
"""Task -> where the two texts stand."""

JUDGED_OF_TEN = 2


def judged(task: str, line: str, byte: int = 0) -> bool:
    """Whether a row is of the fifth that is judged: a function of its two texts alone. byte: of their hash."""
    columns = line.split("\t")
    texts = "\t".join(columns[at] for at in COLUMNS[task] if at < len(columns))
    return hashlib.sha256(texts.encode()).digest()[byte] % 10 < JUDGED_OF_TEN


def lines(table: Path) -> list[str]:
    """The header and every row; a row may hold characters at which Python would cut lines."""
    return [line for line in table.read_text(encoding="utf-8").split("\n") if line]


def split_pairs(task: str, table: Path, folder: Path, limit: int | None = None, byte: int = 0) -> tuple[Path, Path]:
    """train.tsv and dev.tsv of a table, each under its header line. limit: take so many rows only. byte: `judged`'s.

    The parts are whole at any time, for other processes may be reading them.
    """
    header, *rows = lines(table)
    folder.mkdir(parents=True, exist_ok=True)
    parts = folder / "train.tsv", folder / "dev.tsv"
    for path, wanted in zip(parts, (False, True), strict=True):
        chosen = [row for row in rows[:limit] if judged(task, row, byte) == wanted]
        with whole_file(path) as file:
            file.write(("\n".join([header, *chosen]) + "\n").encode())
    return parts
