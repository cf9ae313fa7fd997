"""Archives of the shared data, unpacked by any Python that the project runs on."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

_SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python before 3.11.4 has no filters."""


def unpack(archive: tarfile.TarFile, folder: Path, name: str | None = None) -> None:
    """A member by its name, or all."""
    if name is None:
        archive.extractall(folder, **_SAFELY)
    else:
        archive.extract(name, folder, **_SAFELY)
