"""Starts local ranks for one job, and supervises them until the job ends.

    launch       run a function on N new local ranks; a failure of one rank ends all ranks
    run_ranks    run a function on the ranks of a launcher or, without a launcher, on new local ranks
    run_attempt  run a function on new local ranks with given environments; restarts.py may restart the ranks

New ranks are forked from a small server process that has already imported torch, so eight ranks start as quickly as
one. Ranks on one host use a file as their store, not a port, so two runs cannot conflict.
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
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, TYPE_CHECKING, TypeVarTuple

from mega.core.files import locked_alone
from mega.core.processes.connect import disconnect
from mega.core.processes.exit_reports import exit_at_once, exit_notes, report_exit, report_of, write_error
from mega.core.processes.roll_call import LOST
from mega.core.processes.signals import STOPPING, RepeatedSignal, delayed_signals, handled_signals, restore_signals
from mega.core.processes.world import LAUNCHER_FILE, MEETING_FILE, MEMORY_FOLDER, world_from_env
from mega.core.processes.world import ranks as count_ranks

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

_MARK = "mega-launcher"
"""Name of a file in the folder of a launcher. The file contains the host's name, and is locked while the launcher
runs."""

_OWNED: list[IO[str]] = []

Args = TypeVarTuple("Args")

PATIENCE = 1.0
"""Seconds that the other ranks have to exit after a rank has failed, before they are terminated."""

_LONGEST = 75
"""Maximum number of bytes in the path of the temporary folder. The path of a socket has at most 107 bytes, of which the
socket's name needs 32."""

_REPORTED = (1, 2)
"""Exit codes of ranks that have reported their error."""

_UNKNOWN = 255
"""Exit code of all ranks after their fork server has died. The ranks' actual exit codes can then no longer be read."""

INTERRUPTED = 254
"""Exit code of a rank that Ctrl-C interrupted immediately, for example before the first step. Its peers cannot
continue."""

STOPPED = tuple(128 + number for number in STOPPING)
"""Exit codes of ranks that have stopped together after a signal."""

_ADVICE: dict[int, str] = {
    signal.SIGKILL: ": unless that was done by hand, this host ran out of memory (see `dmesg`); mega memory-estimate "
    "says what a run needs, and a training resumes from its newest checkpoint",
    signal.SIGBUS: ": a file that it had mapped became shorter, such as token files that were made again in the same "
    "place (--no-mmap reads and names them), or /dev/shm is full",
}


@dataclass(frozen=True)
class Ending:
    """The common result of the ranks of one host."""

    code: int
    """The exit code: 0; 128 + the signal that killed a rank or stopped all ranks; or the code of the first rank that
    failed."""
    reason: str = ""
    """A one-line message that says why the ranks ended."""
    cause: bool = False
    """Whether `reason` is the original error rather than a consequence of another rank's end."""
    here: bool = False
    """Whether `reason` is about a rank of this host."""
    final: bool = False
    """Whether the ranks must not be restarted, because they would fail again or received a signal to stop."""


def launch(nproc: int, target: Callable[[*Args], int | None], *args: *Args) -> int:
    """Run `target(*args)` on `nproc` local ranks and return the job's exit code.

    `target` must be importable by name. When a rank fails, the other ranks are terminated. The job's exit code is that
    of the first rank that failed, or 128 + signal if this rank was killed. Signals of STOPPING are forwarded to every
    rank; a second SIGINT kills all ranks.
    """
    ending = run_attempt(local_environments(nproc), target, args)
    assert ending is not None
    if ending.code == INTERRUPTED:
        raise KeyboardInterrupt
    return ending.code


