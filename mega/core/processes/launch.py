"""Local ranks, started for one job and watched until it ends.

    launch      run a function on N new local ranks; a failure of one ends all
    run_ranks   the same on those of a launcher, where there is one

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
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import IO, TYPE_CHECKING, TypeVarTuple

from mega.core.files import locked_alone
from mega.core.processes.connect import disconnect
from mega.core.processes.exit_reports import report_exit, report_of, write_error
from mega.core.processes.roll_call import LOST
from mega.core.processes.signals import STOPPING, RepeatedSignal, hear_signals, heeded_signals
from mega.core.processes.world import MEETING_FILE, world_from_env
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

_INTERRUPTED = 254
"""Exit code of a rank that Ctrl-C ended where it stood, as before the first step: its peers would wait in vain."""

_STOPPED = tuple(128 + number for number in STOPPING)
"""Exit codes of ranks that have stopped together, as they were asked."""

_ADVICE: dict[int, str] = {
    signal.SIGKILL: ": unless that was done by hand, this host ran out of memory (see `dmesg`); mega memory-estimate "
    "says what a run needs, and a training resumes from its newest checkpoint",
    signal.SIGBUS: ": a file that it had mapped became shorter, such as token files that were made again in the same "
    "place (--no-mmap reads and names them), or /dev/shm is full",
}


def launch(nproc: int, target: Callable[[*Args], int | None], *args: *Args) -> int:
    """Run `target(*args)` on `nproc` local ranks and return the job's exit code.

    `target` must be importable by name. The first rank that fails ends the others; the code is its code, 128 + signal
    if it was killed. What asks a run to stop (STOPPING) reaches every rank; a second SIGINT ends them all.
    """
    heeded, server, meeting = heeded_signals(), fork_server(target.__module__), f"meeting-{uuid.uuid4().hex[:8]}"
    folder = _folder()
    ranks: list[BaseProcess] = [
        server.Process(target=_rank, args=(rank_environment(rank, nproc, folder, meeting), heeded, target, args))
        for rank in range(nproc)
    ]
    for rank, process in enumerate(ranks):
        process.name = f"rank {rank}"
        process.start()
    try:
        return _supervise(ranks, os.path.join(folder, meeting + LOST))
    finally:
        end_ranks(ranks)
        for name in (meeting, meeting + LOST):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


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


def _folder() -> str:
    """The folder in which this process's fork server listens and its ranks meet; it goes with the process.

    Where a process was killed with all its ranks, the next one to come here, by a lock that died with it, tidies up.
    """
    folder = multiprocessing.util.get_temp_dir()
    if not os.path.exists(mark := os.path.join(folder, _MARK)):
        _remove_abandoned(os.path.dirname(folder))
        owned = open(f"{mark}.tmp", "w")  # noqa: SIM115 - open, and locked, for as long as this process lives
        locked_alone(owned.fileno())
        owned.write(socket.gethostname())
        owned.flush()
        os.rename(owned.name, mark)
        _OWNED.append(owned)
    return folder


def _remove_abandoned(place: str) -> None:
    """Remove the folders of launchers of this host that have died. Nothing depends on it, so errors do not count."""
    for mark in glob.glob(os.path.join(glob.escape(place), "*", _MARK)):
        with contextlib.suppress(OSError, UnicodeDecodeError), open(mark) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == socket.gethostname():
                shutil.rmtree(os.path.dirname(mark))


def rank_environment(rank: int, size: int, directory: str, meeting: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        MEETING_FILE: os.path.join(directory, meeting),
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
        code = _INTERRUPTED
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
        shutil.rmtree(os.path.dirname(os.environ[MEETING_FILE]), ignore_errors=True)
        os._exit(1)


def _supervise(ranks: list[BaseProcess], note: str) -> int:
    """Wait until all have ended well, or the first has not; its exit code (128 + signal if killed).

    Errors: KeyboardInterrupt where Ctrl-C ended a rank where it stood, and with it the others.

    note: a file that tells the others of a rank that was killed: those whose device waits for it hear of it only so.
    A rank that fails has reported why (exit_reports.py). For one that was killed this process reports, before its
    peers, which it leaves in the middle of an exchange; then they have PATIENCE seconds to report errors of their own.
    """
    running = {process.sentinel: process for process in ranks}
    failed, stopped, interrupted, deadline = 0, 0, False, math.inf
    reported: set[str] = set()
    with _passing_signals(ranks):
        while running and time.monotonic() < deadline:
            ready = wait(list(running), None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
            ended = [running.pop(sentinel) for sentinel in list(running) if sentinel in ready]
            for process in sorted(ended, key=lambda process: process.exitcode or 0):  # the killed ones first
                code = process.exitcode or 0
                # All may end by one signal.
                if code == _UNKNOWN and (gone := _server_ending()) is not None:
                    write_error(f"mega: {gone}\n")
                    _kill(ranks)
                    return 1
                if code == _INTERRUPTED:
                    interrupted, deadline = True, min(deadline, time.monotonic() + PATIENCE)
                    continue
                if code in _STOPPED:  # its peers stop likewise, at the same step
                    stopped = code
                    continue
                if code and code not in _REPORTED and (ending := _ending(code)) not in reported:
                    write_error(f"mega: {process.name} {ending}\n")
                    reported.add(ending)
                    with contextlib.suppress(OSError), open(note, "w") as lost:
                        lost.write(f"{process.name} {ending}")
                if code and not failed:
                    failed, deadline = 128 - code if code < 0 else code, time.monotonic() + PATIENCE
    if interrupted and not failed:
        raise KeyboardInterrupt
    return failed or stopped


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
def _passing_signals(ranks: list[BaseProcess]) -> Iterator[None]:
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
        yield
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
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < deadline:
        for process in alive:
            process.terminate()
        wait([process.sentinel for process in alive], 0.2)
    for process in ranks:
        process.kill()
        process.join()
