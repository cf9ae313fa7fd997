"""The order of test files names files that exist, and puts the long ones first."""

from __future__ import annotations

from pathlib import Path

from tests.support.order import LONG, TESTS, rank


def test_long_files_exist_and_come_first() -> None:
    assert len(set(LONG)) == len(LONG) and [name for name in LONG if not (TESTS / name).is_file()] == []
    assert [rank(TESTS / name) for name in LONG] == list(range(len(LONG)))
    assert rank(Path(__file__)) == rank(Path("/elsewhere/test_x.py")) == len(LONG)
