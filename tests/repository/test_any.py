"""Lines of mega/ that say `Any`, where mypy checks nothing: how many each room may have, and may only become less.

Counted is every line with the name `Any` of typing in code, once: annotations, also quoted ones, aliases and calls; not
imports, comments and texts. `python tests/repository/test_any.py` prints the places.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

MOST = {
    "command_line": 11,
    "commands": 3,
    "core": 16,
    "core/architecture": 4,
    "core/bench": 3,
    "core/checkpoint": 12,
    "core/config": 10,
    "core/corpus": 7,
    "core/data": 36,
    "core/estimate": 7,
    "core/inference": 35,
    "core/model": 8,
    "core/ops": 24,
    "core/parallel": 21,
    "core/processes": 21,
    "core/proof": 13,
    "core/report": 8,
    "core/tasks": 16,
    "core/text": 19,
    "core/training": 9,
    "mega": 3,
}
"""Room -> lines. Rooms that are not listed have none."""

_QUOTED = re.compile(r"[\w.\[\], |]*\bAny\b[\w.\[\], |]*")


def room_of(path: Path) -> str:
    """
    >>> room_of(Path("mega/core/data/gpt.py")), room_of(Path("mega/core/device.py")), room_of(Path("mega/cli.py"))
    ('core/data', 'core', 'mega')
    """
    folders = path.parts[1:-1]
    return "/".join(folders[:2] if folders[:1] == ("core",) else folders[:1]) or "mega"


def lines(tree: ast.AST) -> set[int]:
    """
    >>> sorted(lines(ast.parse("from typing import Any\\nx: Any = 1  # Any\\ny: 'list[Any]' = 'Any number'")))
    [2, 3]
    """
    return {
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and quoted(node.value))
    }


def quoted(text: str) -> bool:
    """Whether a text is a type that says Any.

    >>> quoted("dict[str, Any]"), quoted("Any number of rows")
    (True, False)
    """
    return _QUOTED.fullmatch(text) is not None and (text == "Any" or re.search(r"Any[\],|]", text) is not None)


def places() -> Iterator[tuple[str, Path, int]]:
    """Room, file and line."""
    for path in sorted((REPOSITORY / "mega").rglob("*.py")):
        inside = path.relative_to(REPOSITORY)
        for line in sorted(lines(ast.parse(path.read_text(encoding="utf-8")))):
            yield room_of(inside), inside, line


def test_no_room_says_any_more_often_than_it_did() -> None:
    found = Counter(room for room, _, _ in places())
    more = {
        room: f"{count} lines, at most {MOST.get(room, 0)}"
        for room, count in found.items()
        if count > MOST.get(room, 0)
    }
    assert more == {}, "say what the value is: a class, a Protocol, a TypedDict, Json of core/untrusted.py, or object"


def test_the_bound_of_all_rooms() -> None:
    assert sum(MOST.values()) <= 300


def test_no_other_name_stands_for_any() -> None:
    """An alias would hide it from the count, and from nobody else."""
    hidden = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in (REPOSITORY / "mega").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (
            isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name) and node.value.id == "Any"
        )
        or (isinstance(node, ast.ImportFrom) and any(name.name == "Any" and name.asname for name in node.names))
    ]
    assert hidden == []


if __name__ == "__main__":
    for room, path, line in places():
        print(f"{room}\t{path}:{line}")
