"""Reports why ranks failed, so that each reason is printed only once, with any launcher.

    1 every failed rank publishes its report         in the store of the rendezvous, even if the rendezvous is not
                                                     complete; ranks that wait there then end
    2 the first such rank waits for the others       until all have reported, GRACE seconds are over, or a SIGTERM shows
                                                     that the launcher has already detected the failure
    3 it prints                                      each reason once, with the numbers of the ranks unless all ranks
                                                     report it. A consequence of another rank's error, such as its loss,
                                                     is printed only if no rank reports a cause, and the launcher has
                                                     not ended this rank. The first rank of every other host prints the
                                                     same text in the log of that host
    4 the others exit with the same exit code        a later rank prints only what is new; rank 0, which may host the
                                                     store, exits last

These phases must not block a rank, so a rank prints its own report if the store is lost or does not answer within LIMIT
seconds. With MEGA_DEBUG=1, every rank prints its own traceback immediately. A single rank does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from mega.core.activity import ACTIVITY
from mega.core.environment import DEBUG, is_on
from mega.core.processes.world import LAUNCHER_FILE, MEETING_FILE, World, world_from_env
from mega.core.terminal import discard_output
from mega.core.words import name_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE = 2.0
"""Seconds within which ranks with the same fault report that fault."""

COMING = 5 * GRACE
"""The value that replaces `GRACE` until the rendezvous is complete. It is larger, because each rank first imports torch
from a shared disk."""

LIMIT = 10 * GRACE
"""Timeout in seconds for all phases together. It is needed because the store of a stopped or disconnected host neither
answers nor closes its connections."""

ANSWER = 4 * GRACE
"""Timeout in seconds for the first answer of the store, if ranks have used the store before."""

_PEER_IS_GONE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError"),
    "Connection was likely closed",  # the connection to the store, whose host is lost
)


@dataclass(frozen=True)
class ExitReport:
    """The reason why a rank ends, and the rank's exit code. kind: "line" (a message), "trace" (a traceback),
    "diverged", "verdict" (about all ranks), or "consequence" (of the end of another rank)."""

    code: int
    text: str
    kind: str = "line"

    @property
    def permanent(self) -> bool:
        """Whether ranks would fail for the same reason after a restart."""
        return self.code == 2 or self.kind == "diverged"


def report_of(error: BaseException) -> ExitReport:
    """Return the report of an exception, with exit code 2 for a user error, otherwise 1. If neither the user nor the
    machine caused the error, the report has a traceback.

    >>> report_of(ValueError("--lr -1: must be positive"))
    ExitReport(code=2, text='--lr -1: must be positive', kind='line')
    """
    code = 2 if isinstance(error, ValueError) and not isinstance(error, OSError) else 1  # an OSError may be transient
    if _debugging():
        return ExitReport(code, _trace(error), "trace")
    if isinstance(error, UnicodeEncodeError) and not _is_text(error.object):
        return ExitReport(code, f"{error.object}: is not a name in UTF-8, as is needed here; rename it")
    if isinstance(error, ValueError | OSError | FloatingPointError | MemoryError):
        text = str(error) or ("out of memory" if isinstance(error, MemoryError) else repr(error))
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            text = f"{error.filename}: {error.strerror}"
        kind = "diverged" if isinstance(error, FloatingPointError) else "line"
        return ExitReport(code, text, "consequence" if getattr(error, "elsewhere", False) else kind)
    if type(error).__name__ == "OutOfMemoryError" or _CPU_IS_FULL in str(error):
        # Omit the process-specific numbers at the end of torch's message and, on a CPU, the source line at its
        # beginning.
        text = ". ".join(str(error)[max(0, str(error).find(_CPU_IS_FULL)) :].split(". ")[:2])
        return ExitReport(
            code, f"{text}; mega memory-estimate shows what a run needs, and MEGA_DEBUG=1 shows where it was"
        )
    if isinstance(error, RuntimeError) and (late := explain_timeout(error)):
        return ExitReport(code, late, "consequence")
    if isinstance(error, RuntimeError) and names_lost_peer(error):
        return ExitReport(code, explain_loss(error), "consequence")
    return ExitReport(code, _trace(error), "trace")


def names_lost_peer(error: RuntimeError) -> bool:
    """Whether the message of an error shows that an exchange failed because another rank has ended."""
    return any(sign in str(error) for sign in _PEER_IS_GONE)


def names_failed_device(error: BaseException) -> bool:
    """Whether the message of an error shows that CUDA failed. After a failed kernel, all later CUDA calls of the
    process fail.

    >>> names_failed_device(RuntimeError("CUDA error: an illegal memory access was encountered"))
    True
    >>> names_failed_device(RuntimeError("CUDA out of memory")), names_failed_device(RuntimeError("shapes differ"))
    (False, False)
    """
    return isinstance(error, RuntimeError) and _DEVICE_FAILED.search(str(error)) is not None


_DEVICE_FAILED = re.compile(
    r"CUDA (driver )?error|cuDNN error|Triton Error \[CUDA\]|unhandled cuda error", re.IGNORECASE
)
_CPU_IS_FULL = "DefaultCPUAllocator: can't allocate memory"
_TIMED_OUT = re.compile(r"[Tt]imed? ?out")


class Explains(Protocol):
    """An object that explains failed exchanges (roll_call.py)."""

    def explain(self, error: BaseException) -> str: ...
    def explain_loss(self, error: BaseException) -> str | None: ...
    def close(self, report: str) -> None: ...


_EXPLANATIONS: list[Explains] = []
"""The explainer of this process, or an empty list if the process is not in a process group."""


def explain_exchanges_by(group: Explains | None) -> None:
    """Set the object that explains failed exchanges; None if there is no process group."""
    _EXPLANATIONS[:] = [] if group is None else [group]


def explain_loss(error: RuntimeError) -> str:
    """Return the message about a broken connection, with the lost rank if it can be found through the store."""
    for group in _EXPLANATIONS:
        with contextlib.suppress(Exception):  # the store was lost with rank 0 or its host
            if line := group.explain_loss(error):
                return line
    return f"lost another rank, which has ended or cannot be reached: {error}".splitlines()[0]


def explain_timeout(error: RuntimeError) -> str | None:
    """Return the message about an exchange that timed out, or None for any other error."""
    if not _EXPLANATIONS or not _TIMED_OUT.search(str(error)):
        return None
    try:
        return _EXPLANATIONS[0].explain(error)
    except Exception:  # the store was lost with rank 0 or its host
        first = str(error).splitlines()[0]
        return f"an exchange with other ranks ran out of time, and rank 0 or its store does not answer: {first}"


def report_exit(report: ExitReport, *, together: bool = True) -> int:
    """Print a report to stderr unless another rank prints it, and return the exit code. A rank must not do anything
    after this call. together: whether the ranks agree through their store on which of them prints.
    """
    try:
        world = world_from_env()
    except ValueError:  # the launcher's variables are invalid, so each rank reports for itself
        world = World(0, 1, 0, 1, "alone")
    _note(report, world.rank)
    if together and world.size > 1 and not _debugging():
        code = _report_in_time(report, world)
        if code is not None:
            return code
    write_error(format_exits({world.rank: report}, world.size))
    return report.code


def exit_at_once(code: int) -> NoReturn:
    """Flush stdout and stderr, and end this process without destroying its objects.

    After a failed kernel, torch's destructor of page-locked tensors raises a C++ exception, which would abort the
    process with SIGABRT and print C++ frames after the report.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _note(report: ExitReport, rank: int) -> None:
    """Write the report for the launcher of this host, if mega launched the ranks; the launcher decides whether to
    restart."""
    with contextlib.suppress(OSError, KeyError), open(f"{os.environ[LAUNCHER_FILE]}.exit-{rank}", "w") as note:
        json.dump(asdict(report), note)


