"""A run is made once, by `resolve`: no code replaces a value in it, nor in options but by `updated`.

A place is `replace(X, ...)` where X is a `RunConfig` or `Options` by its annotations (as test_options_read.py reads
them), or a section of one, as in `replace(run.model, ...)`. Run as a script, it prints the places of this tree, or of
the one in the folder that is named.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.repository.test_options_read import Declared, Reads, Tree
from tests.repository.test_structure import REPOSITORY, sources

RUNS = {"Options", "RunConfig"}
OF_KIND = "of_kind("
"""The estimate takes layers of one kind as a model of these alone: another model, not a patch."""
MAKERS = ("mega/core/config/run.py", "mega/core/config/resolve.py")


class Patches(Reads):
    """The places of one module."""

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "replace" and node.args and self._of_run(node.args[0]):
            self.places.append((node.lineno, ast.unparse(node)))

    def _of_run(self, node: ast.expr) -> bool:
        """Whether it is a run, or a section that is read from one."""
        kinds = [self._type(node), self._type(node.value) if isinstance(node, ast.Attribute) else None]
        return any(kind in RUNS for kind in kinds)


def patches(tree: Tree) -> list[str]:
    declared, found = Declared(tree), list[str]()
    for path, module in tree.items():
        seen = Patches(declared, frozenset())
        seen.visit(module)
        found += [f"{path}:{line} {text}" for line, text in seen.places if path not in MAKERS]
    return found


def test_no_run_is_patched() -> None:
    assert [place for place in patches(sources()) if OF_KIND not in place] == []


def test_a_place_would_show() -> None:
    text = (
        "class RunConfig:\n    model: ModelConfig\n"
        "def f(run: RunConfig, other):\n"
        "    replace(run, model=1), dataclasses.replace(run.model, layers=1), replace(other, model=1)\n"
    )
    assert [place.partition(" ")[2] for place in patches({"mega/x.py": ast.parse(text)})] == [
        "replace(run, model=1)",
        "dataclasses.replace(run.model, layers=1)",
    ]


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY
    tree = {
        str(path.relative_to(root)): ast.parse(path.read_text("utf-8")) for path in sorted(root.glob("mega/**/*.py"))
    }
    found = patches(tree)
    print(*found, f"{len(found)} in all", sep="\n")


if __name__ == "__main__":
    main()
