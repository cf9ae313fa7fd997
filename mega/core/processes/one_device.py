"""The gloo backend for a process with many groups: all its groups share one device, so one thread.

torch opens a gloo device for every group. The thread of a device wakes a hundred times a second, even while its group
is idle. A pool of ranks keeps the groups of all layouts that it has run. The pools of the tests had 2,500 such threads,
which woke 85,000 times a second; 540 of them took 0.3 of a core. This module knows no layout and no rendezvous.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

NAME = "gloo_one_device"
"""The name under which torch knows the backend."""

_DEVICES: dict[str, list[object]] = {}
"""The devices of this process, by the value of GLOO_SOCKET_IFNAME. They stay open until the process ends."""


def gloo_on_one_device() -> str:
    """Make the backend known to torch, and return its name for `dist.new_group`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, devices=["cpu", "cuda"])
    return NAME


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Create a group as torch does for "gloo", but on the devices that the process has."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces not in _DEVICES:
        names = [name for name in interfaces.split(",") if name]
        _DEVICES[interfaces] = [dist.ProcessGroupGloo.create_device(interface=name) for name in names] or [
            dist.ProcessGroupGloo.create_default_device()
        ]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout, options._threads = _DEVICES[interfaces], timeout, 2 * len(_DEVICES[interfaces])
    return dist.ProcessGroupGloo(store, rank, size, options)
