"""Reads the world size, rank and rendezvous address from the launcher's environment variables. This module does not
import torch.

These variables are WORLD_SIZE, RANK and others for torchrun, OMPI_COMM_WORLD_* (Open MPI) or PMI_* (MPICH, Intel MPI,
Cray) for mpirun, and SLURM_* for a bare `srun`. Without such variables, there is one process, which may start local
ranks with `--nproc`. If launchers are nested, the inner launcher has precedence. An outer launcher must not set a
different rank for a world of the same size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Source = Literal["torchrun", "mpirun", "slurm", "alone"]

MEETING_FILE = "MEGA_MEETING_FILE"
"""Environment variable: the file of the store, for ranks that --nproc started."""

MEMORY_FOLDER = "MEGA_PEER_MEMORY"
"""Environment variable: the folder in this host's memory that persists after the ranks of an attempt have ended."""

LAUNCHED = "MEGA_LAUNCHED"
"""Environment variable: time.monotonic() of this host at the launch of a run with restarts."""

LAUNCHER_FILE = "MEGA_LAUNCHER_FILE"
"""Environment variable: prefix of the files in which the launcher (--nproc) and its ranks report to each other how
ranks ended."""

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable: number of restarts of the ranks, set by --max-restarts and by torchrun."""

MOST_DIGITS = 18
"""Maximum number of digits in a number that a launcher sets. Without this limit, parsing thousands of digits would be
slow."""

_STARTED_HERE = (MEETING_FILE, "TORCHELASTIC_RUN_ID")
"""Variables that only --nproc and torchrun set. If either is set, the variables of all outer launchers are ignored."""


def restart_count() -> int:
    """Return the number of times that --max-restarts or torchrun has restarted the ranks."""
    return int(os.environ.get(RESTART_COUNT) or 0)


@dataclass(frozen=True)
class World:
    """The rank of this process: `rank` of `size`, and `local_rank` of `local_size` on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    source: Source
    """The launcher that has started the rank."""


