"""Drawings: the text is the schedule, the files are whole."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega.core.plan import Costs, Plan, plan, simulate
from mega.core.plan.draw import draw, draw_text
from tests.plan.cases import WHOLE, computes, plans


def test_text_of_gpipe() -> None:
    assert draw_text(simulate(plan("gpipe", 2, 1, 2), WHOLE)).splitlines() == [
        "rank 0  F0 F1 ......B0 B1",
        "rank 1  ...F0 F1 B0 B1 ...",
        "gpipe: 2 stages, 1 chunks, 2 microbatches; length 6, bubble 33.3%, live microbatches 2",
    ]


def test_text_names_chunks() -> None:
    first = draw_text(simulate(plan("interleaved", 2, 2, 2), WHOLE)).splitlines()[0]
    assert first == "rank 0  F0a F1a F0b F1b ....B0b ....B1b B0a B1a"


@given(plans(), st.integers(20, 140))
def test_text_keeps_to_its_width_and_has_a_line_a_rank(made: Plan, width: int) -> None:
    lines = draw_text(simulate(made), width).splitlines()
    assert len(lines) == made.stages + 1
    assert max(map(len, lines[:-1])) <= width


def test_text_of_instant_acts_is_empty() -> None:
    assert draw_text(simulate(plan("1f1b", 2), Costs(0, 0, 0))).splitlines()[:2] == ["rank 0", "rank 1"]


def test_svg_has_a_titled_box_for_every_act(tmp_path: Path) -> None:
    made = plan("zb-h1", 3, 1, 4)
    draw(simulate(made), tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == sum(len(computes(made, rank)) for rank in range(3))
    assert titles[0] == "F0: 0 to 1"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.svg"]


def test_png_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(simulate(plan("interleaved", 2, 2, 4)), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
