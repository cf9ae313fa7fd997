"""Read GLUE's files (Wang et al. 2018), which have tab-separated columns, one header line and no quoting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

Lines = Iterator[tuple[str, list[str]]]


def table(flag: str, path: Path) -> tuple[list[str], Lines]:
    """Return the column names in the header, and pairs (location, columns) for all other lines.

    Errors: ValueError if the file is empty, not UTF-8, or has only a header.
    """
    if not path.is_file():
        raise ValueError(f"{flag} {path}: is a folder; give its .tsv file")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path}: not UTF-8 at byte {error.start}") from None
    if not any(lines):
        raise ValueError(f"{flag} {path}: is empty")
    if not any(lines[1:]):
        raise ValueError(f"{flag} {path}: holds a header and no row")
    return _columns(lines[0]), _rows(f"{flag} {path}", lines[1:])


def _rows(source: str, lines: list[str]) -> Lines:
    return ((f"{source}:{line_number}", _columns(line)) for line_number, line in enumerate(lines, 2) if line.strip())


def _columns(line: str) -> list[str]:
    return line.removesuffix("\r").split("\t")


def number(location: str, column: str) -> int:
    """Parse a row number. Errors: ValueError if the number is not a non-negative integer."""
    if not column.strip().isdecimal():
        raise ValueError(f"{location}: the first column is {column.strip()!r}; must be the row's number, at least 0")
    return int(column)