class _Launcher(NamedTuple):
    """Names of a launcher's variables. If there are several names for a local value, the first name that is set is
    used."""

    source: Source
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        *("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # For local ranks, MPICH and Intel MPI set variables MPI_*, and Cray's launcher sets PMI_LOCAL_*.
    _Launcher(
        *("mpirun", "PMI_RANK", "PMI_SIZE"),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _Launcher(
        *("slurm", "SLURM_PROCID", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    ),
)
"""Launchers from the innermost to the outermost, as in `srun torchrun` or in `mpirun` within a SLURM allocation."""


class _Stated(NamedTuple):
    """The rank of this process according to one launcher."""

    launcher: _Launcher
    world: World

    def __str__(self) -> str:
        return f"{self.launcher.rank} {self.world.rank} of {self.launcher.size} {self.world.size}"


def world_from_env(environ: Mapping[str, str] = os.environ) -> World:
    """Read the launcher's variables. Errors: ValueError if they are not valid numbers or contradict each other.

    >>> world_from_env({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    World(rank=3, size=4, local_rank=1, local_size=2, source='torchrun')
    >>> world_from_env({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"})
    World(rank=1, size=2, local_rank=1, local_size=2, source='mpirun')
    >>> world_from_env({})
    World(rank=0, size=1, local_rank=0, local_size=1, source='alone')
    """
    stated = list(_stated(environ))
    if not stated:
        if "PMIX_RANK" in environ:
            raise ValueError(
                f"PMIX_RANK {environ['PMIX_RANK']!r}: names a rank, but no variable says of how many; set RANK and "
                "WORLD_SIZE, or start the ranks with mpirun, srun or torchrun"
            )
        return World(rank=0, size=1, local_rank=0, local_size=1, source="alone")
    inner = stated[0]
    for outer in stated[1:]:
        if _contradict(inner, outer):
            raise ValueError(f"{inner}: contradicts {outer}; unset those of the launcher that did not start the ranks")
    if inner.world.size == 1 and inner.launcher.source != "torchrun":  # a single task, which may start local ranks
        return World(rank=0, size=1, local_rank=0, local_size=1, source="alone")
    # Scripts copy the variables of mpirun or srun to RANK and WORLD_SIZE, and srun also sets PMI_*.
    # Among launchers with the same rank, prefer a launcher that also gives the number of local ranks.
    same = [each for each in stated if (each.world.rank, each.world.size) == (inner.world.rank, inner.world.size)]
    with_local_size = (each for each in same if any(name in environ for name in each.launcher.local_size))
    return next(with_local_size, inner).world


def _stated(environ: Mapping[str, str]) -> Iterator[_Stated]:
    """Yield the rank according to each launcher in the environment, from the innermost to the outermost launcher."""
    launchers = [launcher for launcher in _LAUNCHERS if launcher.rank in environ or launcher.size in environ]
    if launchers and any(name in environ for name in _STARTED_HERE):
        launchers = launchers[:1]
    for launcher in launchers:
        if launcher.source == "slurm":
            # A shell inside an allocation has SLURM_NTASKS but no SLURM_PROCID, and only srun's own tasks are ranks.
            if launcher.rank in environ and not batch_tasks(environ):
                yield _Stated(launcher, _slurm_world(environ))
            continue
        missing = [name for name in (launcher.rank, launcher.size) if name not in environ]
        if not missing:
            yield _Stated(launcher, _world(environ, launcher))
        elif not _said_by_another(environ, launcher, launchers):
            present = launcher.size if launcher.rank in missing else launcher.rank
            raise ValueError(f"{missing[0]} is not set, though {present} {environ[present]!r} is; launchers set both")


def _world(environ: Mapping[str, str], launcher: _Launcher, size_name: str = "") -> World:
    """Return the rank according to the variables of `launcher`. Errors: ValueError, naming the variable, if a number is
    missing or invalid."""
    size_name = size_name or launcher.size
    size = _number(environ, size_name, least=1)
    rank = _number(environ, launcher.rank, below=(size, size_name))
    local_size_name = next((name for name in launcher.local_size if name in environ), size_name)
    if launcher.source == "slurm":
        local_size = _slurm_local_size(environ, size)
    else:
        local_size = _number(environ, local_size_name, least=1, most=(size, size_name))
    local_name = next((name for name in launcher.local_rank if name in environ), None)
    if local_name is None and rank >= local_size:
        raise ValueError(f"{launcher.local_rank[0]} is not set, though {local_size_name} is; launchers set both")
    local_rank = rank if local_name is None else _number(environ, local_name, below=(local_size, local_size_name))
    return World(rank, size, local_rank, local_size, launcher.source)


def _slurm_world(environ: Mapping[str, str]) -> World:
    """Return the rank of a task that srun started. A shell that `salloc` opened is a step of one task, even if its job
    has several tasks, so it counts as a single rank."""
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if _number(environ, name, 1, least=1) == 1:
        return World(rank=0, size=1, local_rank=0, local_size=1, source="slurm")
    return _world(environ, _LAUNCHERS[-1], name)


def batch_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks that this process could start if it is a SLURM batch script, otherwise 0.

    SLURM sets the variables of task 0 for the batch script. A task of srun also has the variables of its step.

    >>> batch_tasks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
    8
    >>> batch_tasks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"})
    0
    """
    step = any(name in environ for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"))
    tasks = environ.get("SLURM_NTASKS", "")
    if step or environ.get("SLURM_PROCID") != "0" or not tasks.isdecimal() or len(tasks) > MOST_DIGITS:
        return 0
    return int(tasks) if int(tasks) > 1 else 0


def _said_by_another(environ: Mapping[str, str], launcher: _Launcher, launchers: list[_Launcher]) -> bool:
    """Whether only one of `launcher`'s two variables is set, and it equals the same variable of another launcher that
    sets both. The variable was then exported by a script."""
    partial = (environ.get(launcher.rank), environ.get(launcher.size))
    pairs = [(environ.get(other.rank), environ.get(other.size)) for other in launchers if other is not launcher]
    return any(None not in pair and (partial[0] == pair[0] or partial[1] == pair[1]) for pair in pairs)


def _contradict(inner: _Stated, outer: _Stated) -> bool:
    """Whether two launchers contradict each other: they set different ranks for a world of the same size, or mpirun has
    started torchrun several times. Worlds of different sizes may be nested, because tasks of srun may start ranks."""
    inside, outside = inner.world, outer.world
    if outside.size == 1 or (inside.rank, inside.size) == (outside.rank, outside.size):
        return False
    return (inside.source == "torchrun" and outside.source != "slurm") or inside.size == outside.size


def is_first_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process prints messages for all ranks. This function may be called before the launcher's variables
    are checked."""
    return next((environ[launcher.rank] for launcher in _LAUNCHERS if launcher.rank in environ), "0") == "0"


def note(line: str) -> None:
    """Print a message for the user on stderr, only on the first rank."""
    if is_first_rank():
        print(f"mega: {line}", file=sys.stderr, flush=True)


def point_to_first_host(world: World, environ: MutableMapping[str, str] = os.environ) -> None:
    """Under srun, set MASTER_ADDR and MASTER_PORT, which torchrun would set but srun does not.

    >>> environ = {"SLURM_STEP_NODELIST": "node[003-010,012]", "SLURM_JOB_ID": "7"}
    >>> point_to_first_host(World(3, 4, 3, 4, "slurm"), environ)
    >>> environ["MASTER_ADDR"], environ["MASTER_PORT"]
    ('node003', '20007')
    """
    if world.source == "slurm":
        environ.setdefault("MASTER_ADDR", _first_host(environ))
        environ.setdefault("MASTER_PORT", str(20000 + _number(environ, "SLURM_JOB_ID", 0) % 20000))


def check_address(world: World, environ: Mapping[str, str] = os.environ) -> None:
    """Check that the environment has a rendezvous address for `world`. Errors: ValueError, naming the variable, if it
    is missing or invalid.

    >>> check_address(World(0, 8, 0, 8, "mpirun"), {"MASTER_ADDR": "node003"})
    Traceback (most recent call last):
    ...
    ValueError: MASTER_PORT is not set: must be a free port on the first rank's host, where 8 ranks meet; mpirun takes \
-x MASTER_PORT=PORT
    """
    for name, word, rule in (
        ("MASTER_ADDR", "HOST", "the first rank's host"),
        ("MASTER_PORT", "PORT", "a free port on the first rank's host"),
    ):
        if not environ.get(name, "").strip():
            problem = f"{name} {environ[name]!r}" if name in environ else f"{name} is not set"
            advice = f"; mpirun takes -x {name}={word}" if world.source == "mpirun" else ""
            raise ValueError(f"{problem}: must be {rule}, where {world.size} ranks meet{advice}")
    _number(environ, "MASTER_PORT", least=1, most=(65535, ""))


def cores() -> int:
    """Return the number of CPU cores that this process may use, which a scheduler or container may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _first_host(environ: Mapping[str, str]) -> str:
    """Return the first host of SLURM's list of hosts, such as `node[003-010,012]` or `a1,a2`.

    >>> _first_host({"SLURM_STEP_NODELIST": "node[003-010,012]"}), _first_host({"SLURM_NODELIST": "a1,a2"})
    ('node003', 'a1')
    """
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "localhost"
    head, bracket, rest = hosts.partition("[")
    if not bracket or "," in head:
        return hosts.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int:
    """Return the number of tasks on this node, from SLURM_STEP_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE, such as
    `4(x2),2`.

    >>> _slurm_local_size({"SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_NODEID": "2"}, 10)
    2
    """
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if tasks is None:
        return _number(environ, "SLURM_NTASKS_PER_NODE", size)
    counts: list[int] = []
    try:
        for part in tasks.split(","):
            count, _, repeat = part.partition("(x")
            counts += [int(count)] * int(repeat.rstrip(")") or 1)
        return counts[_number(environ, "SLURM_NODEID", 0)]
    except (ValueError, IndexError):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE {tasks!r}: must list the tasks of every node") from None


def _number(
    environ: Mapping[str, str],
    name: str,
    default: int | None = None,
    *,
    least: int = 0,
    below: tuple[int, str] | None = None,
    most: tuple[int, str] | None = None,
) -> int:
    """Return the integer in the variable `name`. below, most: an exclusive or inclusive upper bound, and the name of
    the variable that sets this bound.

    >>> _number({"RANK": "5"}, "RANK", below=(2, "WORLD_SIZE"))
    Traceback (most recent call last):
    ...
    ValueError: RANK 5: must be 0 to 1, with WORLD_SIZE 2
    """
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set in the environment, though the launcher should have set it")
        return default
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} {text!r}: must be a whole number, as launchers set it")
    bound, by = below or most or (None, "")
    last = None if bound is None else bound - (below is not None)
    if len(text) > MOST_DIGITS or int(text) < least or (last is not None and int(text) > last):
        rule = f"at least {least}" if last is None else f"{least} to {last}"
        raise ValueError(f"{name} {text[:MOST_DIGITS]}: must be {rule}{f', with {by} {bound}' * bool(by)}")
    return int(text)


def ranks(world: World, nproc: int | None, dry: int | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks of a run: `dry` in a dry run (`--world`), otherwise the launcher's number, `--nproc`
    or 1.

    Errors: ValueError in a SLURM batch script that has several tasks but starts only one process, so that the other
        tasks would be idle.

    >>> ranks(world_from_env({}), nproc=4)
    4
    """
    if dry is not None:
        return dry
    if world.source == "alone":
        if nproc is None and (tasks := batch_tasks(environ)):
            raise ValueError(
                f"SLURM_PROCID 0 of SLURM_NTASKS {tasks}: this is the batch script itself, which is one process; begin "
                f"the command with `srun` to start {tasks} ranks, or give --nproc N for N ranks on this host"
            )
        return nproc or 1
    if nproc is not None and nproc != world.local_size:
        raise ValueError(
            f"--nproc {nproc}: {world.source} has started {world.local_size} ranks on this host already; "
            "leave the flag out"
        )
    return world.size


def supervised_ranks(
    world: World, nproc: int, hosts: int | None, environ: MutableMapping[str, str] = os.environ
) -> int:
    """Return the number of ranks of a run whose ranks this command starts and restarts, on one host or on several.

    Several hosts need MASTER_ADDR and MASTER_PORT. This process is not a rank, so the launcher's variables are removed
    from `environ`. Errors: ValueError if a launcher has started ranks, or if hosts have no address.

    >>> environ = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    >>> supervised_ranks(world_from_env(environ), nproc=8, hosts=4, environ=environ)
    32
    """
    flag = "--max-restarts" if hosts is None else f"--hosts {hosts}"
    if any(name in environ for name in _STARTED_HERE):
        raise ValueError(f"{flag}: torchrun starts ranks again itself, by its own --max-restarts; leave the flag out")
    # Kubernetes' PyTorchJob numbers its pods by RANK and WORLD_SIZE, without variables for local ranks.
    has_local_size = any(name in environ for launcher in _LAUNCHERS for name in launcher.local_size)
    if (world.local_size > 1 and (has_local_size or hosts is None)) or (hosts is None and world.size > 1):
        alone = "one process a host, or" if hosts is not None else "give --hosts N, one process a host, or"
        raise ValueError(
            f"{flag}: {world.source} has started {world.size} ranks, {world.local_size} on this host, which this "
            f"command cannot start again; {alone} leave the flag out"
        )
    if hosts is not None:
        point_to_first_host(world, environ)
        check_address(replace(world, size=hosts * nproc), environ)
    for launcher in _LAUNCHERS:
        for name in (launcher.rank, launcher.size):
            environ.pop(name, None)
    return nproc * (hosts or 1)
