"""One thread for each process of the suite, whatever the user's environment says.

Threads of one operator wait for each other in loops. On tensors as small as ours this costs more than it brings; with
ranks that are as many as the cores, or more, it takes all of their time. tests/conftest.py imports this first: torch
and numpy read the variables when they are imported, and every process that a test starts inherits them.
"""

from __future__ import annotations

import os

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

os.environ.update(dict.fromkeys(VARIABLES, "1"))
