"""A host whose rank kills it. Processes of a test import this, and not all that the test does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from mega.core.processes.hosts import supervise_hosts
from mega.core.processes.restarts import Job


def kills_its_host(place: str) -> int:
    """In the first attempt a rank kills what has launched it, as when its host is lost."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Path(f"{place}/attempt-{attempt}").touch()
    if attempt:
        return 0
    while not Path(f"{place}/spare").exists():
        time.sleep(0.01)
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.kill(parent.pid, signal.SIGKILL)  # type: ignore[arg-type]
    time.sleep(60)
    return 1


def one_host(place: str) -> None:
    job = Job(kills_its_host, lambda resumes: (place,), lambda: 0)
    sys.exit(supervise_hosts(1, 1, 1, 1.0, job))
