"""No file is forced to the disk: os.fsync checks its argument and returns, in the suite's workers and in their ranks.

A process that is killed loses nothing that it has written; only a power cut loses what was not forced to the disk, and
no test can make one. What is forced, and in which order, is proven by a test that watches the calls
(checkpoint/test_store.py). Tests of corpora wait half of their time for the disk otherwise.
"""

from __future__ import annotations

import os
from typing import IO, Any


def _checked(file: int | IO[Any]) -> None:
    os.fstat(file if isinstance(file, int) else file.fileno())


os.fsync = _checked
