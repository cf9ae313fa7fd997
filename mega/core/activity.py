"""What this process is doing, in plain attributes: a step sets them without a lock, a watching thread reads them.

One value a process, since a process is one rank. It knows no ranks and no training: code that does the work sets it,
and `processes/roll_call.py` reports it to ranks that wait.
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
"""The phases of a training. Other verbs have one phase, such as "serving"."""

PATIENT = frozenset({"building caches", "loading", "evaluating", "saving"})
"""Phases that may keep other ranks waiting for longer than a step does: disks and held-out sets have their own pace."""


@dataclass
class Activity:
    """phase: of TRAINING, or another verb's. step: the newest that was begun. act: of the pipeline's plan,
    the newest that was begun. moves: changes with every step, act and batch. writer: the thread that saves in the
    background, while it does. saved: the newest step that is saved, the seconds that it took, and time.monotonic() when
    it was. waited: seconds (`unqueued_time`) that the main thread has waited for other ranks, as far as its host does.
    began: when the process did, time.time()."""

    phase: str = "starting"
    step: int = 0
    act: Any = None
    moves: int = 0
    writer: int | None = None
    saved: tuple[int, float, float] | None = None
    waited: float = 0.0
    began: float = field(default_factory=time.time)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase, then in the one before again."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def worked(self) -> float:
        """Seconds, from any moment on, in which the main thread, which calls this, waited neither for other ranks nor
        for a core."""
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
    """time.monotonic() without the time in which this thread could have run and other work had its core.

    The system does not say the latter everywhere; Linux does.
    """
    file = _schedule(os.getpid(), threading.get_native_id())
    queued = 0 if file is None else int(os.pread(file, 100, 0).split()[1])
    return time.monotonic() - queued / 1e9


@cache
def _schedule(process: int, thread: int) -> int | None:
    """The kernel's figures of a thread, held open; None where there are none."""
    with contextlib.suppress(OSError):
        return os.open(f"/proc/{process}/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return None
