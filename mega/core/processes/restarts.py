"""Ranks that are started again after a failure, on one host; hosts.py does the same for several.

    1 an attempt        all ranks run until they have ended well, or one has not (launch.run_attempt)
    2 its ending        a mistake of the user, a loss that is not finite, a signal to stop are final: all else may pass
    3 restarts          are counted in a row since which no newer step was saved; --max-restarts limits them
    4 the next attempt  the same job, which resumes from the newest save

Torch's elastic agent is not used, although its rendezvous knows spare hosts. It restarts after any exit code that is
not 0, so a mistake in a flag would be repeated --max-restarts times; it counts restarts of weeks, not those without
progress; a SIGTERM to it kills ranks after 30 s and ends with 1, and SIGUSR1 and SIGHUP are not passed on, so a
scheduler's warning would lose the run; and each of its hosts would write its own table of failures where exit_reports
writes one line. What it would spare is small: the fork server, with torch imported, lives as long as the launcher, so
ranks that start again import nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mega.core.processes.exit_reports import write_error
from mega.core.processes.launch import INTERRUPTED, Ending, local_environments, own, run_attempt
from mega.core.processes.signals import heeded_signals
from mega.core.processes.world import LAUNCHED, MEMORY_FOLDER

PATIENCE = 0.2
"""Seconds that ranks whose peers have gone are given to end, before they are killed: nothing of theirs is wanted."""


@dataclass(frozen=True)
class Job:
    """What the ranks do. args: of `target`; resumes: whether a step was saved since the launch, so that the newest one
    counts. saved: the newest step; 0 is none. memory: whether the ranks are given a folder in memory. alike: what must
    be the same on all hosts, by names that a user knows."""

    target: Callable[..., int | None]
    args: Callable[[bool], tuple[object, ...]]
    saved: Callable[[], int]
    memory: bool = False
    alike: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Restarts:
    """The restarts of a job so far. limit: in a row without a newer save. began, saved: the steps that were saved at
    the launch, and at the newest restart. best: that, or what peers had in memory then. launched: time.monotonic() of
    this host at the launch."""

    limit: int
    began: int = 0
    saved: int = 0
    best: int = 0
    number: int = 0
    in_vain: int = 0
    launched: float = 0.0

    def after(self, saved: int, held: int = 0) -> Restarts | None:
        """The restarts of the next attempt; None where the limit is reached. held: in memory.

        >>> one = Restarts(limit=1).after(10)
        >>> one.in_vain, one.after(10), one.after(20).in_vain
        (1, None, 1)
        """
        newest = max(saved, held)
        in_vain = 0 if newest > self.best else self.in_vain
        if in_vain >= self.limit:
            return None
        best = max(newest, self.best)
        return replace(self, saved=saved, best=best, number=self.number + 1, in_vain=in_vain + 1)

    @classmethod
    def heard(cls, *, launched: float, **counts: int) -> Restarts:
        """From what another host has sent, whose clock is another one."""
        return cls(**counts, launched=time.monotonic() - launched)

    def sent(self) -> dict[str, float]:
        return {**asdict(self), "launched": time.monotonic() - self.launched}

    @property
    def resumes(self) -> bool:
        """Whether a step was saved since the launch."""
        return self.saved > self.began

    def restart(self, reason: str) -> str:
        """The line about the attempt that begins."""
        start = f"from step {self.best}" if self.best else "from the beginning"
        return f"restart {self.number}, {start} ({self.in_vain} of at most {self.limit} without a newer save): {reason}"

    def given_up(self, reason: str) -> str:
        """The line about the end of all attempts."""
        if not self.limit:
            return f"not started again, as --max-restarts is 0: {reason}"
        since = f"no step after {self.best} was saved" if self.best else "no step was saved"
        return f"gave up after {self.limit} restarts in a row in which {since} (--max-restarts): {reason}"


def at_launch(limit: int, saved: int, launched: float) -> Restarts:
    """At the launch."""
    return Restarts(limit, saved, saved, saved, launched=launched)


def note_step(folder: Path, step: int) -> None:
    """By a rank: this host's memory holds its copies of a step."""
    coming = folder / "step.new"
    coming.write_text(str(step))
    coming.rename(folder / "step")


def noted_step(folder: Path | None) -> int:
    """The newest step of which this host's memory holds copies; 0 is none."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "step").read_text()) if folder is not None else 0
    return 0


class Stopped(Exception):
    """A signal asks this process to stop while no rank of its own runs."""

    def __init__(self, number: int):
        self.code = 128 + number


def supervise(nproc: int, limit: int, job: Job) -> int:
    """Run a job on `nproc` local ranks, again after a failure that may pass; the exit code."""
    launched = time.monotonic()
    with heeding_signals(), memory(job) as folder:
        try:
            restarts = at_launch(limit, job.saved(), launched)
            while True:
                environments = [each | attempt_variables(restarts, folder) for each in local_environments(nproc)]
                ending = run_attempt(environments, job.target, job.args(restarts.resumes), patience=PATIENCE)
                assert ending is not None
                if ending.final:
                    return exit_code(ending)
                following = restarts.after(job.saved(), noted_step(folder))
                if following is None:
                    write_error(f"mega: {restarts.given_up(ending.reason)}\n")
                    return ending.code
                restarts = following
                write_error(f"mega: {restarts.restart(ending.reason)}\n")
        except Stopped as stopped:
            return stopped.code


def exit_code(ending: Ending) -> int:
    return 128 + signal.SIGINT if ending.code == INTERRUPTED else ending.code


def attempt_variables(restarts: Restarts, folder: Path | None) -> dict[str, str]:
    """What ranks know of restarts, mostly in torchrun's words."""
    found = {"TORCHELASTIC_RUN_ID": "mega", "TORCHELASTIC_RESTART_COUNT": str(restarts.number)}
    found[LAUNCHED] = repr(restarts.launched)
    return found if folder is None else {**found, MEMORY_FOLDER: str(folder)}


@contextlib.contextmanager
def heeding_signals() -> Iterator[None]:
    """Where no rank runs that a signal is passed on to, it raises Stopped."""

    def stop(number: int, _: object) -> None:
        for each in before:  # a second one would only break the way out
            signal.signal(each, lambda *_: None)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def memory(job: Job) -> Iterator[Path | None]:
    """The folder in memory of a job that wants one; it goes with this process, or with the next one to come here."""
    if not job.memory:
        yield None
        return
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    folder = place / f"mega-peers-{uuid.uuid4().hex}"
    folder.mkdir(mode=0o700)
    own(str(folder))
    try:
        yield folder
    finally:
        for number in heeded_signals():  # the run is over
            signal.signal(number, lambda *_: None)
        shutil.rmtree(folder, ignore_errors=True)