def local_environments(nproc: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank, for a job on this host only."""
    folder, meeting = launcher_folder(), f"meeting-{uuid.uuid4().hex[:8]}"
    return [rank_environment(rank, nproc, folder, meeting) for rank in range(nproc)]


def run_attempt(
    environments: Sequence[Mapping[str, str]],
    target: Callable[[*Args], int | None],
    args: tuple[*Args],
    bell: Connection | None = None,
    patience: float = 5.0,
) -> Ending | None:
    """Run `target(*args)` on new local ranks, one for each environment, and wait until they have ended. Return the
    common result, or None if `bell` had data to read before the ranks ended. patience: seconds that the other ranks
    have to end after a rank has failed.
    """
    heeded, server = handled_signals(), fork_server(module_of(target))
    prefix = environments[0][LAUNCHER_FILE]
    ranks: list[BaseProcess] = [
        server.Process(target=_rank, args=(dict(each), heeded, target, args)) for each in environments
    ]
    try:
        for each, process in zip(environments, ranks, strict=True):
            process.name = f"rank {each['RANK']}"
            with delayed_signals():  # an interrupt in `start` would lose the pid of a rank that runs
                process.start()
        return _supervise(ranks, _Endings(prefix, min(patience, PATIENCE)), bell)
    finally:
        with delayed_signals():  # after an interrupt here, multiprocessing would wait for the ranks at exit
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
    """Run `target(*args)` on the tp x pp = `size` ranks of an inference run, and return the exit code.

    If a launcher has started the ranks, each rank calls this function. Otherwise this function starts local ranks, or
    runs `target` in this process if `size` is 1. nproc: the value of --nproc. first: function that is called before
    local ranks start, so that a user error is reported once. Errors: those of `first`; ValueError if the number of
    ranks is not `size`.
    """
    world = world_from_env()
    alone = world.source == "alone"
    count = count_ranks(world, size if nproc is None and alone else nproc)
    if count != size:
        raise ValueError(f"--tp x --pp = {size}: must be the number of ranks, {count}")
    if size == 1 or not alone:
        return target(*args)
    first()
    return launch(size, target, *args)


def fork_server(*modules: str) -> ForkServerContext:
    """Start the server from which ranks are forked, unless it is already running. The server ignores signals sent to
    the whole job, because the launcher reads the exit codes of ranks through the server.

    modules: modules that the server imports once for all ranks. Errors: ValueError if the path in TMPDIR is too long.
    """
    if len(os.fsencode(folder := tempfile.gettempdir())) > _LONGEST:
        raise ValueError(
            f"TMPDIR {folder}: local ranks start by a socket there, so it may have at most {_LONGEST} bytes"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", __name__, *modules])
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}  # inherited by the server
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return context


def module_of(target: Callable[..., object]) -> str:
    """Return the module that a process imports to call `target`. The module of a `partial` is that of its function.

    >>> module_of(partial(partial(launcher_folder)))
    'mega.core.processes.launch'
    """
    while isinstance(target, partial):
        target = target.func
    return target.__module__


def launcher_folder() -> str:
    """Return the folder for the socket of this process's fork server and the store of its ranks. The folder is removed
    when the process ends.

    If the process and all its ranks are killed, the folder is no longer locked, and the next launcher removes it.
    """
    folder = multiprocessing.util.get_temp_dir()
    if not os.path.exists(os.path.join(folder, _MARK)):
        lock_folder(folder)
    return folder


def lock_folder(folder: str) -> None:
    """Mark a folder as owned by this process, so that the next launcher removes the folder if this process is killed.
    Also remove the folders of killed launchers."""
    _remove_abandoned(os.path.dirname(folder))
    mark = os.path.join(folder, _MARK)
    owned = open(f"{mark}.tmp", "w")  # noqa: SIM115 - stays open and locked while this process runs
    locked_alone(owned.fileno())
    owned.write(socket.gethostname())
    owned.flush()
    os.rename(owned.name, mark)
    _OWNED.append(owned)


def _remove_abandoned(place: str) -> None:
    """Remove the folders of launchers that have died on this host. Errors are ignored, because nothing depends on the
    removal."""
    for mark in glob.glob(os.path.join(glob.escape(place), "*", _MARK)):
        with contextlib.suppress(OSError, UnicodeDecodeError), open(mark, opener=_open_at_once) as file:
            folder = os.path.dirname(mark)
            if {os.fstat(file.fileno()).st_uid, os.lstat(folder).st_uid} != {os.getuid()}:
                continue  # other users can also write to the temporary folder
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == socket.gethostname():
                shutil.rmtree(folder)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without following symbolic links and without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def rank_environment(rank: int, size: int, directory: str, meeting: str) -> dict[str, str]:
    """Return the environment variables of one local rank. meeting: name of the store's file in `directory`."""
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
    restore_signals(heeded)
    os.environ.update(environment)
    threading.Thread(target=_follow_parent, name="follow-parent", daemon=True).start()
    try:
        code = target(*args) or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        exit_at_once(report_exit(report_of(error)))  # before `error`, and with it the tensors of its frames, is deleted
    if code:
        exit_at_once(code)  # an orderly exit would wait for peers, which wait for this rank
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    disconnect()


def _follow_parent() -> None:
    """End this rank when its launcher dies for any reason, and remove the launcher's folders."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        for folder in (os.path.dirname(os.environ[LAUNCHER_FILE]), os.environ.get(MEMORY_FOLDER)):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _supervise(ranks: list[BaseProcess], endings: _Endings, bell: Connection | None) -> Ending | None:
    """Wait until all ranks have succeeded, one has failed, or `bell` has data to read. After a signal has been
    forwarded, `bell` is ignored, so that the ranks save even if other hosts have ended.

    A rank that fails reports its error itself (exit_reports.py). This process reports a killed rank before the rank's
    peers report a broken exchange. The peers have PATIENCE seconds to report their own errors.
    """
    running = {process.sentinel: process for process in ranks}
    with _passing_signals(ranks) as signals:
        while running and time.monotonic() < endings.deadline:
            seconds = None if endings.deadline == math.inf else max(0.0, endings.deadline - time.monotonic())
            ready = wait([*running, *([] if bell is None else [bell])], seconds)
            ended = [running.pop(sentinel) for sentinel in list(running) if sentinel in ready]
            for process in sorted(ended, key=lambda process: process.exitcode or 0):  # report killed ranks first
                if process.exitcode == _UNKNOWN and (server_ending := _server_ending()) is not None:
                    write_error(f"mega: {server_ending}\n")
                    _kill(ranks)
                    return Ending(1, server_ending, cause=True, here=True)
                endings.add(process)
            if bell in ready and signals.number:
                bell = None
            elif bell in ready and not endings.failed:
                return None
            elif bell in ready:
                break
    return endings.ending(signals.number)


class _Endings:
    """The results of one host's ranks so far, from which `ending` derives a common result.

    prefix: the value of LAUNCHER_FILE. A file with this prefix reports a killed rank to the other ranks, because a rank
    whose device waits for the killed rank would not detect the loss. patience: seconds for the other ranks to write
    their reports.
    """

    def __init__(self, prefix: str, patience: float):
        self._prefix, self._patience = prefix, patience
        self.failed, self._stopped, self._interrupted = 0, 0, False
        self._killed: list[tuple[str, str]] = []
        self.deadline = math.inf
        """The time at which the ranks that are still running will be terminated."""

    def add(self, process: BaseProcess) -> None:
        code = process.exitcode or 0
        if code == INTERRUPTED:
            self._interrupted, self.deadline = True, min(self.deadline, time.monotonic() + PATIENCE)
            return
        if code in STOPPED:  # the other ranks stop at the same step
            self._stopped = code
            return
        if code and code not in _REPORTED and (ending := _ending(code)) not in [each for _, each in self._killed]:
            write_error(f"mega: {process.name} {ending}\n")
            self._killed.append((process.name, ending))
            with contextlib.suppress(OSError), open(self._prefix + LOST, "w") as note:
                note.write(f"{process.name} {ending}")
        if code and not self.failed:
            self.failed = 128 - code if code < 0 else code
            self.deadline = time.monotonic() + (self._patience if code < 0 else PATIENCE)

    def ending(self, stop_signal: int) -> Ending:
        """Return the common result of the ranks of this host.

        stop_signal: the signal that this process has forwarded, or 0. After a signal, every result is final. If the
        failure is only a consequence of other failures, the exit code is that of the signal."""
        if self._interrupted and not self.failed:
            return Ending(INTERRUPTED, "interrupted", final=True)
        if not self.failed:
            return Ending(self._stopped, final=True)
        if self._killed:
            name, ending = self._killed[0]
            line = f"{name} {ending.partition(':')[0]}"
            return Ending(self.failed, line, cause=True, here=True, final=bool(stop_signal))
        reports = sorted(exit_notes(self._prefix).items(), key=lambda note: (note[1].kind == "consequence", note[0]))
        if not reports:
            return Ending(self.failed, f"a rank ended with exit code {self.failed}", final=bool(stop_signal))
        rank, report = reports[0]
        last = report.text.rstrip().splitlines()[-1] if report.text.strip() else ""
        line = last if report.kind == "verdict" else f"rank {rank}: {last}"
        final, cause = bool(stop_signal) or report.permanent, report.kind != "consequence"
        code = 128 + stop_signal if stop_signal and not cause else self.failed
        return Ending(code, line, cause, cause and report.kind != "verdict", final)


def _server_ending() -> str | None:
    """Return a description of how the fork server ended, or None if the server is running or the system does not report
    its end."""
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is None or not hasattr(os, "waitid"):
        return None
    for _ in range(20):  # the server's pipes close shortly before the system reports its end
        with contextlib.suppress(ChildProcessError):
            # WNOWAIT, because multiprocessing must still be able to wait for the server.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                return f"the process that ranks are forked from (pid {pid}) {_ending(code)}"
        time.sleep(0.05)
    return None


def _ending(code: int) -> str:
    """Return a description of how a process ended, given its exit code (negative after a signal).

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
    """Forward signals to the ranks, which then save and stop; a second Ctrl-C raises KeyboardInterrupt immediately."""
    signals = RepeatedSignal()

    def pass_on(number: int, _: object) -> None:
        if signals.repeats(number):
            raise KeyboardInterrupt
        for process in ranks:
            if process.pid and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    before = {number: signal.signal(number, pass_on) for number in handled_signals()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(ranks: list[BaseProcess]) -> None:
    """Kill ranks that multiprocessing can no longer signal, because their fork server has died."""
    for process in ranks:
        with contextlib.suppress(OSError, TypeError):
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]


def end_ranks(ranks: list[BaseProcess], patience: float = 5.0) -> None:
    """Terminate the ranks that are still running. SIGTERM is repeated, because a run treats the first SIGTERM as a
    request to save and stop. The ranks are killed after `patience` seconds."""
    deadline = time.monotonic() + patience
    ranks = [process for process in ranks if process.pid is not None]  # a signal may arrive while ranks start
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < deadline:
        for process in alive:
            process.terminate()
        wait([process.sentinel for process in alive], 0.2)
    for process in ranks:
        process.kill()
        process.join()
