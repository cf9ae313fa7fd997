"""What this process is doing, in plain attributes: the training step sets them without a lock, and a watchdog thread
reads them.

There is one `Activity` per process, because a process is one rank. This module depends neither on ranks nor on
training: the working code sets the attributes, and `processes/roll_call.py` reports them to waiting ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

TRAINING = ("starting", "building caches", "loading", "compiling", "training", "evaluating", "saving", "ending")
"""The phases of a training run. Other subcommands have one phase, such as "serving"."""

PATIENT = frozenset({"building caches", "loading", "evaluating", "saving"})
"""Phases that may keep other ranks waiting for longer than a step: they read or write disks, or evaluate held-out
data."""


@dataclass
class Activity:
    """The current work of one process."""

    phase: str = "starting"
    """A phase in `TRAINING`, or the phase of another subcommand."""
    step: int = 0
    """The last step that has started."""
    act: Any = None
    """The last act (one entry of the pipeline's plan) that has started."""
    moves: int = 0
    """A counter that increases with each step, pipeline act and batch; while it increases, the process makes
    progress."""
    progress: str = ""
    """How far a long piece of work is, such as "2,000 of 9,000 samples are laid out"; empty otherwise."""
    writer: int | None = None
    """Native id of the thread that saves in the background; None if no save is in progress."""
    saved: tuple[int, float, float] | None = None
    """The last saved step, the duration of its save in seconds, and time.monotonic() at the end of the save."""
    waited: float = 0.0
    """Seconds (by `unqueued_time`) that the main thread has spent on the host waiting for other ranks."""
    began: float = field(default_factory=time.time)
    """time.time() at the start of the process."""

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase for a block; the previous phase is restored when the block ends, but not after an error,
        because the error's report names the phase.

        >>> activity = Activity()
        >>> with contextlib.suppress(OSError), activity.during("saving"):
        ...     raise OSError
        >>> activity.phase
        'saving'
        """
        previous, self.phase = self.phase, phase
        yield
        self.phase = previous

    def worked(self) -> float:
        """Seconds (since an arbitrary start) in which the main thread waited neither for other ranks nor for a core.

        Must be called on the main thread.
        """
        return unqueued_time() - self.waited

    def __str__(self) -> str:
        """
        >>> from mega.core.plan.types import Compute
        >>> str(Activity("training", 7, Compute("B", 2, 0))), str(Activity("saving", 7, Compute("B", 2, 0)))
        ('training, step 7, act B of microbatch 2', 'saving, step 7')
        >>> str(Activity("loading"))
        'loading'
        """
        text = f"{self.phase}, step {self.step}" if self.step else self.phase
        microbatch = getattr(self.act, "microbatch", None)
        if self.phase == "training" and microbatch is not None:
            text += f", act {self.act.kind} of microbatch {microbatch}"
        return text


ACTIVITY = Activity()


def unqueued_time() -> float:
    """time.monotonic() minus the time in which this thread was runnable but had no core.

    Only Linux reports that time; on other systems nothing is subtracted.
    """
    file = _schedule(os.getpid(), threading.get_native_id())
    queued = 0 if file is None else int(os.pread(file, 100, 0).split()[1])
    return time.monotonic() - queued / 1e9


@cache
def _schedule(process: int, thread: int) -> int | None:
    """Open the kernel's scheduling statistics of a thread and keep the file open; None if the system has no such
    file."""
    with contextlib.suppress(OSError):
        return os.open(f"/proc/{process}/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return None
