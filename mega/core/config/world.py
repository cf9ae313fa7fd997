"""How many ranks there are, which one this is, where they meet, as the launcher sets them in the environment. No torch.

torchrun sets WORLD_SIZE and its kin; a bare `srun` sets SLURM_*; anything else is one process, which may
start more of its own with `--nproc`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

Source = Literal["torchrun", "slurm", "alone"]

MEETING_FILE = "MEGA_MEETING_FILE"
"""Environment variable: where ranks that --nproc started meet."""


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, and `local_rank` of `local_size` on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    source: Source


def world_from_env(environ: Mapping[str, str] = os.environ) -> World:
    """Reads the launcher's variables; ValueError where they are not numbers or contradict each other.

    >>> world_from_env({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    World(rank=3, size=4, local_rank=1, local_size=2, source='torchrun')
    >>> world_from_env({})
    World(rank=0, size=1, local_rank=0, local_size=1, source='alone')
    """
    if "WORLD_SIZE" in environ:
        size = _number(environ, "WORLD_SIZE")
        rank = _number(environ, "RANK", 0)
        return _consistent(
            World(
                rank=rank,
                size=size,
                local_rank=_number(environ, "LOCAL_RANK", rank),
                local_size=_number(environ, "LOCAL_WORLD_SIZE", size),
                source="torchrun",
            )
        )
    # A shell inside an allocation has SLURM_NTASKS but no SLURM_PROCID: only srun's own tasks are ranks.
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_NTASKS", 1) > 1:
        size = _number(environ, "SLURM_NTASKS")
        rank = _number(environ, "SLURM_PROCID")
        return _consistent(
            World(
                rank=rank,
                size=size,
                local_rank=_number(environ, "SLURM_LOCALID", rank),
                local_size=_slurm_local_size(environ, size),
                source="slurm",
            )
        )
    return World(rank=0, size=1, local_rank=0, local_size=1, source="alone")


def is_first_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process reports for all, for what is printed before the launcher's variables are checked."""
    return environ.get("RANK", environ.get("SLURM_PROCID", "0")) == "0"


def point_to_first_host(world: World, environ: MutableMapping[str, str] = os.environ) -> None:
    """Under srun, set the address at which ranks meet, which torchrun sets by itself.

    >>> environ = {"SLURM_STEP_NODELIST": "node[003-010,012]", "SLURM_JOB_ID": "7"}
    >>> point_to_first_host(World(3, 4, 3, 4, "slurm"), environ)
    >>> environ["MASTER_ADDR"], environ["MASTER_PORT"]
    ('node003', '20007')
    """
    if world.source == "slurm":
        environ.setdefault("MASTER_ADDR", _first_host(environ))
        environ.setdefault("MASTER_PORT", str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000))


def cores() -> int:
    """Processor cores that this process may use; a scheduler or a container may leave it few of the host's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_NAMED = 8
"""Ranks that a line names before it counts the rest."""


def name_ranks(ranks: Sequence[int]) -> str:
    """How a line names some ranks.

    >>> name_ranks([3]), name_ranks(range(1, 11))
    ('rank 3', 'ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more')
    """
    rest = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{rest}"


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


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set in the environment, though the launcher should have set it")
        return default
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} {text!r}: must be a whole number, as launchers set it")
    return int(text)


def _consistent(world: World) -> World:
    if not 0 <= world.rank < world.size:
        raise ValueError(
            f"rank {world.rank}: must be 0 to {world.size - 1} in a world of {world.size} ({world.source})"
        )
    if not 0 <= world.local_rank < world.local_size:
        raise ValueError(f"local rank {world.local_rank}: must be 0 to {world.local_size - 1}")
    return world


def ranks(world: World, nproc: int | None, dry: int | None = None) -> int:
    """How many ranks a run has: the launcher's, else `--nproc`, else one; or the `dry` run's `--world`.

    >>> ranks(world_from_env({}), nproc=4)
    4
    """
    if dry is not None:
        return dry
    if world.source == "alone":
        return nproc or 1
    if nproc is not None and nproc != world.local_size:
        raise ValueError(
            f"--nproc {nproc}: {world.source} has started {world.local_size} ranks on this host already; "
            "leave the flag out"
        )
    return world.size
