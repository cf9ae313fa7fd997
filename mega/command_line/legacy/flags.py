"""Flags of Megatron-LM and of DeepSpeed's forks of it that are no options here: those that mean nothing any more, and
those refused, from flags.toml.

A flag that *is* an option carries its Megatron-LM spelling in core/config/sections.py; what a program's name stands for
is in programs.py. These flags are accepted with one line on why they change nothing, or refused with one line on why.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from mega.command_line.argv import MANY, Drops, Refuses
from mega.command_line.legacy.tables import table

_COUNTS = {"switches": 0, "values": 1, "lists": MANY}
"""How flags that change nothing are listed -> how many values follow each."""


@functools.cache
def obsolete_flags() -> Mapping[str, Drops | Refuses]:
    """Every such flag, and what becomes of it; one that ends in `*` is all that begin so.

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
