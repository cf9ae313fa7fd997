"""The tables of this package, TOML files in its folder, each of which is read on first use."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any


@functools.cache
def table(name: str) -> dict[str, Any]:
    """The content of `name`.toml, which callers must not change."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
