"""`mega parity`: names of layouts, the list that is proven, and what ends with exit 1 or a clear line."""

from __future__ import annotations

import doctest
import json
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.training import layouts as module
from mega.core.training import parity
from mega.core.training.layouts import QUICK, Layout, every_layout


def test_worked_examples() -> None:
    assert doctest.testmod(module).failed == 0


def test_names_read_back() -> None:
    for layout in [*every_layout(), *QUICK, Layout(), Layout(pp=2, chunks=2, zero=1), Layout(cp=2, ring=True)]:
        assert Layout.parse(layout.name) == layout


def test_the_list_is_complete() -> None:
    """tp, pp in {1, 2, 4} x dp in {1, 2}, at most 8 ranks, without the single rank; cp beside each axis."""
    listed = [layout for layout in every_layout() if layout.cp == 1]
    grids = {(one.tp, one.pp, one.dp) for one in listed}
    assert len(grids) == 13 and len(listed) == len(set(listed)) == 40
    assert all(Layout(tp=tp, pp=pp, dp=dp, sp=True) in listed for tp, pp, dp in grids if tp > 1)
    assert all(Layout(tp=tp, pp=pp, dp=dp, zero=1) in listed for tp, pp, dp in grids if dp > 1)
    across = [layout for layout in every_layout() if layout.cp > 1]
    assert {layout.ring for layout in across} == {True, False} and {layout.cp for layout in across} == {2, 4}
    for axis in ("tp", "pp", "dp"):
        assert any(getattr(layout, axis) > 1 for layout in across), axis
    for layout in every_layout():
        layout.run("gpt", "fp64"), layout.run("llama", "fp32")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("foo", "--layouts foo: not a layout"),
        ("tp2,,pp2", "--layouts : not a layout"),
        ("tp4pp4", "--layouts tp4pp4: 16 ranks (valid: 1 to 8"),
        ("tp3", "--layouts tp3: --heads 8: must be divisible by --tp 3"),
        ("pp8", "--layouts pp8: --layers 4: must be divisible by --pp 8"),
        ("dp3", "--layouts dp3: --global-batch 8"),
        ("tp0", "--layouts tp0: not a layout"),
    ],
)
def test_bad_layouts(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--layouts", text]) == 2
    assert says in capsys.readouterr().err


def test_one_layout_equals_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """The verb itself, with the whole vocabulary."""
    assert main(["parity", "--layouts", "tp2sp", "--family", "gpt", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert row["fine"] and row["layout"] == "tp2sp" and row["loss"] < 1e-12
    assert 0 < max(row["gradients"]) < 1e-10


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every layout is found equal."""
    same = [parity.Difference(step, 0.0, 0.0, 0.0, "grads/model.norm.weight") for step in module.STEPS]
    monkeypatch.setattr(parity, "snapshots", lambda *_: None)
    monkeypatch.setattr(parity, "compare", lambda *_: same)
    return monkeypatch


def test_the_table(without_ranks: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity"]) == 0
    told = capsys.readouterr().out
    assert "110 of 110 layouts are within the bounds" in told and "tp2pp2dp2sp-zero1" in told


def test_beyond_the_bounds(without_ranks: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    far = [parity.Difference(step, 0.0, 2e-10 * step, 2.0 * step, "grads/model.norm.weight") for step in module.STEPS]
    without_ranks.setattr(parity, "compare", lambda *_: far)
    assert main(["parity", "--layouts", "tp2"]) == 1
    told = capsys.readouterr().out
    assert "NOT EQUAL" in told and "model.norm.weight" in told and "0 of 2" in told


def test_a_layout_that_fails_is_a_row(without_ranks: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are still proven."""

    def snapshots(pool: Any, run: Any, world: int, steps: Any) -> None:
        if world == 2:
            raise RuntimeError("rank 1 of 2: trace\nmodel.norm.weight: replicas differ")

    without_ranks.setattr(parity, "snapshots", snapshots)
    assert main(["parity", "--layouts", "tp2,tp4", "--family", "gpt", "--json"]) == 1
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["problem"] == "model.norm.weight: replicas differ" and not first["fine"]
    assert second["fine"]


def test_bounds_of_the_steps() -> None:
    """A share of 1 of what is allowed is the last that is fine; NaN never is."""

    def fine(dtype: str, step: int, gradient: float, loss: float = 0.0) -> bool:
        one = torch.ones(1, dtype=torch.float64)
        error, share = parity.Measure(one, None, parity.gradient_bound(dtype, step), 0.0)(one + gradient)
        return parity.within(dtype, parity.Difference(step, loss, error, share, ""))

    assert fine("fp64", 1, 0.9e-10) and not fine("fp64", 10, 1.1e-10)
    assert fine("fp32", 10, 1.9e-4) and not fine("fp32", 1, 2e-4)
    assert not fine("fp64", 1, 0.0, 1.1e-12)
    assert not fine("fp64", 1, float("nan")) and not fine("fp64", 1, 0.0, float("nan"))


def test_where_the_reference_is_rounding_fp64_judges() -> None:
    """Zero in theory: noise of the reference's own size is fine, more is not. Accurate: nothing is let pass."""
    noise, zero = torch.tensor([3e-8, -1e-8]), torch.zeros(2, dtype=torch.float64)
    measure = parity.Measure(noise, zero, 1e-5, 1e-6)
    assert measure(torch.tensor([-5.9e-8, 0.0]))[1] < 1 < measure(torch.tensor([-6.1e-8, 0.0]))[1]
    assert measure(torch.tensor([0.0]), start=(1,))[1] == 0.0
    accurate = parity.Measure(torch.ones(2), torch.ones(2, dtype=torch.float64) + 1e-7, 1e-5, 1e-6)
    assert accurate(torch.ones(2) + 2e-5)[1] > 1
    assert accurate(torch.tensor([1.0, float("nan")]))[1] != 0.0
