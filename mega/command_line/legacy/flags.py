"""Flags of Megatron-LM and of DeepSpeed's forks that have no option here: the obsolete and refused flags in flags.toml.

The Megatron-LM spelling of an option is a property of the option, in core/config/sections.py; `programs.py` handles
names of programs. An obsolete flag is accepted with a message that explains why it has no effect; a refused flag is an
error with a reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from mega.command_line.argv import MANY, Drops, Refuses
from mega.command_line.legacy.tables import table

_COUNTS = {"switches": 0, "values": 1, "lists": MANY}
"""Key of obsolete flags in flags.toml -> number of values that follow each flag."""


@functools.cache
def obsolete_flags() -> Mapping[str, Drops | Refuses]:
    """Every flag in flags.toml -> its meaning. A flag that ends in `*` matches all flags with this prefix.

    >>> obsolete_flags()["--DDP-impl"]
    Drops(values=1, reason='gradients always lie in contiguous buckets', families=(), only=())
    """
    return dict(_rows())


def _rows() -> Iterator[tuple[str, Drops | Refuses]]:
    content = table("flags")
    for row in content["changes_nothing"]:
        families, only = (tuple(row.get(key, ())) for key in ("families", "only"))
        for key, count in _COUNTS.items():
            for flag in row.get(key, ()):
                yield flag, Drops(count, row["reason"], families, only)
    for row in content["refused"]:
        for flag in row["flags"]:
            yield flag, Refuses(row["reason"])
