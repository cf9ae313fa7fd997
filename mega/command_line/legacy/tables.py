"""The tables of this package, TOML files next to it, each read when it is first asked for."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any


@functools.cache
def table(name: str) -> dict[str, Any]:
    """`name`.toml of this package; not to be changed."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
