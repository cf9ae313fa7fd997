"""How many ranks there are, which one this is, where they meet, as the launcher sets them in the environment. No torch.

torchrun sets WORLD_SIZE and its kin, mpirun OMPI_COMM_WORLD_* (Open MPI) or PMI_* (MPICH, Intel MPI, Cray), a bare
`srun` SLURM_*; anything else is one process, which may start more of its own with `--nproc`. Launchers nest: what the
inner one sets counts, and an outer one that names another rank of the same world is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Source = Literal["torchrun", "mpirun", "slurm", "alone"]

MEETING_FILE = "MEGA_MEETING_FILE"
"""Environment variable: where ranks that --nproc started meet."""

MEMORY_FOLDER = "MEGA_PEER_MEMORY"
"""Environment variable: the folder, in this host's memory, that outlives the ranks of an attempt."""

LAUNCHED = "MEGA_LAUNCHED"
"""Environment variable: when a run that is started again was launched, in time.monotonic() of this host."""

LAUNCHER_FILE = "MEGA_LAUNCHER_FILE"
"""Environment variable: how the names of files begin by which --nproc and its ranks tell each other how ranks ended."""

MOST_DIGITS = 18
"""Of a number that a launcher sets; one of thousands of digits takes long to read."""

_STARTED_HERE = (MEETING_FILE, "TORCHELASTIC_RUN_ID")
"""Set by --nproc and torchrun themselves: what they say of ranks counts, whatever they were started by."""


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, and `local_rank` of `local_size` on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    source: Source


class _Launcher(NamedTuple):
    """Variables by which a launcher names a rank; the first local ones that are set count."""

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
    # MPICH and Intel MPI name the local ranks MPI_*, Cray's launcher PMI_LOCAL_*.
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
"""From the inside out, as they are nested: `srun torchrun`, `mpirun` in an allocation of SLURM."""


class _Stated(NamedTuple):
    """What one launcher says of this process, in the words of its variables too."""

    launcher: _Launcher
    world: World

    def __str__(self) -> str:
        return f"{self.launcher.rank} {self.world.rank} of {self.launcher.size} {self.world.size}"


def world_from_env(environ: Mapping[str, str] = os.environ) -> World:
    """Reads the launcher's variables; ValueError where they are no such numbers or contradict each other.

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
    if inner.world.size == 1 and inner.launcher.source != "torchrun":  # which may start ranks of its own
        return World(rank=0, size=1, local_rank=0, local_size=1, source="alone")
    # Scripts set RANK and WORLD_SIZE from what mpirun or srun set, and srun PMI_*: those know this host's ranks.
    same = [each for each in stated if (each.world.rank, each.world.size) == (inner.world.rank, inner.world.size)]
    known = (each for each in same if any(name in environ for name in each.launcher.local_size))
    return next(known, inner).world


def _stated(environ: Mapping[str, str]) -> Iterator[_Stated]:
    """What each launcher in the environment says, from the inside out."""
    several = [launcher for launcher in _LAUNCHERS if launcher.rank in environ or launcher.size in environ]
    if several and any(name in environ for name in _STARTED_HERE):
        several = several[:1]
    for launcher in several:
        if launcher.source == "slurm":
            # A shell inside an allocation has SLURM_NTASKS but no SLURM_PROCID: only srun's own tasks are ranks.
            if launcher.rank in environ and not batch_tasks(environ):
                yield _Stated(launcher, _slurm_world(environ))
            continue
        missing = [name for name in (launcher.rank, launcher.size) if name not in environ]
        if not missing:
            yield _Stated(launcher, _world(environ, launcher))
        elif not _said_by_another(environ, launcher, several):
            given = launcher.size if launcher.rank in missing else launcher.rank
            raise ValueError(f"{missing[0]} is not set, though {given} {environ[given]!r} is; launchers set both")


def _world(environ: Mapping[str, str], launcher: _Launcher, size_name: str = "") -> World:
    """The process among all that the variables of `launcher` name. Errors: ValueError naming one of them."""
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
    """srun's task. A shell that `salloc` has opened is a step of one task in a job of many."""
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if _number(environ, name, 1, least=1) == 1:
        return World(rank=0, size=1, local_rank=0, local_size=1, source="slurm")
    return _world(environ, _LAUNCHERS[-1], name)


