"""The site: each page is in its navigation once, links follow the pages, and it is built without a warning."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.repository.test_pages import PAGES, REPOSITORY, text_of


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", REPOSITORY / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE, FIGURES = _script("site"), _script("figures")


def _entries(navigation: Any) -> Iterator[str]:
    """The pages of a navigation, in its order."""
    if isinstance(navigation, str):
        yield navigation
    else:
        for entry in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from _entries(entry)


def test_each_page_is_in_the_navigation_once() -> None:
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {SITE.OUTSIDE.get(page, page.removeprefix("docs/")) for page in (*PAGES, *SITE.OUTSIDE)}
    assert sorted(_entries(settings["nav"])) == sorted(pages)
    assert [next(iter(part)) for part in settings["nav"]] == ["Start", "Guides", "Reference", "Figures", "Project"]


def test_examples_of_docstrings() -> None:
    assert doctest.testmod(SITE) == (0, 3)
    assert doctest.testmod(FIGURES) == (0, 3)


def test_tables_of_figures_are_those_of_the_rows() -> None:
    """`python docs/figures.py` changes no page. Each table of rows is on a page, except the recorded step times."""
    used = set()
    for page in PAGES:
        text = text_of(page)
        assert FIGURES.filled(text) == text, f"{page}: run python docs/figures.py"
        used |= {name for _, name, _ in FIGURES.TABLE.findall(text)}
    assert used == {path.stem for path in (REPOSITORY / "docs/results").glob("*.json")} - {"step_times"}


def test_rows_of_figures_are_complete() -> None:
    for path in (REPOSITORY / "docs/results").glob("*.json"):
        for row in json.loads(path.read_text(encoding="utf-8")):
            required = {"what", "result", "command", "date"} if "result" in row else set(FIGURES.FIXED)
            assert path.stem == "step_times" or required <= row.keys(), f"{path.name}: {row}"
            assert not row.get("date") or re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), f"{path.name}: {row}"


def test_figures_of_the_comparison_are_measured_ones() -> None:
    """Numbers of the README's table that compares are figures of docs/performance.md."""
    table = text_of("README.md").split("## How it compares")[1].split("\n\n")[1]
    numbers = re.findall(r"\| (\d[\d.,]*)", table)
    assert len(numbers) >= 4 and all(f"| {number}" in text_of("docs/performance.md") for number in numbers), numbers
    assert not re.search(r"commit|\b[0-9a-f]*\d[0-9a-f]*[a-f][0-9a-f]{6}\b", text_of("docs/performance.md"))


def test_text_of_a_page() -> None:
    text = "# A `b`\n[one](../README.md#x), [two](../mega), [three](#a-b)\n```\n# [c](../mega)\n```\n## D\n"
    assert SITE.site_text("docs/hub.md", text) == (
        "# A `b` { #a-b }\n[one](index.md#x), two, [three](#a-b)\n```\n# [c](../mega)\n```\n## D { #d }\n"
    )


def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="needs the extra docs: pip install '.[docs]'")
    (tmp_path / "docs").mkdir()
    shutil.copy(REPOSITORY / "mkdocs.yml", tmp_path)
    SITE.write_pages(tmp_path / "build/pages")
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    found = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0 and "No issues found" in found.stdout + found.stderr, found.stdout + found.stderr
    home = (tmp_path / "build/site/index.html").read_text(encoding="utf-8")
    assert "performance.html" in home and "fonts.googleapis" not in home
    # A link that leads nowhere is an error.
    (tmp_path / "build/pages/hub.md").write_text("# Hub\n[gone](gone.md), [none](serving.md#none)\n")
    assert subprocess.run(build, cwd=tmp_path, capture_output=True).returncode != 0
