"""Each recipe is a run that is accepted as it is, its plan proven; the line in its header is one that starts it.

Only plans are made here, in milliseconds. `python -m tests.battery.recipes` renews what the headers say of costs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mega.api.estimation import planned
from mega.core.config.resolve import microbatches
from mega.core.config.run import updated
from mega.core.plan import plan, prove
from tests.battery.recipes import COST, RECIPES, options_of, world_of
from tests.repository import test_pages

FILES = sorted(RECIPES.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_recipe_is_a_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    run, world = planned(updated(options_of(path), {"world": world_of(text)}))
    prove(plan(run.parallel.schedule, run.parallel.pp, run.parallel.chunks, microbatches(run, world)))
    line = "".join(re.findall(r"^#     (.*)$", text, re.MULTILINE)).replace("\\", " ")
    assert f"--config {path.relative_to(test_pages.REPOSITORY)} " in line
    test_pages.test_the_line_parses(line)
    assert re.search(r"^# Expected loss: .+", text, re.MULTILINE) and len(COST.findall(text)) == 1


def test_all_are_listed() -> None:
    page = (test_pages.REPOSITORY / "recipes/README.md").read_text(encoding="utf-8")
    assert [path.name for path in FILES] == sorted(re.findall(r"\[[\w-]+\.toml\]\(([\w-]+\.toml)\)", page))
    assert len(FILES) >= 11
