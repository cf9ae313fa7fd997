"""The worked examples in the docstrings of the config room and the command line are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

OTHERS = ["mega.core.processes.world", "mega.core.words"]
ROOM = "check check_files compose families option page presets resolve run sections toml unread"


@pytest.mark.parametrize(
    "name", [*(f"mega.core.config.{name}" for name in ROOM.split()), "mega.command_line.argv", "mega.cli", *OTHERS]
)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
