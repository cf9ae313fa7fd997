"""Joins and leaves the process group, under torchrun, mpirun, srun or `launch`, or as a single process.

This module does not depend on the work that ranks do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes import flight
from mega.core.processes.exit_reports import explain_exchanges_by
from mega.core.processes.interface import choose_interface, own_addresses
from mega.core.processes.position import silence
from mega.core.processes.rendezvous import hosts_store, meet
from mega.core.processes.roll_call import RollCall, in_time
from mega.core.processes.world import MEETING_FILE, World, cores, world_from_env

_CALLS: list[RollCall] = []
"""The roll call of this process, or an empty list if the process is not in a process group."""


def connect(
    kind: str = "auto", backend: str = "auto", timeout_minutes: float = 10, phase_timeout_minutes: float | None = None
) -> tuple[World, Device, Groups]:
    """Join the process group as the rank that the environment variables specify.

    phase_timeout_minutes: maximum time for which ranks that answer may keep other ranks waiting in a long phase. After
    this time, or after timeout_minutes in any other phase, the roll call ends the run, so the timeout of exchanges is
    the sum of both times. If `phase_timeout_minutes` is None, only the timeout of exchanges, 1.25 timeout_minutes,
    applies to ranks that answer. A single rank has no group, and every axis has size 1. Errors: ValueError if the
    device is absent, the backend does not support it, or the environment has no rendezvous address; OSError, naming the
    missing ranks, if some ranks do not join.
    """
    world, timeout = world_from_env(), timedelta(minutes=timeout_minutes)
    if world.size == 1:  # with more ranks, the ranks that NCCL aborts after a failure would all print
        _trace_fatal_signals()
    device = Device.choose(kind, world.local_rank, backend)
    if not device.is_cuda:
        torch.set_num_threads(threads(world.local_size))
    if world.size > 1 and not dist.is_initialized():
        if device.backend == "nccl" and not device.is_cuda:
            raise ValueError("--backend nccl: needs CUDA devices, and these ranks are on CPUs; valid: auto, gloo")
        # On a single host the loopback interface always works, even without a network.
        if world.local_size == world.size and device.backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        if device.backend == "gloo":
            _check_interfaces()
        flight.record()  # must run before any group exists
        store = meet(world, timeout_minutes)
        # Answer before the process group exists, so that a rank that fails to build the group does not keep the others
        # waiting.
        _answer_others(store, world, timeout_minutes, phase_timeout_minutes)
        choose_interface(store, world)
        with _naming_interface():
            dist.init_process_group(
                device.backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
            )
    extra_minutes = timeout_minutes / 4 if phase_timeout_minutes is None else phase_timeout_minutes
    return world, device, Groups(device.backend, timeout + timedelta(minutes=extra_minutes))


def _trace_fatal_signals() -> None:
    """Print the Python stack of each thread if a library aborts or crashes this process, for example when a destructor
    finds that a kernel has failed. Without this, only C++ frames would be printed."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr has no file descriptor
        if not faulthandler.is_enabled():
            faulthandler.enable()


def _check_interfaces() -> None:
    """Check that the interfaces of GLOO_SOCKET_IFNAME exist. Errors: ValueError if one does not exist."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in interfaces:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME {name}: is not a network interface of {socket.gethostname()}; "
                f"valid: {', '.join(interfaces)}"
            )


@contextlib.contextmanager
def _naming_interface() -> Iterator[None]:
    """Convert gloo's C++ error about an interface without an address to a ValueError."""
    try:
        yield
    except RuntimeError as error:
        _, separator, name = str(error).partition("Unable to find address for: ")
        if not separator:
            raise
        name = name.split("\n")[0].strip()
        raise ValueError(
            f"GLOO_SOCKET_IFNAME {name}: this network interface of {socket.gethostname()} has no address, so ranks "
            f"cannot meet; bring it up (`ip link set {name} up`), or name another one"
        ) from None


def _answer_others(store: dist.Store, world: World, minutes: float, phase_minutes: float | None) -> None:
    """Start a thread that answers other ranks' questions until `disconnect`, even while the main thread is blocked."""
    # The thread has its own connection, because the main thread may block in a call on its TCPStore client.
    client = store if MEETING_FILE in os.environ else store.clone()  # type: ignore[attr-defined]
    hosted = hosts_store(replace(world, rank=0))
    kind = hosted, MEETING_FILE not in os.environ
    host = None if world.size == world.local_size else (socket.gethostname(), own_addresses())
    prefix_store = dist.PrefixStore("roll-call", client)
    call = RollCall(prefix_store, world.rank, world.size, minutes, *kind, phase_minutes=phase_minutes, host=host)
    _CALLS.append(call.start())
    explain_exchanges_by(call)


def keep_asking(lost: Callable[[str], None] | None = None) -> None:
    """Make this rank check regularly that the other ranks are alive (`RollCall.keep_asking`)."""
    for call in _CALLS:
        call.keep_asking(lost)


def silent_ranks(seconds: float) -> list[int]:
    """Return the ranks that do not answer within `seconds`, or an empty list if the store does not answer."""
    for call in _CALLS:
        with contextlib.suppress(Exception):
            return in_time(partial(call.questions.silent, seconds), 2 * seconds)
    return []


def end_together(rank: int, timeout_minutes: float) -> None:
    """Check on rank 0, after its work, that every other rank has ended or answers, because a launcher would wait
    forever for a stopped rank. Errors: TimeoutError, naming a rank that does neither."""
    for call in _CALLS if rank == 0 else ():
        silent = silent_ranks(60 * timeout_minutes)
        if silent:
            raise TimeoutError(silence(silent, timeout_minutes, call.questions.hosts()))


def threads(ranks: int) -> int:
    """Return the number of CPU threads for each of `ranks` ranks on this host: OMP_NUM_THREADS, or else a rank's share
    of the cores."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    return int(variable) if variable.isdecimal() and int(variable) else max(1, cores() // ranks)


def connected() -> bool:
    """Whether this process is in a process group."""
    return dist.is_initialized()


def disconnect() -> None:
    """Leave the process group, if there is one."""
    while _CALLS:
        _CALLS.pop().close()
    explain_exchanges_by(None)
    if dist.is_initialized():
        dist.destroy_process_group()
