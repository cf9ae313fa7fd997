"""The site: each page is in its navigation once, links follow the pages, and it is built without a warning."""

from __future__ import annotations

import doctest
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.repository.test_pages import PAGES, REPOSITORY


def _site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", REPOSITORY / "docs/site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = _site()


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
