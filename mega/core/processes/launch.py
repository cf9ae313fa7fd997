"""Local ranks, started for one job and watched until it ends.

    launch       run a function on N new local ranks; a failure of one ends all
    run_ranks    the same on those of a launcher, where there is one
    run_attempt  the same in given environments; restarts.py may start the ranks again

New ranks are forked from a small server process that has torch imported already, so eight of them start as fast as
one. Ranks of one host meet in a file, not on a port, so nothing can be taken twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, TYPE_CHECKING, TypeVarTuple

from mega.core.files import locked_alone
from mega.core.processes.connect import disconnect
from mega.core.processes.exit_reports import exit_notes, report_exit, report_of, write_error
from mega.core.processes.roll_call import LOST
from mega.core.processes.signals import STOPPING, RepeatedSignal, delayed_signals, hear_signals, heeded_signals
from mega.core.processes.world import LAUNCHER_FILE, MEETING_FILE, MEMORY_FOLDER, world_from_env
from mega.core.processes.world import ranks as count_ranks

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

_MARK = "mega-launcher"
"""In the folder of a process that launches ranks: its host's name, locked while it lives."""

_OWNED: list[IO[str]] = []

Args = TypeVarTuple("Args")

PATIENCE = 1.0
"""Seconds that the other ranks have to end by themselves when one has failed."""

_LONGEST = 75
"""Most bytes of the folder for temporary files: a socket's path has at most 107, of which its own name takes 32."""

_REPORTED = (1, 2)
"""Exit codes of ranks that have said why."""

_UNKNOWN = 255
"""Exit code of all ranks whose server has died: their own can no longer be read."""

INTERRUPTED = 254
"""Exit code of a rank that Ctrl-C ended where it stood, as before the first step: its peers would wait in vain."""

STOPPED = tuple(128 + number for number in STOPPING)
"""Exit codes of ranks that have stopped together, as they were asked."""

_ADVICE: dict[int, str] = {
    signal.SIGKILL: ": unless that was done by hand, this host ran out of memory (see `dmesg`); mega memory-estimate "
    "says what a run needs, and a training resumes from its newest checkpoint",
    signal.SIGBUS: ": a file that it had mapped became shorter, such as token files that were made again in the same "
    "place (--no-mmap reads and names them), or /dev/shm is full",
}


@dataclass(frozen=True)
class Ending:
    """How the ranks of one host ended. code: 0; 128 + a signal that killed one, or by which they were asked to stop; or
    of the first that failed. reason: in one line. cause: not the end of another rank. here: of a rank of this host.
    final: ranks that start again would end so again, or were not wanted any more."""

    code: int
    reason: str = ""
    cause: bool = False
    here: bool = False
    final: bool = False


def launch(nproc: int, target: Callable[[*Args], int | None], *args: *Args) -> int:
    """Run `target(*args)` on `nproc` local ranks and return the job's exit code.

    `target` must be importable by name. The first rank that fails ends the others; the code is its code, 128 + signal
    if it was killed. What asks a run to stop (STOPPING) reaches every rank; a second SIGINT ends them all.
    """
    ending = run_attempt(local_environments(nproc), target, args)
    assert ending is not None
    if ending.code == INTERRUPTED:
        raise KeyboardInterrupt
    return ending.code


def local_environments(nproc: int) -> list[dict[str, str]]:
    """Those of the ranks of a world that is all on this host."""
    folder, meeting = launcher_folder(), f"meeting-{uuid.uuid4().hex[:8]}"
    return [rank_environment(rank, nproc, folder, meeting) for rank in range(nproc)]


