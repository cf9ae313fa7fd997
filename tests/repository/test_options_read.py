"""What a model is, is asked of its architecture: few places read options.

A place that reads an option of a model is `X.<option>`: <option> is a field of `ModelOptions`, and X is of that type,
or of `ModelConfig`, by its annotations: of parameters, of fields of classes, of what functions return, and of what is
assigned from these.
Where they say nothing, X counts if it is called `model`, unless it is the `.architecture` of something. So renaming
hides no place, and an `Architecture` that is called `model` is none.

Not counted: core/config, where options are defined, checked and resolved, and core/architecture/families, where they
become an architecture (at e85b399: core/inventory). `python tests/repository/test_options_read.py [FOLDER]` prints the
places of this tree, or of another one in FOLDER, room by room, those two as well.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.repository.test_structure import REPOSITORY, sources

OPTIONS = {"ModelOptions", "ModelConfig"}
"""As typed, and as resolved."""
ALLOWED = ("mega/core/config/", "mega/core/architecture/families/")
SPLIT = ("mega/core/architecture/", "mega/core/checkpoint/")
"""Rooms that are counted by their folders."""

MOST = 45
"""Places outside of those: messages that name an option, a run before it is resolved, the look-up of a family."""

Tree = Mapping[str, ast.Module]


class Declared:
    """What the annotations of a tree say: of fields and methods by class, of functions by name."""

    def __init__(self, tree: Tree) -> None:
        self.members: dict[str, dict[str, str]] = {}
        self.returns: dict[str, set[str]] = {}
        for module in tree.values():
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef):
                    self.members.setdefault(node.name, {}).update(_members(node))
            for node in module.body:
                if isinstance(node, ast.FunctionDef) and node.returns is not None:
                    self.returns.setdefault(node.name, set()).add(ast.unparse(node.returns))

    def member(self, of: str, name: str) -> str | None:
        """The type of `name` of an object whose type is written `of`."""
        for part in _names(of):
            if (found := self.members.get(part, {}).get(name)) is not None:
                return found
        return None

    def result(self, name: str) -> str | None:
        """What the only function, or class, of a name gives."""
        if name in self.members:
            return name
        found = self.returns.get(name, set())
        return next(iter(found)) if len(found) == 1 else None


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, ast.unparse(each.annotation)
        elif isinstance(each, ast.FunctionDef) and each.returns is not None:
            yield each.name, ast.unparse(each.returns)


def _names(annotation: str) -> list[str]:
    return [each.id for each in ast.walk(ast.parse(annotation)) if isinstance(each, ast.Name)]


class Reads(ast.NodeVisitor):
    """The places of one module."""

    def __init__(self, declared: Declared, options: frozenset[str]) -> None:
        self.declared, self.options = declared, options
        self.scopes: list[dict[str, str]] = [{}]
        self.places: list[tuple[int, str]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        known = {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation is not None}
        self.scopes.append({**known, **({"self": self.scopes[-1]["class"]} if "class" in self.scopes[-1] else {})})
        self.generic_visit(node)
        self.scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append({"class": node.name})
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.scopes[-1][node.target.id] = ast.unparse(node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if node.attr not in self.options or not isinstance(node.ctx, ast.Load):
            return
        kind = self._type(node.value)
        named = kind is None and isinstance(node.value, ast.Name | ast.Attribute) and _last(node.value) == "model"
        if named or (kind is not None and OPTIONS & set(_names(kind))):
            self.places.append((node.lineno, ast.unparse(node)))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _:
                kind = self._type(value)
                self.scopes[-1].pop(name, None)
                if kind is not None:
                    self.scopes[-1][name] = kind
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for each, its in zip(targets, values, strict=True):
                    self._assign(each, its)
            case ast.Tuple(elts=targets), _:
                kind = self._type(value)
                parts = _parts(kind) if kind is not None else []
                for number, each in enumerate(targets):
                    if isinstance(each, ast.Name):
                        self.scopes[-1].pop(each.id, None)
                        if number < len(parts):
                            self.scopes[-1][each.id] = parts[number]

    def _type(self, node: ast.expr) -> str | None:
        """How the type of an expression is written; None where nothing says it."""
        match node:
            case ast.Name(id=name):
                return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
            case ast.Attribute(value=value, attr=attr):
                of = self._type(value)
                found = None if of is None else self.declared.member(of, attr)
                return "Architecture" if found is None and attr == "architecture" else found
            case ast.Call(func=ast.Name(id="replace") | ast.Attribute(attr="replace"), args=[first, *_]):
                return self._type(first)
            case ast.Call(func=ast.Name(id=name)):
                return self.declared.result(name)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                of = self._type(value)
                return self.declared.result(attr) if of is None else self.declared.member(of, attr)
        return None


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _parts(annotation: str) -> list[str]:
    """Of a tuple's type those of its items."""
    node = ast.parse(annotation, mode="eval").body
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        return [ast.unparse(each) for each in node.slice.elts]
    return []


def option_names(tree: Tree) -> frozenset[str]:
    for node in ast.walk(tree["mega/core/config/sections.py"]):
        if isinstance(node, ast.ClassDef) and node.name in OPTIONS:
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            names = [each.target.id for each in fields if isinstance(each.target, ast.Name)]
            return frozenset(names) - {"title", "on_resume"}
    raise AssertionError(f"no {OPTIONS}")


def places(tree: Tree) -> dict[str, list[tuple[int, str]]]:
    """Path -> line and text of each place."""
    declared, options = Declared(tree), option_names(tree)
    found = {}
    for path, module in tree.items():
        reads = Reads(declared, options)
        reads.visit(module)
        found[path] = reads.places
    return found


def outside(found: Mapping[str, list[tuple[int, str]]]) -> list[str]:
    return [
        f"{path}:{line} {text}" for path, each in found.items() if not path.startswith(ALLOWED) for line, text in each
    ]


def test_few_places_read_options_of_a_model() -> None:
    found = outside(places(sources()))
    assert len(found) <= MOST, "\n".join(found)


def test_a_place_would_show() -> None:
    tree = {
        "mega/core/config/sections.py": ast.parse("class ModelConfig:\n    layers: int | None\n    hidden: int"),
        "mega/x.py": ast.parse(
            "class RunConfig:\n    model: ModelConfig\n"
            "class Stage:\n    model: Architecture\n"
            "def made(a) -> ModelConfig: ...\n"
            "def f(run: RunConfig, given: ModelConfig | None, stage: Stage, other):\n"
            "    run.model.layers, given.hidden, made(1).layers, other.model.layers\n"
            "    one, two = run.model, stage.model\n"
            "    one.layers, replace(one, layers=1).hidden\n"
            "    two.layers, stage.model.hidden, other.layers, run.layers\n"
        ),
    }
    texts = [text for _, text in places(tree)["mega/x.py"]]
    assert texts == [
        "run.model.layers",
        "given.hidden",
        "made(1).layers",
        "other.model.layers",
        "one.layers",
        "replace(one, layers=1).hidden",
    ]


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY
    paths = sorted((root / "mega").rglob("*.py"))
    tree = {str(path.relative_to(root)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    found = places(tree)
    rooms = Counter[str]()
    for path, each in found.items():
        for line, text in each:
            print(f"{path}:{line} {text}")
        room = path.rpartition("/")[0] if path.startswith(SPLIT) else "/".join(path.split("/")[:3])
        rooms[room] += len(each)
    for room, count in rooms.most_common():
        if count:
            print(f"{count:5} {room}")
    print(f"{sum(rooms.values()):5} all; {len(outside(found))} outside of {', '.join(ALLOWED)}")


if __name__ == "__main__":
    main()
