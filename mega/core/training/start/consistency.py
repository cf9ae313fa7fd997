"""One comparison of ranks before the first step. Code, flags, tokenizer and data must be the same on all of them;
devices, drivers, versions of libraries and clocks should be, and differences are reported.

    1 every rank states what it has          words and short digests; of large files a part of their content
    2 one reduction of their hashes         all that a run costs where everything agrees
    3 where hashes differ, all of it meets   one line names what differs, who has what, and their hosts

It knows neither a model nor a step.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from mega.core.device import Device
from mega.core.parallel.collectives import all_reduce, gather_json
from mega.core.parallel.mesh import Axis
from mega.core.training.start.equal import code, contents, flags
from mega.core.training.start.inputs import Inputs
from mega.core.words import name_ranks

CLOCKS_APART = 60.0
"""Seconds by which clocks may differ before a line says so: times in logs and of files would mislead."""

LONGEST = 200
"""Characters of a value that are shown."""


class Comparable(NamedTuple):
    """What a rank has, by names that a user knows. must: the same on every rank. better: said where it differs."""

    must: Mapping[str, str]
    better: Mapping[str, str]


def comparable(inputs: Inputs, device: Device) -> Comparable:
    """This rank's."""
    return Comparable({**code(), **flags(inputs.run), **contents(inputs)}, _machine(device))


def _machine(device: Device) -> dict[str, str]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    return {"the device": device.name, **versions, **device.library_versions()}


def check_consistent(
    own: Comparable, everyone: Axis, device: torch.device, report: Callable[[str], None] = lambda line: None
) -> None:
    """Phases 2 and 3. report: is given a line for each of what is better alike. Errors: ValueError on every rank."""
    numbers = torch.tensor([*_numbers(own.must), *_numbers(own.better)], dtype=torch.float64, device=device)
    least, most = numbers.clone(), numbers.clone()
    all_reduce(least, everyone, "min")
    all_reduce(most, everyone, "max")
    same = (least == most).view(2, -1).all(1).tolist()
    if not same[0]:
        differ = _differences(own.must, everyone, device)
        raise ValueError(
            f"{'; '.join(differ)}: must be the same on every rank; start all of them with the same flags and files"
        )
    if not same[1]:
        for line in _differences(own.better, everyone, device):
            report(f"ranks differ in {line}")
    _compare_clocks(everyone, device, report)


def _numbers(found: Mapping[str, str]) -> list[int]:
    """A hash as 8 numbers of 32 bits, which every backend reduces exactly as floats of 64."""
    digest = hashlib.sha256(json.dumps(dict(found), sort_keys=True).encode()).hexdigest()
    return [int(digest[at : at + 8], 16) for at in range(0, 64, 8)]


def _differences(own: Mapping[str, str], everyone: Axis, device: torch.device) -> list[str]:
    """For each name that is not alike: its values and who has them."""
    shown = {name: value[:LONGEST] for name, value in own.items()}
    met = gather_json((socket.gethostname(), shown), everyone, device)
    hosts = [host for host, _ in met]
    names = dict.fromkeys(name for _, each in met for name in each)
    values = {name: [each.get(name) for _, each in met] for name in names}
    return [f"{name} {by_rank(found, hosts)}" for name, found in values.items() if len(set(found)) > 1]


def by_rank(values: Sequence[object], hosts: Sequence[str]) -> str:
    """Which ranks have which value; hosts: of the ranks, named where there are several.

    >>> by_rank(["a", "a", "b"], ["n1", "n1", "n2"])
    'a of ranks 0, 1 on n1, b of rank 2 on n2'
    >>> by_rank([1, 2], ["n1", "n1"])
    '1 of rank 0, 2 of rank 1'
    """
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    several, parts = len(set(hosts)) > 1, []
    for value, who in ranks.items():
        there = dict.fromkeys(hosts[rank] for rank in who)
        where = f" on {', '.join(there)}" if several and len(there) <= 3 else ""
        parts.append(f"{'none' if value is None else value} of {name_ranks(who)}{where}")
    return ", ".join(parts)


def _compare_clocks(everyone: Axis, device: torch.device, report: Callable[[str], None]) -> None:
    """Say where clocks are apart. Ranks have just left an exchange together."""
    now = torch.tensor([time.time()], dtype=torch.float64, device=device)
    least, most = now.clone(), now.clone()
    all_reduce(least, everyone, "min")
    all_reduce(most, everyone, "max")
    if float(most - least) <= CLOCKS_APART:
        return
    met = gather_json((socket.gethostname(), float(now)), everyone, device)
    middle = sorted(seen for _, seen in met)[len(met) // 2]
    off = {rank: seen - middle for rank, (_, seen) in enumerate(met) if abs(seen - middle) > CLOCKS_APART / 2}
    words = (f"rank {rank} on {met[rank][0]} {seconds:+.0f} s" for rank, seconds in list(off.items())[:8])
    report(f"clocks of ranks are apart, against the median: {', '.join(words)}; see that time is synchronised there")