def exit_notes(prefix: str) -> dict[int, ExitReport]:
    """Return a map from ranks to the reports that they have written for their launcher. prefix: the value of
    LAUNCHER_FILE."""
    reports = {}
    for path in Path(prefix).parent.glob(Path(prefix).name + ".exit-*"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # the rank was killed while it wrote
            reports[int(path.suffix.removeprefix(".exit-"))] = ExitReport(**json.loads(path.read_text()))
    return reports


def format_exits(by_rank: Mapping[int, ExitReport], world: int, hosts: Mapping[int, str] | None = None) -> str:
    """Format the reports of some ranks of `world` for the user. hosts: rank -> its host, if there are several hosts.

    >>> print(format_exits({0: ExitReport(2, "no such file"), 1: ExitReport(2, "no such file")}, 2), end="")
    mega: no such file
    >>> full, lost = ExitReport(1, "disk full"), ExitReport(1, "lost", "consequence")
    >>> print(format_exits({3: full, 2: lost, 1: full}, 4), end="")
    mega: ranks 1, 3: disk full
    >>> print(format_exits({3: full, 2: lost}, 4, {2: "a", 3: "b"}), end="")
    mega: rank 3 on host b: disk full
    """
    causes = {rank: each for rank, each in by_rank.items() if each.kind != "consequence"} or dict(
        [min(by_rank.items())]
    )
    ranks: dict[ExitReport, list[int]] = {}
    for rank, each in sorted(causes.items()):
        ranks.setdefault(each, []).append(rank)
    lines = []
    for each, same in ranks.items():
        name = "" if len(same) == world or each.kind == "verdict" else name_ranks(same, hosts) + ": "
        if each.kind == "trace":
            lines += [f"mega: {name}", *each.text.splitlines()] if name else each.text.splitlines()
        else:
            lines += [f"mega: {name}{line}" for line in each.text.splitlines()]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _report_in_time(report: ExitReport, world: World) -> int | None:
    """Report together with the other ranks, and return the common exit code, or None if the store does not answer in
    time."""
    stopped, answered, codes = threading.Event(), threading.Event(), list[int]()

    def meet() -> None:
        with contextlib.suppress(Exception):  # an error of the store must not hide the report
            codes.append(_report_together(report, world, stopped, answered))
        answered.set()

    # A thread runs `meet`, because no timer or signal can interrupt a call to a store that does not answer.
    exchange = threading.Thread(target=meet, name="exit-reports", daemon=True)
    main = threading.current_thread() is threading.main_thread()  # only this thread may set signal handlers
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set()) if main else None
    try:
        exchange.start()
        if answered.wait(ANSWER if _have_met() else LIMIT):
            exchange.join(LIMIT)
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
    return codes[0] if codes else None