def run_attempt(
    environments: Sequence[Mapping[str, str]],
    target: Callable[[*Args], int | None],
    args: tuple[*Args],
    bell: Connection | None = None,
    patience: float = 5.0,
) -> Ending | None:
    """Run `target(*args)` on new local ranks, one in each environment, until they have ended; None where `bell` had
    something to read before. patience: seconds that ranks have to end which others have left."""
    heeded, server = heeded_signals(), fork_server(target.__module__)
    prefix = environments[0][LAUNCHER_FILE]
    ranks: list[BaseProcess] = [
        server.Process(target=_rank, args=(dict(each), heeded, target, args)) for each in environments
    ]
    try:
        for each, process in zip(environments, ranks, strict=True):
            process.name = f"rank {each['RANK']}"
            process.start()
        return _supervise(ranks, _Endings(prefix, min(patience, PATIENCE)), bell)
    finally:
        with delayed_signals():  # or else ranks would be left, for which multiprocessing waits when this process ends
            end_ranks(ranks, patience)
        for path in glob.glob(glob.escape(prefix) + "*"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def run_ranks(
    size: int,
    target: Callable[[*Args], int],
    *args: *Args,
    nproc: int | None = None,
    first: Callable[[], object] = lambda: None,
) -> int:
    """Run `target(*args)` on the tp x pp = `size` ranks of a model that answers: those of a launcher, which each call
    this, or new local ones; a single one is this process. The exit code.

    nproc: of the flag. first: called before local ranks start, so that a mistake is reported once. Errors: its own;
    ValueError where there are other ranks than `size`.
    """
    world = world_from_env()
    alone = world.source == "alone"
    found = count_ranks(world, size if nproc is None and alone else nproc)
    if found != size:
        raise ValueError(f"--tp x --pp = {size}: must be the number of ranks, {found}")
    if size == 1 or not alone:
        return target(*args)
    first()
    return launch(size, target, *args)


def fork_server(*modules: str) -> ForkServerContext:
    """What ranks are forked from. It outlives a signal to the whole job: without it no process learns how ranks end.

    modules: what all ranks need, which it imports once for them, if it does not run yet. Errors: ValueError.
    """
    if len(os.fsencode(folder := tempfile.gettempdir())) > _LONGEST:
        raise ValueError(
            f"TMPDIR {folder}: local ranks start by a socket there, so it may have at most {_LONGEST} bytes"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", __name__, *modules])
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}  # a new process inherits this
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return context


def launcher_folder() -> str:
    """The folder in which this process's fork server listens and its ranks meet; it goes with the process.

    Where a process was killed with all its ranks, the next one to come here, by a lock that died with it, tidies up.
    """
    folder = multiprocessing.util.get_temp_dir()
    if not os.path.exists(os.path.join(folder, _MARK)):
        own(folder)
    return folder


def own(folder: str) -> None:
    """Mark a folder as this process's: the next launcher removes it if this one is killed, as this one does others'."""
    _remove_abandoned(os.path.dirname(folder))
    mark = os.path.join(folder, _MARK)
    owned = open(f"{mark}.tmp", "w")  # noqa: SIM115 - open, and locked, for as long as this process lives
    locked_alone(owned.fileno())
    owned.write(socket.gethostname())
    owned.flush()
    os.rename(owned.name, mark)
    _OWNED.append(owned)


def _remove_abandoned(place: str) -> None:
    """Remove the folders of launchers of this host that have died. Nothing depends on it, so errors do not count."""
    for mark in glob.glob(os.path.join(glob.escape(place), "*", _MARK)):
        with contextlib.suppress(OSError, UnicodeDecodeError), open(mark, opener=_open_at_once) as file:
            folder = os.path.dirname(mark)
            if {os.fstat(file.fileno()).st_uid, os.lstat(folder).st_uid} != {os.getuid()}:
                continue  # anyone may put anything into a folder for temporary files
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == socket.gethostname():
                shutil.rmtree(folder)


def _open_at_once(path: str, flags: int) -> int:
    """Neither by a link nor waiting for who writes into a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def rank_environment(rank: int, size: int, directory: str, meeting: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        MEETING_FILE: os.path.join(directory, meeting),
        LAUNCHER_FILE: os.path.join(directory, meeting),
    }


def _rank(
    environment: dict[str, str],
    heeded: Iterable[signal.Signals],
    target: Callable[[*Args], int | None],
    args: tuple[*Args],
) -> None:
    hear_signals(heeded)
    os.environ.update(environment)
    threading.Thread(target=_follow_parent, name="follow-parent", daemon=True).start()
    try:
        code = target(*args) or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        code = report_exit(report_of(error))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code:
        os._exit(code)  # no waiting for peers that wait for us
    disconnect()


def _follow_parent() -> None:
    """End this rank when the process that launched it has died, however it died, and tidy up in its place."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        for folder in (os.path.dirname(os.environ[LAUNCHER_FILE]), os.environ.get(MEMORY_FOLDER)):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _supervise(ranks: list[BaseProcess], found: _Endings, bell: Connection | None) -> Ending | None:
    """Wait until all have ended well, or the first has not, or `bell` has something to read. After a signal was passed
    on, the bell does not count: ranks save then, whatever becomes of other hosts.

    A rank that fails has reported why (exit_reports.py). For one that was killed this process reports, before its
    peers, which it leaves in the middle of an exchange; then they have PATIENCE seconds to report errors of their own.
    """
    running = {process.sentinel: process for process in ranks}
    with _passing_signals(ranks) as asked:
        while running and time.monotonic() < found.deadline:
            left = None if found.deadline == math.inf else max(0.0, found.deadline - time.monotonic())
            ready = wait([*running, *([] if bell is None else [bell])], left)
            ended = [running.pop(sentinel) for sentinel in list(running) if sentinel in ready]
            for process in sorted(ended, key=lambda process: process.exitcode or 0):  # the killed ones first
                # All may end by one signal.
                if process.exitcode == _UNKNOWN and (gone := _server_ending()) is not None:
                    write_error(f"mega: {gone}\n")
                    _kill(ranks)
                    return Ending(1, gone, cause=True, here=True)
                found.add(process)
            if bell in ready and asked.number:
                bell = None
            elif bell in ready and not found.failed:
                return None
            elif bell in ready:
                break
    return found.ending(asked.number)


class _Endings:
    """What the ranks of one host that have ended say of the whole.

    prefix: of the names of files. One tells the others of a rank that was killed: those whose device waits for it hear
    of it only so. patience: seconds for the reports of those.
    """

    def __init__(self, prefix: str, patience: float):
        self._prefix, self._patience = prefix, patience
        self.failed, self._stopped, self._interrupted = 0, 0, False
        self._killed: list[tuple[str, str]] = []
        self.deadline = math.inf
        """When the ranks that still run are to be ended."""

    def add(self, process: BaseProcess) -> None:
        code = process.exitcode or 0
        if code == INTERRUPTED:
            self._interrupted, self.deadline = True, min(self.deadline, time.monotonic() + PATIENCE)
            return
        if code in STOPPED:  # its peers stop likewise, at the same step
            self._stopped = code
            return
        if code and code not in _REPORTED and (ending := _ending(code)) not in [each for _, each in self._killed]:
            write_error(f"mega: {process.name} {ending}\n")
            self._killed.append((process.name, ending))
            with contextlib.suppress(OSError), open(self._prefix + LOST, "w") as lost:
                lost.write(f"{process.name} {ending}")
        if code and not self.failed:
            self.failed = 128 - code if code < 0 else code
            self.deadline = time.monotonic() + (self._patience if code < 0 else PATIENCE)

    def ending(self, asked: int) -> Ending:
        """asked: the signal that this process passed on; ranks that fail after it were to stop anyway, and end by it
        where what failed was another one."""
        if self._interrupted and not self.failed:
            return Ending(INTERRUPTED, "interrupted", final=True)
        if not self.failed:
            return Ending(self._stopped, final=True)
        if self._killed:
            name, ending = self._killed[0]
            line = f"{name} {ending.partition(':')[0]}"
            return Ending(self.failed, line, cause=True, here=True, final=bool(asked))
        reports = sorted(exit_notes(self._prefix).items(), key=lambda found: (found[1].kind == "consequence", found[0]))
        if not reports:
            return Ending(self.failed, f"a rank ended with exit code {self.failed}", final=bool(asked))
        rank, report = reports[0]
        last = report.text.rstrip().splitlines()[-1] if report.text.strip() else ""
        line = last if report.kind == "verdict" else f"rank {rank}: {last}"
        final, cause = bool(asked) or report.permanent, report.kind != "consequence"
        code = 128 + asked if asked and not cause else self.failed
        return Ending(code, line, cause, cause and report.kind != "verdict", final)


def _server_ending() -> str | None:
    """How the fork server has ended; None while it lives, or where the system does not say."""
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is None or not hasattr(os, "waitid"):
        return None
    for _ in range(20):  # its end is seen by its pipes first
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it stays for who started it
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                return f"the process that ranks are forked from (pid {pid}) {_ending(code)}"
        time.sleep(0.05)
    return None


def _ending(code: int) -> str:
    """
    >>> _ending(-11), _ending(7)
    ('was killed by SIGSEGV', 'ended with exit code 7')
    >>> _ending(-signal.SIGBUS)[:64]
    'was killed by SIGBUS: a file that it had mapped became shorter, '
    """
    if code > 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{_ADVICE.get(-code, '')}"


@contextlib.contextmanager
def _passing_signals(ranks: list[BaseProcess]) -> Iterator[RepeatedSignal]:
    """Pass a signal to stop on to the ranks, which save and stop; a second request does not wait."""
    asked = RepeatedSignal()

    def pass_on(number: int, _: object) -> None:
        if asked.repeats(number):
            raise KeyboardInterrupt
        for process in ranks:
            if process.pid and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    before = {number: signal.signal(number, pass_on) for number in heeded_signals()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(ranks: list[BaseProcess]) -> None:
    """End ranks of which multiprocessing knows nothing any more."""
    for process in ranks:
        with contextlib.suppress(OSError, TypeError):
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]


def end_ranks(ranks: list[BaseProcess], patience: float = 5.0) -> None:
    """Ask the ranks that still run to stop, again and again since a run takes it for a wish; then make them."""
    deadline = time.monotonic() + patience
    ranks = [process for process in ranks if process.pid is not None]  # a signal may come while they start
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < deadline:
        for process in alive:
            process.terminate()
        wait([process.sentinel for process in alive], 0.2)
    for process in ranks:
        process.kill()
        process.join()
