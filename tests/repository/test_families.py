"""Code asks a model what it is, never what its family is called: core/family.py and the families' own files alone do.

Counted: a comparison of a family with the name of one, and a test of `decoder_layers`, which asks "is it T5?". What a
family has is a field of its record (core/family.py, config/presets.py), of its architecture, or of a table of a form.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mega.core.config.presets import FAMILY_DEFAULTS
from tests.repository.test_structure import sources

OWN = ("mega/core/family.py", "mega/core/architecture/families/")
NAMED = {"DECODERS", "MASKED"}
"""Constants that hold names of families."""


def of_family(node: ast.AST) -> bool:
    """Whether an expression is the family of something."""
    match node:
        case ast.Attribute(attr="family") | ast.Name(id="family"):
            return True
        case ast.Subscript(slice=ast.Constant(value="family" | "--family")):
            return True
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="family" | "--family"), *_]):
            return True
    return False


def names_one(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str() as value):
            return value in FAMILY_DEFAULTS
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in NAMED
    return False


def decided_by(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions whose truth decides something, or that are compared."""
    match node:
        case ast.Compare():
            yield from (node.left, *node.comparators)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
            yield test
        case ast.BoolOp(values=values):
            yield from values
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.comprehension(ifs=ifs):
            yield from ifs


def comparisons(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        inside = list(ast.walk(node)) if isinstance(node, ast.Compare | ast.Match) else []
        by_name = any(map(of_family, inside)) and any(map(names_one, inside))
        by_stack = any(isinstance(each, ast.Attribute) and each.attr == "decoder_layers" for each in decided_by(node))
        if by_name or by_stack:
            yield f"{path}:{getattr(node, 'lineno', 0)}"


def test_no_code_asks_for_a_family_by_name() -> None:
    found = {where for path, tree in sources().items() if not path.startswith(OWN) for where in comparisons(path, tree)}
    assert sorted(found) == []


def test_one_would_show() -> None:
    lines = (
        'if run.model.family in ("bert", "t5"): pass',
        'yes = options["family"] != "t5"',
        "two = model.family in MASKED",
        "if model.decoder_layers and x: pass",
        "y = 1 if model.decoder_layers is None else 2",
    )
    for line in lines:
        assert list(comparisons("mega/x.py", ast.parse(line))), line
    for line in ("FAMILIES[model.family].stacks > 1", "model.family in FAMILIES", 'sample_kind == "bert"'):
        assert not list(comparisons("mega/x.py", ast.parse(line))), line
