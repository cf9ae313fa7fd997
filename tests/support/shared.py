"""Where the tests find real data. It is never part of the repository, so a test that needs it may skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def shared(path: str) -> Path:
    """The file `path` of the shared data ($MEGA_SHARED_DATA, else ../shared/data), or a skip saying why."""
    root = Path(os.environ.get("MEGA_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    found = root / path
    if not found.exists():
        pytest.skip(f"no shared data: {found} does not exist (set MEGA_SHARED_DATA)")
    return found
