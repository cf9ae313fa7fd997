"""What is installed and how: no hint names a package of the public index that is a stranger's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import mega

ROOT = Path(mega.__file__).parents[1]
STRANGER = re.compile(r"pip install[^\n]*?[ '\"]mega(-lm)?(\[|\b(?!/))(?!-)")
"""`pip install mega`, `'mega[serve]'` and the like; until it is published `mega-lm` too."""


def test_no_hint_installs_a_strangers_package() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Dockerfile", "run")]
    pages += [*(ROOT / "mega").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    found = [f"{page.relative_to(ROOT)}: {hit[0]}" for page in pages for hit in STRANGER.finditer(page.read_text())]
    assert found == []


def test_the_pattern_finds_what_it_is_for() -> None:
    for line in (
        "pip install mega",
        "pip install 'mega[serve]'",
        'pip install "mega-lm[serve]"',
        "pip install -U mega",
    ):
        assert STRANGER.search(line)
    for line in ("pip install '.[serve]' in a clone", "pip install '/path/to/clone[serve]'", "pip install torch"):
        assert not STRANGER.search(line)


def test_the_distribution_has_a_name_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "mega-lm" and project["scripts"]["mega"] == "mega.cli:main"


def test_the_source_distribution_is_listed() -> None:
    """What is in it does not depend on what else lies in the tree, and all that is listed is there."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    listed = hatch["sdist"]["only-include"]
    assert {"mega", "tests", "README.md", "LICENSE"} <= set(listed) and "only-include" in hatch["sdist"]
    assert all((ROOT / name).exists() for name in listed)