def _report_together(report: ExitReport, world: World, stopped: threading.Event, answered: threading.Event) -> int:
    """Report together with the other ranks (phases 1 to 4 in the module's docstring). stopped: event that is set when a
    SIGTERM shows that the launcher has detected the failure. answered: event that this function sets at the store's
    first answer.
    Errors: any error of the store."""
    import torch.distributed as dist

    from mega.core.processes.rendezvous import publish_failure

    shared = _store(world)
    store = dist.PrefixStore("exit-reports", shared)
    # 1 publish
    store.set(str(world.rank), json.dumps({"host": socket.gethostname(), "report": asdict(report)}))
    if not dist.is_initialized():
        publish_failure(shared, world.rank, report.text)
    answered.set()
    for group in _EXPLANATIONS if report.kind in ("line", "trace", "diverged") else ():
        group.close(report.text)
    if store.add("count", 1) == 1:
        # 2 the first rank waits
        _wait(lambda: stopped.is_set() or store.add("count", 0) >= world.size, GRACE)
        present = [rank for rank in range(world.size) if store.check([str(rank)])]
        published = {rank: json.loads(store.get(str(rank))) for rank in present}
        reports = {rank: ExitReport(**each["report"]) for rank, each in published.items()}
        hosts = {rank: each["host"] for rank, each in published.items() if world.size > world.local_size}
        causes = [each for each in reports.values() if each.kind != "consequence"]
        # 3 the first rank prints all reports
        text = format_exits(reports, world.size, hosts) if causes or not stopped.is_set() else ""
        write_error(text + _of_host(world, text))
        store.add(f"host/{socket.gethostname()}", 1)
        verdict = {"code": causes[0].code if causes else report.code, "texts": [each.text for each in causes]}
        verdict["lines"] = text
        store.set("reported", json.dumps(verdict))
    else:
        store.wait(["reported"], timedelta(seconds=GRACE + 1))
    # 4 the other ranks print errors that have not been printed yet, and exit
    verdict = json.loads(store.get("reported"))
    if world.size > world.local_size and store.add(f"host/{socket.gethostname()}", 1) == 1:
        write_error(verdict["lines"] + _of_host(world, verdict["lines"]))  # each host has a separate log
    if report.kind != "consequence" and not any(text in report.text for text in verdict["texts"]):
        write_error(format_exits({world.rank: report}, world.size))
    store.add("left", 1)
    if _hosting(world):  # later ranks need the store, which ends with this rank
        _wait(lambda: stopped.is_set() or store.add("left", 0) >= world.size, COMING)
    elif world.rank == 0:
        _wait(lambda: store.add("left", 0) >= store.add("count", 0), GRACE)
    return int(verdict["code"])


def _of_host(world: World, reported: str) -> str:
    """Return a message for this host's log, about what its first rank was doing when the run ended; an empty string on
    a single host."""
    if world.size == world.local_size or not reported:
        return ""
    return f"mega: rank {world.rank}, on host {socket.gethostname()}, was at: {ACTIVITY}\n"


def _is_text(name: str) -> bool:
    """Whether a name is valid UTF-8. Python decodes any other bytes in file names to the surrogates tested here."""
    return not any("\udc80" <= letter <= "\udcff" for letter in name)


def write_error(text: str) -> None:
    """Write to stderr, or discard the text if stderr cannot be written."""
    try:
        sys.stderr.write(printable(text, sys.stderr.encoding))
        sys.stderr.flush()
    except (OSError, ValueError):
        discard_output(sys.stderr)


def printable(line: str, encoding: str | None) -> str:
    """Escape characters that the encoding cannot represent, as in a path that is not UTF-8.

    >>> printable("runs/\\udcff", "utf-8")
    'runs/\\\\udcff'
    """
    return line.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def _have_met() -> bool:
    """Whether this rank is in a process group, which implies that the store has already answered."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _store(world: World) -> Store:
    """Return the store of the process group, or the store of the rendezvous before the group exists."""
    import torch.distributed as dist

    from mega.core.processes.rendezvous import attempt_store, open_store, reach

    if dist.is_initialized():
        if MEETING_FILE not in os.environ:
            reach(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 0.0)
        return dist.distributed_c10d._get_default_store()
    return attempt_store(open_store(world, time.monotonic() + COMING))


def _hosting(world: World) -> bool:
    """Whether this rank hosts the store while the rendezvous is not yet complete."""
    import torch.distributed as dist

    from mega.core.processes.rendezvous import hosts_store

    return hosts_store(world) and not dist.is_initialized()


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until `done()` is true, for at most `seconds`, and return the last result of `done()`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _debugging() -> bool:
    return is_on(DEBUG)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
