"""Writes the tables of figures into the pages: `python docs/figures.py`. A test compares the pages with it.

A table is a file of docs/results: rows with `what`, `figure`, `unit`, `card`, `command` and `date` (the day of the
measured version). More figures of a row have their own names. A row whose outcome is not one number has `what`,
`result`, `command` and `date`. A page has the table between `<!-- results: NAME -->` and `<!-- end -->`. A new
figure is a new row, or replaces one. This script imports nothing of `mega`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
FIXED = ("what", "figure", "unit", "card", "command", "date")
TABLE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def shown(value: Any) -> str:
    """A cell: numbers with separators of thousands.

    >>> shown(216315), shown(2.5), shown(None)
    ('216,315', '2.5', '')
    """
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,}"


def table(rows: list[Row]) -> str:
    """Rows as Markdown. A unit that all rows have is in the head; the command of the row above is not repeated.

    >>> row = {"what": "a", "figure": 1000, "unit": "s", "card": "H100", "command": "mega bench w1", "date": ""}
    >>> print(table([row]))
    | what | s | card | command |
    |---|---|---|---|
    | a | 1,000 | H100 | `mega bench w1` |
    <BLANKLINE>
    """
    if "result" in rows[0]:
        head = ["what", "result", "command"]
        return _lines(head, ([str(row[name] or "") for name in head] for row in rows))
    units = {row["unit"] for row in rows}
    unit = str(units.pop()) if len(units) == 1 else None
    more = list(dict.fromkeys(name for row in rows for name in row if name not in FIXED))
    cells, above = [], None
    for row in rows:
        figure = shown(row["figure"]) + ("" if unit else f" {row['unit']}")
        command = "the same" if row["command"] == above else f"`{row['command']}`"
        above = row["command"]
        cells.append([str(row["what"]), figure, *(shown(row.get(name)) for name in more), str(row["card"]), command])
    return _lines(["what", unit or "figure", *more, "card", "command"], cells)


def _lines(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table of cells; an empty one is a single blank."""
    lines = ["|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:], ""])


def filled(page: str) -> str:
    """The text of a page with its tables written again."""

    def fill(match: re.Match[str]) -> str:
        rows = json.loads((DOCS / "results" / f"{match[2]}.json").read_text(encoding="utf-8"))
        return match[1] + table(rows) + match[3]

    return TABLE.sub(fill, page)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")
