"""The header of a room says what each of its modules is for, so that none is added without a word."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mega"
ONE_KIND = {"commands", "core/architecture/families", "core/ops/kernels", "core/tasks/benchmarks", "core/data/formats"}
"""Rooms of one file a verb, a family, a kernel, a benchmark, a format: their names say what they are."""
ROOMS = [
    room for room in sorted(each.parent for each in PACKAGE.rglob("__init__.py")) if len(list(room.glob("*.py"))) > 3
]


@pytest.mark.parametrize("room", [str(room.relative_to(PACKAGE)) for room in ROOMS])
def test_a_header_names_every_module(room: str) -> None:
    header = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    assert header, "a room without a header"
    if room in ONE_KIND:
        return
    inside = [each for each in (PACKAGE / room).iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()]
    names = {each.stem for each in inside if not each.stem.startswith("__")}
    assert not {name for name in names if not re.search(rf"\b{name}\b", header)}
