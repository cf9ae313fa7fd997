"""Write the tables of figures into the pages: `python docs/figures.py`. A test checks that the pages are up to date.

A table is a file in docs/results. Its rows have the keys `what`, `figure`, `unit`, `card`, `command` and `date` (the
date of the measured version). Additional figures of a row have their own keys. A row whose outcome is not one number
has the keys `what`, `result`, `command` and `date`. On a page, the table is between `<!-- results: NAME -->` and
`<!-- end -->`. A new figure is a new row, or replaces an old row. This script does not import `mega`.
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
    """Return the text of a cell. Numbers have thousands separators.

    >>> shown(216315), shown(2.5), shown(None)
    ('216,315', '2.5', '')
    """
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,}"


def table(rows: list[Row]) -> str:
    """Return rows as a Markdown table. A unit shared by all rows is in the header; a command equal to that of the row
    above is not repeated.

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
    """Return the Markdown lines of a table; an empty cell is a single space."""
    lines = ["|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:], ""])


def filled(page: str) -> str:
    """Return the text of a page with its tables regenerated."""

    def fill(match: re.Match[str]) -> str:
        rows = json.loads((DOCS / "results" / f"{match[2]}.json").read_text(encoding="utf-8"))
        return match[1] + table(rows) + match[3]

    return TABLE.sub(fill, page)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")
