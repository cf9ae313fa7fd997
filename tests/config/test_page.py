"""docs/configuration.md is what the sections say."""

from __future__ import annotations

from pathlib import Path

from mega.core.config.page import page
from mega.core.config.run import entries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run: python -m mega.core.config.page > docs/configuration.md"


def test_every_option_has_a_row_of_its_own() -> None:
    for entry in entries().values():
        (row,) = [line for line in page().splitlines() if line.startswith(f"| `{entry.flag}`")]
        assert f"`{entry.name}`" in row and f"| {entry.option.on_resume} |" in row
        assert all(f"`{spelling}" in row for spelling in entry.option.megatron)
