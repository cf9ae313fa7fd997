"""Finds the collective in which ranks wait, and the ranks that have called it, with the flight recorder of torch's
process groups. Each rank reports its newest calls (position.py), and this module combines all reports into one message.

The recorder is a ring buffer of the newest exchanges of each group; NCCL and gloo add an entry at each call.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple, TypedDict

from mega.core.words import name_ranks

SIZE = "TORCH_FR_BUFFER_SIZE"
"""Environment variable for the size of the ring buffer. The default depends on torch's version."""

EXCHANGES = 200


class RecordedExchange(TypedDict, total=False):
    """The fields of a dump's entry that this module reads."""

    process_group: list[str]
    pg_id: int
    collective_seq_id: int
    is_p2p: bool
    profiling_name: str
    input_sizes: list[list[int]]


class Dump(TypedDict, total=False):
    """The fields of a recorder's dump that this module reads. pg_status: number of a group -> its status."""

    entries: list[RecordedExchange]
    pg_status: dict[str, dict[str, int | str]]


class CalledExchange(NamedTuple):
    """The newest exchange that a rank has called in one group of ranks."""

    group: str
    """The ranks of the group, or its name."""
    number: int
    """Sequence number of the exchange in the group."""
    what: str
    """Name of the collective, and the sizes of its inputs."""
    done: int = -1
    """Number of the newest exchange that has ended; -1 if unknown."""


def record() -> None:
    """Turn the recorder on. Call this function before process groups are created."""
    os.environ.setdefault(SIZE, str(EXCHANGES))


def own_exchanges() -> tuple[CalledExchange, ...]:
    """Return the newest exchange of this process in each group, or () if the recorder has no entries."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return ()
    c10d = sys.modules.get("torch._C._distributed_c10d")
    nccl = torch.distributed.get_backend() == "nccl"
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json") if nccl else ("_dump_fr_trace_json",):
        dump = getattr(c10d, name, None)
        if dump is not None:
            try:
                return tuple(newest(json.loads(dump(True, False))))
            except (RuntimeError, ValueError):  # a failure to report must not end the run
                return ()
    return ()


def newest(dump: Dump) -> list[CalledExchange]:
    """Return the newest exchange of each group in a dump of the recorder."""
    exchanges: dict[str, CalledExchange] = {}
    for entry in dump.get("entries", ()):
        name, words = (str(each) for each in entry["process_group"])
        group, number = words if words not in ("", "undefined") else f"group {name}", int(entry["collective_seq_id"])
        if entry["is_p2p"] or (group in exchanges and exchanges[group].number >= number):
            continue
        sizes = ", ".join(map(str, entry.get("input_sizes", ())))
        completed = dump.get("pg_status", {}).get(str(entry.get("pg_id")), {}).get("last_completed_collective", -1)
        description = f"{str(entry['profiling_name']).rpartition(':')[2]} of {sizes or 'nothing'}"
        exchanges[group] = CalledExchange(group, number, description, int(completed))
    return list(exchanges.values())


def missing(exchanges: Mapping[int, tuple[CalledExchange, ...]], silent: tuple[int, ...] = ()) -> str:
    """Return a message about the exchange that only some ranks have called, or "" if no rank is behind.

    exchanges: rank -> its newest exchanges, for each rank that answers. silent: the ranks that do not answer.

    >>> ahead = CalledExchange("ranks 0-3", 57, "allreduce of [3]", 56)
    >>> behind = CalledExchange("ranks 0-3", 56, "broadcast of [1]", 56)
    >>> missing({0: (ahead,), 2: (ahead,), 3: (behind,)})
    'exchange 57 of ranks 0-3 (allreduce of [3]) was called by ranks 0, 2, and not by rank 3'
    >>> missing({0: (ahead,), 2: (ahead,)}, (1,))
    'exchange 57 of ranks 0-3 (allreduce of [3]) was called by ranks 0, 2; rank 1 does not say'
    >>> missing({0: (behind,), 2: (behind,)})
    ''
    """
    groups: dict[str, dict[int, CalledExchange]] = {}
    for rank, each in exchanges.items():
        for one in each:
            groups.setdefault(one.group, {})[rank] = one
    for group, ranks in sorted(groups.items()):
        number = max(one.number for one in ranks.values())
        callers = sorted(rank for rank, one in ranks.items() if one.number == number)
        behind = sorted(rank for rank, one in ranks.items() if one.number < number)
        # An exchange that has ended on all its callers does not keep any rank waiting.
        if all(ranks[rank].done >= number for rank in callers) or not (behind or silent):
            continue
        line = f"exchange {number} of {group} ({ranks[callers[0]].what}) was called by {name_ranks(callers)}"
        if behind:
            return f"{line}, and not by {name_ranks(behind)}"
        return f"{line}; {name_ranks(list(silent))} {'does' if len(silent) == 1 else 'do'} not say"
    return ""
