"""Which exchange ranks stand in, from the flight recorder of torch's process groups: which ranks have called it, and
which have not. One line, of what every rank that answers says of itself (position.py).

The recorder is a ring of the newest exchanges of each group, which NCCL and gloo fill as they are called.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple, TypedDict

from mega.core.words import name_ranks

SIZE = "TORCH_FR_BUFFER_SIZE"
"""The variable of how many exchanges are recorded; torch's default depends on its version."""

EXCHANGES = 200


class RecordedExchange(TypedDict, total=False):
    """Of one entry of a dump, what is read."""

    process_group: list[str]
    pg_id: int
    collective_seq_id: int
    is_p2p: bool
    profiling_name: str
    input_sizes: list[list[int]]


class Dump(TypedDict, total=False):
    """What the recorder writes, of which this is read. pg_status: by the number of a group."""

    entries: list[RecordedExchange]
    pg_status: dict[str, dict[str, int | str]]


class CalledExchange(NamedTuple):
    """The newest exchange that a rank has called, of a group of ranks. number: in its group. done: the newest that
    has ended, where that is known."""

    group: str
    number: int
    what: str
    done: int = -1


def record() -> None:
    """Have exchanges recorded; before groups are made."""
    os.environ.setdefault(SIZE, str(EXCHANGES))


def own_exchanges() -> tuple[CalledExchange, ...]:
    """Of this process, of each group; () where nothing is recorded."""
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
            except (RuntimeError, ValueError):  # a report is not worth an error
                return ()
    return ()


def newest(dump: Dump) -> list[CalledExchange]:
    """Of each group of a recorder's dump."""
    found: dict[str, CalledExchange] = {}
    for entry in dump.get("entries", ()):
        name, words = (str(each) for each in entry["process_group"])
        group, number = words if words not in ("", "undefined") else f"group {name}", int(entry["collective_seq_id"])
        if entry["is_p2p"] or (group in found and found[group].number >= number):
            continue
        sizes = ", ".join(map(str, entry.get("input_sizes", ())))
        done = dump.get("pg_status", {}).get(str(entry.get("pg_id")), {}).get("last_completed_collective", -1)
        what = f"{str(entry['profiling_name']).rpartition(':')[2]} of {sizes or 'nothing'}"
        found[group] = CalledExchange(group, number, what, int(done))
    return list(found.values())


def missing(exchanges: Mapping[int, tuple[CalledExchange, ...]], silent: tuple[int, ...] = ()) -> str:
    """The line about the exchange that some ranks have called and others have not; "" where there is none.

    exchanges: of each rank that answers. silent: those that do not.

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
        called = sorted(rank for rank, one in ranks.items() if one.number == number)
        behind = sorted(rank for rank, one in ranks.items() if one.number < number)
        if all(ranks[rank].done >= number for rank in called) or not (behind or silent):
            continue
        line = f"exchange {number} of {group} ({ranks[called[0]].what}) was called by {name_ranks(called)}"
        if behind:
            return f"{line}, and not by {name_ranks(behind)}"
        return f"{line}; {name_ranks(list(silent))} {'does' if len(silent) == 1 else 'do'} not say"
    return ""
