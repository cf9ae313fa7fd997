"""The proof of a table: each way of losing or doubling an element is named."""

from __future__ import annotations

import math

import pytest
import torch

from mega.core.checkpoint.forms.mapping import (
    Fragment,
    Span,
    Table,
    Target,
    assemble,
    check_copies,
    inverted,
    prove,
    stacked,
    whole,
    whole_box,
)
from mega.core.checkpoint.own import container
from mega.core.checkpoint.own.pieces import Box, CheckpointError

F32 = torch.float32
SOURCE = {"a": ((4, 3), F32), "b": ((2,), F32)}
B = Target("y", (2,), (whole((2,), "b"),))


def made_of_a(*fragments: Fragment) -> Table:
    rows = sum(len(fragment.target_span.rows) for fragment in fragments)
    return Table((Target("x", (rows, 3), fragments), B))


def test_whole_strided_and_transposed_tables_pass() -> None:
    prove(Table((Target("x", (4, 3), (whole((4, 3), "a"),)), B)), SOURCE)
    prove(Table((Target("x", (3, 4), (whole((3, 4), "a", transposed=True),)), B)), SOURCE)
    prove(made_of_a(*stacked([("a", range(0, 4, 2)), ("a", range(1, 4, 2))], 3)), SOURCE)
    rows = range(4)
    halves = [
        Fragment("a", Span(rows, range(1)), Span(rows, range(2, 3))),
        Fragment("a", Span(rows, range(1, 3)), Span(rows, range(2))),
    ]
    prove(Table((Target("x", (4, 3), tuple(halves)), B)), SOURCE)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (made_of_a(*stacked([("a", range(4)), ("a", range(1))], 3)), "a .*used more than once"),
        (made_of_a(*stacked([("a", range(3))], 3)), "a .*1 rows .* are never used"),
        (made_of_a(*stacked([("a", range(1, 5))], 3)), "a .*rows range"),
        (Table((B,)), "a .*nothing is made of it"),
        (Table((Target("x", (4, 3), (whole((4, 3), "a"),)),)), "b .*nothing is made of it"),
        (Table((Target("x", (4, 3), (whole((4, 3), "c"),)), B)), "c: is missing"),
        (
            Table((Target("x", (6, 3), stacked([("h", range(2)), ("a", range(4))], 3)), B)),
            "a: is torch.float32, x is torch.float16",
        ),
        (Table((Target("x", (5, 3), stacked([("a", range(4))], 3)), B)), "x: 1 rows .* are never filled"),
        (Table((Target("x", (4, 2), stacked([("a", range(4))], 2)), B)), "a .*columns 2 to 3 are never used"),
    ],
)
def test_every_fault_is_named(table: Table, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        prove(table, {**SOURCE, "h": ((2, 3), torch.half)} if "float16" in words else SOURCE)


class Held:
    """Tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.held = tensors
        self.tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self.held[name][box.inside(Box((0,) * len(box.start), box.size))]


def everything(table: Table, source: Held) -> Held:
    return Held({each.name: assemble(each, whole_box(each.shape), source).clone() for each in table.targets})


def test_a_table_and_its_inverse_are_each_others_way_back() -> None:
    """Rows with strides, columns, a transposed matrix, copies and padding; in any rectangle."""
    turns = stacked([("pairs", range(odd, 8, 2)) for odd in (0, 1)], 3)
    sides = (
        Fragment("left", Span(range(2), range(3)), Span(range(3), range(2)), transposed=True),
        Fragment("right", Span(range(2), range(3, 5)), Span(range(2), range(2))),
    )
    tokens = stacked([("t0", range(4)), ("t1", range(2))], None)
    table = Table(
        (Target("turned", (8, 3), turns), Target("sides", (2, 5), sides), Target("tokens", (6,), tokens)),
        copies=(("sides", Fragment("again", Span(range(2), range(3)), Span(range(3), range(2)), transposed=True)),),
        padding={"t1": (range(2, 4), "tokens")},
    )
    shapes = {"turned": (8, 3), "sides": (2, 5), "tokens": (6,)}
    ours = Held({name: torch.arange(math.prod(shape)).view(shape) for name, shape in shapes.items()})
    prove(inverted(table), ours.tensors)
    theirs = everything(inverted(table), ours)
    assert theirs.held["pairs"][1].tolist() == [12, 13, 14] and theirs.held["t1"].tolist() == [4, 5, 5, 5]
    assert torch.equal(theirs.held["again"], theirs.held["left"])
    prove(table, theirs.tensors)
    check_copies(table, theirs)
    assert all(torch.equal(everything(table, theirs).held[name], ours.held[name]) for name in shapes)
    for start, size in (((1, 1), (5, 2)), ((3, 0), (2, 3)), ((7, 2), (1, 1))):
        box = Box(start, size)
        part = assemble(table.targets[0], box, theirs)
        assert torch.equal(part, ours.held["turned"][box.inside(Box((0, 0), (8, 3)))])
    theirs.held["again"][0, 0] += 1
    with pytest.raises(CheckpointError, match="again: differs from left"):
        check_copies(table, theirs)


def test_blocks_tile_a_rectangle_in_the_order_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "BLOCK", 40)
    for size in ((), (3,), (30,), (4, 3), (2, 25), (3, 2, 11), (1, 1, 50)):
        whole = torch.arange(math.prod(size)).view(size)
        box = Box((5,) * len(size), size)
        parts = list(container.blocks(box, 4))
        assert all(part.elements <= 10 for part in parts)
        assert torch.equal(torch.cat([whole[part.inside(box)].flatten() for part in parts]), whole.flatten())
