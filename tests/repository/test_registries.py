"""What no import shows: a module that is loaded by its name. It is of the room that names it, never of one above."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.repository.test_structure import sources


def room(module: str) -> str:
    """
    >>> room("mega.core.tasks.labels"), room("mega.commands.eval")
    ('mega.core.tasks', 'mega.commands')
    """
    return ".".join(module.split(".")[: 3 if module.startswith("mega.core.") else 2])


def named_modules(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Place and module of every string of `path` that names a module of another room."""
    own = room(path.removesuffix(".py").replace("/", "."))
    for node in ast.walk(tree):
        named = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if re.fullmatch(r"mega(\.[a-z_0-9]+)+\.?", named) and room(named.rstrip(".")) != own:
            yield f"{path}:{node.lineno}", named


def test_no_string_names_a_module_of_another_room() -> None:
    inside = [each for each in sources().items() if each[0].startswith("mega/core/")]
    found = [named for path, tree in inside for named in named_modules(path, tree)]
    assert found == []


def test_one_would_show() -> None:
    tree = ast.parse('MODULES = {"mnli": "mega.core.tasks.mnli", "lm": "mega.core.training.kinds.pretraining"}')
    assert list(named_modules("mega/core/training/kinds/__init__.py", tree)) == [
        ("mega/core/training/kinds/__init__.py:1", "mega.core.tasks.mnli")
    ]
