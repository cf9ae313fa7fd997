"""Identify the code of this process, because ranks with different code compute different results. This module does not
import torch."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import mega


def code() -> dict[str, str]:
    return {"the version of mega": f"{mega.__version__} ({_source()[:8]})"}


@cache
def _source() -> str:
    """Return a hash of all source files of the package, with their paths."""
    root, digest = Path(mega.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