def batch_tasks(environ: Mapping[str, str]) -> int:
    """How many tasks a batch script of SLURM could start, in the script itself, which is no task of srun; else 0.

    SLURM calls the script task 0 of them all. A task that srun has started knows its step.

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


def _said_by_another(environ: Mapping[str, str], launcher: _Launcher, several: list[_Launcher]) -> bool:
    """Whether only WORLD_SIZE or RANK is set, as scripts export it, and another launcher says the same and more."""
    own = (environ.get(launcher.rank), environ.get(launcher.size))
    others = [(environ.get(other.rank), environ.get(other.size)) for other in several if other is not launcher]
    return any(None not in other and (own[0] == other[0] or own[1] == other[1]) for other in others)


def _contradict(inner: _Stated, outer: _Stated) -> bool:
    """Whether two launchers cannot both be right: the same world in another order, or one process that mpirun has
    started many of. Worlds of other sizes nest: tasks of srun start ranks of their own."""
    ours, theirs = inner.world, outer.world
    if theirs.size == 1 or (ours.rank, ours.size) == (theirs.rank, theirs.size):
        return False
    return (ours.source == "torchrun" and theirs.source != "slurm") or ours.size == theirs.size


def is_first_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process reports for all, for what is printed before the launcher's variables are checked."""
    return next((environ[launcher.rank] for launcher in _LAUNCHERS if launcher.rank in environ), "0") == "0"


def point_to_first_host(world: World, environ: MutableMapping[str, str] = os.environ) -> None:
    """Under srun, set the address at which ranks meet, which torchrun sets by itself.

    >>> environ = {"SLURM_STEP_NODELIST": "node[003-010,012]", "SLURM_JOB_ID": "7"}
    >>> point_to_first_host(World(3, 4, 3, 4, "slurm"), environ)
    >>> environ["MASTER_ADDR"], environ["MASTER_PORT"]
    ('node003', '20007')
    """
    if world.source == "slurm":
        environ.setdefault("MASTER_ADDR", _first_host(environ))
        environ.setdefault("MASTER_PORT", str(20000 + _number(environ, "SLURM_JOB_ID", 0) % 20000))


def check_address(world: World, environ: Mapping[str, str] = os.environ) -> None:
    """That the environment says where the ranks of `world` meet. Errors: ValueError naming the variable.

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
            found = f"{name} {environ[name]!r}" if name in environ else f"{name} is not set"
            how = f"; mpirun takes -x {name}={word}" if world.source == "mpirun" else ""
            raise ValueError(f"{found}: must be {rule}, where {world.size} ranks meet{how}")
    _number(environ, "MASTER_PORT", least=1, most=(65535, ""))


def cores() -> int:
    """Processor cores that this process may use; a scheduler or a container may leave it few of the host's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _first_host(environ: Mapping[str, str]) -> str:
    """First host of SLURM's list, such as `node[003-010,012]` or `a1,a2`.

    >>> _first_host({"SLURM_STEP_NODELIST": "node[003-010,012]"}), _first_host({"SLURM_NODELIST": "a1,a2"})
    ('node003', 'a1')
    """
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "localhost"
    head, bracket, rest = hosts.partition("[")
    if not bracket or "," in head:
        return hosts.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int:
    """Tasks of this node from SLURM_STEP_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE, such as `4(x2),2`.

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
    """The whole number that the variable `name` holds; `below`, `most`: a bound and the variable that sets it.

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
    """How many ranks a run has: the launcher's, else `--nproc`, else one; or the `dry` run's `--world`.

    Errors: ValueError where a batch script of SLURM has several tasks and starts one process: the others would idle.

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
    """How many ranks a run has whose ranks are started, and started again, by this command on one host or on several.

    Several hosts meet at MASTER_ADDR, MASTER_PORT; what a launcher says of this process counts no more: it is no rank.
    Errors: ValueError where a launcher has started ranks, or nothing says where hosts meet.

    >>> environ = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    >>> supervised_ranks(world_from_env(environ), nproc=8, hosts=4, environ=environ)
    32
    """
    flag = "--max-restarts" if hosts is None else f"--hosts {hosts}"
    if any(name in environ for name in _STARTED_HERE):
        raise ValueError(f"{flag}: torchrun starts ranks again itself, by its own --max-restarts; leave the flag out")
    # Kubernetes' PyTorchJob numbers its pods by RANK and WORLD_SIZE, and says nothing of ranks on one host.
    counted = any(name in environ for launcher in _LAUNCHERS for name in launcher.local_size)
    if (world.local_size > 1 and (counted or hosts is None)) or (hosts is None and world.size > 1):
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
