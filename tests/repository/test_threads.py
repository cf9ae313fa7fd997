"""A process of the suite has one thread for an operator, whatever the user's environment says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.threads import VARIABLES

PROGRAM = """
import tests.conftest
import torch
from mega.core.processes.connect import threads
print(torch.get_num_threads(), threads(1), torch.__config__.parallel_info())
"""


def test_the_threads_of_a_user_are_not_those_of_the_suite() -> None:
    """Neither torch's, nor those of the libraries under it, nor those of ranks that it starts."""
    command, root = [sys.executable, "-c", PROGRAM], Path(__file__).resolve().parents[2]
    users = dict.fromkeys(VARIABLES, "2")
    told = subprocess.run(command, cwd=root, env={**os.environ, **users}, capture_output=True, text=True, check=True)
    assert told.stdout.startswith("1 1 "), told.stdout
    assert set(re.findall(r"_max_threads\(\) : (\d+)", told.stdout)) == {"1"}, told.stdout
