"""Restarts of ranks after a failure on one host. The module `hosts` implements restarts on several hosts.

    1 an attempt        all ranks run until all have succeeded, or one has failed (launch.run_attempt)
    2 its ending        final for a user error, a loss that is not finite, or a signal to stop; otherwise possibly
                        transient
    3 restarts          counted since the newest saved step, so --max-restarts limits restarts without progress
    4 the next attempt  the same job, which resumes from the newest save

torch's elastic agent is not used, although its rendezvous supports spare hosts. The agent restarts after any nonzero
exit code, so it would repeat an invalid flag --max-restarts times. It counts all restarts of a long run, not only
restarts without progress. At a SIGTERM it kills ranks after 30 s and exits with 1, and it does not forward SIGUSR1 and
SIGHUP, so a run would be lost after a scheduler's warning. Each host would print a table of failures, where
exit_reports prints one line. The agent would not save time either, because restarted ranks are forked from a server
that has already imported torch.
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
from mega.core.processes.launch import INTERRUPTED, Ending, local_environments, lock_folder, run_attempt
from mega.core.processes.signals import handled_signals
from mega.core.processes.world import LAUNCHED, MEMORY_FOLDER, RESTART_COUNT

PATIENCE = 0.2
"""Seconds that ranks have to end after a peer has failed, before they are killed."""


@dataclass(frozen=True)
class Job:
    """The job that the ranks run."""

    target: Callable[..., int | None]
    """The main function of a rank."""
    args: Callable[[bool], tuple[object, ...]]
    """Function that takes a bool (whether a step was saved since the launch) and returns the arguments of `target`."""
    saved: Callable[[], int]
    """Function that returns the newest saved step, or 0."""
    memory: bool = False
    """Whether the ranks need a folder in memory."""
    alike: Mapping[str, str] = field(default_factory=dict)
    """Name shown in messages -> a value that must be identical on all hosts."""


@dataclass(frozen=True)
class Restarts:
    """The restarts of a job so far."""

    limit: int
    """Maximum number of consecutive restarts without a newer save."""
    began: int = 0
    """The newest saved step at the launch."""
    saved: int = 0
    """The newest saved step at the newest restart."""
    best: int = 0
    """The newest step that was saved or held in peers' memory at any restart."""
    number: int = 0
    """Number of restarts since the launch."""
    without_progress: int = 0
    """Number of restarts since the newest save."""
    launched: float = 0.0
    """time.monotonic() of this host at the launch."""

    def after(self, saved: int, held: int = 0) -> Restarts | None:
        """Return the state for the next attempt, or None if the limit is reached. saved: the newest saved step. held:
        the newest step in the memory of peers.

        >>> one = Restarts(limit=1).after(10)
        >>> one.without_progress, one.after(10), one.after(20).without_progress
        (1, None, 1)
        """
        newest = max(saved, held)
        without_progress = 0 if newest > self.best else self.without_progress
        if without_progress >= self.limit:
            return None
        best = max(newest, self.best)
        return replace(self, saved=saved, best=best, number=self.number + 1, without_progress=without_progress + 1)

    @classmethod
    def from_message(cls, *, launched: float, **counts: int) -> Restarts:
        """Create the state from the message of another host. Clocks of hosts differ, so `launched` is sent as a
        duration."""
        return cls(**counts, launched=time.monotonic() - launched)

    def to_message(self) -> dict[str, float]:
        """Return this state as a message to another host (see `from_message`)."""
        return {**asdict(self), "launched": time.monotonic() - self.launched}

    @property
    def resumes(self) -> bool:
        """Whether a step was saved since the launch."""
        return self.saved > self.began

    def restart(self, reason: str) -> str:
        """Return the message for the start of an attempt."""
        start = f"from step {self.best}" if self.best else "from the beginning"
        count = f"{self.without_progress} of at most {self.limit} without a newer save"
        return f"restart {self.number}, {start} ({count}): {reason}"

    def given_up(self, reason: str) -> str:
        """Return the message for the end of the last attempt."""
        if not self.limit:
            return f"not started again, as --max-restarts is 0: {reason}"
        since = f"no step after {self.best} was saved" if self.best else "no step was saved"
        return f"gave up after {self.limit} restarts in a row in which {since} (--max-restarts): {reason}"


def at_launch(limit: int, saved: int, launched: float) -> Restarts:
    """Return the state at the launch."""
    return Restarts(limit, saved, saved, saved, launched=launched)


def note_step(folder: Path, step: int) -> None:
    """Record that this host's memory holds copies of rank states at a step. Call this function on a rank."""
    temporary = folder / "step.new"
    temporary.write_text(str(step))
    temporary.rename(folder / "step")


def noted_step(folder: Path | None) -> int:
    """Return the newest step for which this host's memory holds copies of rank states, or 0."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "step").read_text()) if folder is not None else 0
    return 0


class Stopped(Exception):
    """Raised if a signal requests this process to stop while it has no running ranks."""

    def __init__(self, number: int):
        self.code = 128 + number


def supervise(nproc: int, limit: int, job: Job) -> int:
    """Run a job on `nproc` local ranks, restart it after transient failures, and return the exit code."""
    launched = time.monotonic()
    with stopping_on_signals(), memory(job) as folder:
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
    """Return the environment variables of an attempt, with torchrun's names for those that torchrun also sets."""
    variables = {"TORCHELASTIC_RUN_ID": "mega", RESTART_COUNT: str(restarts.number)}
    variables[LAUNCHED] = repr(restarts.launched)
    return variables if folder is None else {**variables, MEMORY_FOLDER: str(folder)}


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise Stopped if a signal arrives while no ranks are running that could receive the signal."""

    def stop(number: int, _: object) -> None:
        for each in handlers:  # a second signal must not interrupt the cleanup
            signal.signal(each, lambda *_: None)
        raise Stopped(number)

    handlers = {number: signal.signal(number, stop) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def memory(job: Job) -> Iterator[Path | None]:
    """Yield a folder in memory if the job needs one, otherwise None. The folder is removed at the end or, if this
    process is killed, by the next launcher on this host."""
    if not job.memory:
        yield None
        return
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    folder = parent / f"mega-peers-{uuid.uuid4().hex}"
    folder.mkdir(mode=0o700)
    lock_folder(str(folder))
    try:
        yield folder
    finally:
        for number in handled_signals():  # the run has ended, and a signal must not interrupt the removal
            signal.signal(number, lambda *_: None)
        shutil.rmtree(folder, ignore_errors=True)
