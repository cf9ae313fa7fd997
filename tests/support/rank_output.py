"""What local ranks print: into a file of the test.

All ranks that tests of a worker start are forked from one process, and print where it did when the first of them was
started. A new process for each command line, in which nothing is shared, would import torch twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from mega.core.processes import launch


@contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """Ranks that are started in this block append what they print, stderr too, to a file."""
    with mock.patch.object(launch, "_rank", partial(_printing_to, str(path))):
        yield


def _printing_to(path: str, *args: Any) -> None:
    """In the rank, where `launch` is not patched."""
    with open(path, "a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    launch._rank(*args)
