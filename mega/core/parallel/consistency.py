"""Compare values of all ranks before their work begins. Some values must be identical on all ranks, such as code and
weights. Others should be equal, such as drivers, library versions and clocks; their differences are reported.

    1 every rank lists its values          short strings and digests; large files are sampled
    2 one reduction of their hashes        the only cost if everything is equal
    3 if hashes differ, gather all values  one message names the differences, with their ranks and hosts

This module does not depend on what the values describe.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from mega.core.parallel.collectives import all_reduce, gather_json
from mega.core.parallel.mesh import Axis
from mega.core.words import name_ranks

CLOCK_LIMIT = 60.0
"""Clock differences above this number of seconds are reported, because they make the times in logs misleading."""

LONGEST = 200
"""Maximum number of characters of a value in a message."""


class Comparable(NamedTuple):
    """The values of a rank, by user-readable names. must: values that must be equal on all ranks. better: values that
    should be equal; differences are reported."""

    must: Mapping[str, str]
    better: Mapping[str, str]


def check_consistent(
    comparable_values: Comparable,
    everyone: Axis,
    device: torch.device,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Perform phases 2 and 3: compare the values of all ranks. report: function that is called with a message for each
    difference in `better`.
    Errors: ValueError on every rank."""
    numbers = torch.tensor(
        [*_numbers(comparable_values.must), *_numbers(comparable_values.better)], dtype=torch.float64, device=device
    )
    least, most = numbers.clone(), numbers.clone()
    all_reduce(least, everyone, "min")
    all_reduce(most, everyone, "max")
    same = (least == most).view(2, -1).all(1).tolist()
    if not same[0]:
        differ = _differences(comparable_values.must, everyone, device)
        raise ValueError(
            f"{'; '.join(differ)}: must be the same on every rank; start all of them with the same flags and files"
        )
    if not same[1]:
        for line in _differences(comparable_values.better, everyone, device):
            report(f"ranks differ in {line}")
    _compare_clocks(everyone, device, report)


def _numbers(values: Mapping[str, str]) -> list[int]:
    """Return a hash of `values` as eight 32-bit integers. They are exact in float64, so every backend can reduce
    them."""
    digest = hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()
    return [int(digest[at : at + 8], 16) for at in range(0, 64, 8)]


def _differences(own_values: Mapping[str, str], everyone: Axis, device: torch.device) -> list[str]:
    """Return a message for each name whose values differ between ranks, with the values and their ranks."""
    shortened = {name: value[:LONGEST] for name, value in own_values.items()}
    gathered_values = gather_json((socket.gethostname(), shortened), everyone, device)
    hosts = [host for host, _ in gathered_values]
    names = dict.fromkeys(name for _, each in gathered_values for name in each)
    values = {name: [each.get(name) for _, each in gathered_values] for name in names}
    return [
        f"{name} {by_rank(rank_values, hosts)}" for name, rank_values in values.items() if len(set(rank_values)) > 1
    ]


def by_rank(values: Sequence[object], hosts: Sequence[str]) -> str:
    """Return a message with the ranks of each value. hosts: the host of each rank; the message names hosts if there are
    several.

    >>> by_rank(["a", "a", "b"], ["n1", "n1", "n2"])
    'a of ranks 0, 1 on n1, b of rank 2 on n2'
    >>> by_rank([1, 2], ["n1", "n1"])
    '1 of rank 0, 2 of rank 1'
    """
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    several_hosts, parts = len(set(hosts)) > 1, []
    for value, same in ranks.items():
        host_names = dict.fromkeys(hosts[rank] for rank in same)
        on_hosts = f" on {', '.join(host_names)}" if several_hosts and len(host_names) <= 3 else ""
        parts.append(f"{'none' if value is None else value} of {name_ranks(same)}{on_hosts}")
    return ", ".join(parts)


def _compare_clocks(everyone: Axis, device: torch.device, report: Callable[[str], None]) -> None:
    """Report clocks that differ. Must be called directly after a collective, because a collective ends at about the
    same time on all ranks."""
    local_time = torch.tensor([time.time()], dtype=torch.float64, device=device)
    least, most = local_time.clone(), local_time.clone()
    all_reduce(least, everyone, "min")
    all_reduce(most, everyone, "max")
    if float(most - least) <= CLOCK_LIMIT:
        return
    clocks = gather_json((socket.gethostname(), float(local_time)), everyone, device)
    middle = sorted(clock for _, clock in clocks)[len(clocks) // 2]
    off = {rank: clock - middle for rank, (_, clock) in enumerate(clocks) if abs(clock - middle) > CLOCK_LIMIT / 2}
    offsets = (f"rank {rank} on {clocks[rank][0]} {seconds:+.0f} s" for rank, seconds in list(off.items())[:8])
    report(f"clocks of ranks are apart, against the median: {', '.join(offsets)}; see that time is synchronised there")
