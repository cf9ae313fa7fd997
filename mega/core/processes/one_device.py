"""A gloo backend for a process with many groups, all of which share one device and therefore one thread.

For every group, torch opens a gloo device. The thread of a device wakes up a hundred times per second, even if its
group is idle. A pool of ranks keeps the groups of all layouts that have run in it. The pools of the tests had 2,500
such threads, which woke up 85,000 times per second; 540 of them used 0.3 of a core. This module does not depend on
layouts or on the rendezvous.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

NAME = "gloo_one_device"
"""The name of the backend in torch."""

_DEVICES: dict[str, list[object]] = {}
"""The devices of this process, keyed by the value of GLOO_SOCKET_IFNAME. Devices stay open until the process ends."""


def gloo_on_one_device() -> str:
    """Register the backend with torch, and return its name for `dist.new_group`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, devices=["cpu", "cuda"])
    return NAME


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Create a group as torch does for "gloo", but reuse the devices of this process."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces not in _DEVICES:
        names = [name for name in interfaces.split(",") if name]
        _DEVICES[interfaces] = [dist.ProcessGroupGloo.create_device(interface=name) for name in names] or [
            dist.ProcessGroupGloo.create_default_device()
        ]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout, options._threads = _DEVICES[interfaces], timeout, 2 * len(_DEVICES[interfaces])
    return dist.ProcessGroupGloo(store, rank, size, options)
