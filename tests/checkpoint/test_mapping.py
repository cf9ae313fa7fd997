"""The proof of a table: each way of losing or doubling an element is named."""

from __future__ import annotations

import math

import pytest
import torch

from mega.core.checkpoint.forms.mapping import Fragment, Table, Target, prove, stacked, whole
from mega.core.checkpoint.own import container
from mega.core.checkpoint.own.pieces import Box, CheckpointError

F32 = torch.float32
SOURCE = {"a": ((4, 3), F32), "b": ((2,), F32)}
B = whole("y", "b", (2,), F32)


def made_of_a(*fragments: Fragment) -> Table:
    rows = sum(len(fragment.rows) for fragment in fragments)
    return Table((Target("x", (rows, 3), F32, fragments), B))


def test_whole_strided_and_transposed_tables_pass() -> None:
    prove(Table((whole("x", "a", (4, 3), F32), B)), SOURCE)
    prove(Table((whole("x", "a", (3, 4), F32, transposed=True), B)), SOURCE)
    prove(made_of_a(*stacked([("a", range(0, 4, 2)), ("a", range(1, 4, 2))], 3)), SOURCE)
    halves = [Fragment("a", Box((0, 0), (4, 1)), range(4), 2), Fragment("a", Box((0, 1), (4, 2)), range(4), 0)]
    prove(Table((Target("x", (4, 3), F32, tuple(halves)), B)), SOURCE)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (made_of_a(*stacked([("a", range(4)), ("a", range(1))], 3)), "a .*used more than once"),
        (made_of_a(*stacked([("a", range(3))], 3)), "a .*1 rows .* are never used"),
        (made_of_a(*stacked([("a", range(1, 5))], 3)), "a .*rows range"),
        (Table((B,)), "a .*nothing is made of it"),
        (Table((whole("x", "a", (4, 3), F32),)), "b .*nothing is made of it"),
        (Table((whole("x", "c", (4, 3), F32), B)), "c: is missing"),
        (Table((whole("x", "a", (4, 3), torch.half), B)), "a: is torch.float32, x is torch.float16"),
        (Table((Target("x", (5, 3), F32, stacked([("a", range(4))], 3)), B)), "x: a gap"),
        (Table((Target("x", (4, 2), F32, stacked([("a", range(4))], 2)), B)), "a .*columns 2 to 3 are never used"),
    ],
)
def test_every_fault_is_named(table: Table, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        prove(table, SOURCE)


def test_blocks_tile_a_rectangle_in_the_order_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "BLOCK", 40)
    for size in ((), (3,), (30,), (4, 3), (2, 25), (3, 2, 11), (1, 1, 50)):
        whole = torch.arange(math.prod(size)).view(size)
        box = Box((5,) * len(size), size)
        parts = list(container.blocks(box, 4))
        assert all(part.elements <= 10 for part in parts)
        assert torch.equal(torch.cat([whole[part.inside(box)].flatten() for part in parts]), whole.flatten())
