"""One rank's way into the process group and out of it, from torchrun, mpirun, srun, `launch` or alone.

It knows no jobs: what ranks do together is theirs.
"""

from __future__ import annotations

import contextlib
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
"""What answers for this process, while it is in a process group."""


def connect(
    kind: str = "auto", backend: str = "auto", timeout_minutes: float = 10, phase_timeout_minutes: float | None = None
) -> tuple[World, Device, Groups]:
    """Join the process group as the rank that the environment names.

    phase_timeout_minutes: how long ranks that answer may keep others waiting in a phase that may take long; beyond it,
    or beyond timeout_minutes in any other phase, the roll call ends the run, so exchanges are given the sum of both.
    None: ranks that answer are given up only by their exchanges, a quarter after timeout_minutes.
    A single rank has no group, and every axis has size 1. Errors: ValueError where the device is absent, the backend
    is not for it, or the environment does not say where ranks meet; OSError, naming who is waited for, where not all
    ranks come.
    """
    world, timeout = world_from_env(), timedelta(minutes=timeout_minutes)
    device = Device.choose(kind, world.local_rank, backend)
    if not device.is_cuda:
        torch.set_num_threads(threads(world.local_size))
    if world.size > 1 and not dist.is_initialized():
        if device.backend == "nccl" and not device.is_cuda:
            raise ValueError("--backend nccl: needs CUDA devices, and these ranks are on CPUs; valid: auto, gloo")
        if world.local_size == world.size and device.backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        if device.backend == "gloo":
            _check_interfaces()
        flight.record()
        store = meet(world, timeout_minutes)
        choose_interface(store, world)
        with _naming_interface():
            dist.init_process_group(
                device.backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
            )
        _answer_others(store, world, timeout_minutes, phase_timeout_minutes)
    more = timeout_minutes / 4 if phase_timeout_minutes is None else phase_timeout_minutes
    return world, device, Groups(device.backend, timeout + timedelta(minutes=more))


def _check_interfaces() -> None:
    """See that gloo can use what it is told to. Errors: ValueError."""
    known = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in known:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME {name}: is not a network interface of {socket.gethostname()}; "
                f"valid: {', '.join(known)}"
            )


@contextlib.contextmanager
def _naming_interface() -> Iterator[None]:
    """Errors: ValueError where gloo finds no address at its interface, which it reports as a line of its C++."""
    try:
        yield
    except RuntimeError as error:
        _, found, name = str(error).partition("Unable to find address for: ")
        if not found:
            raise
        name = name.split("\n")[0].strip()
        raise ValueError(
            f"GLOO_SOCKET_IFNAME {name}: this network interface of {socket.gethostname()} has no address, so ranks "
            f"cannot meet; bring it up (`ip link set {name} up`), or name another one"
        ) from None


def _answer_others(store: dist.Store, world: World, minutes: float, phase_minutes: float | None) -> None:
    """Have a thread answer for this rank until `disconnect`, whatever its main thread waits for."""
    # A call to a TCPStore waits for the one before it.
    own = store if MEETING_FILE in os.environ else store.clone()  # type: ignore[attr-defined]
    hosted = hosts_store(replace(world, rank=0))
    kind = hosted, MEETING_FILE not in os.environ
    host = None if world.size == world.local_size else (socket.gethostname(), own_addresses())
    place = dist.PrefixStore("roll-call", own)
    call = RollCall(place, world.rank, world.size, minutes, *kind, phase_minutes=phase_minutes, host=host)
    _CALLS.append(call.start())
    explain_exchanges_by(call)


def keep_asking(lost: Callable[[str], None] | None = None) -> None:
    """Have this rank ask the others regularly whether they live, as of `RollCall.keep_asking`."""
    for call in _CALLS:
        call.keep_asking(lost)


def silent_ranks(seconds: float) -> list[int]:
    """The ranks that do not answer so fast; none where their store does not."""
    for call in _CALLS:
        with contextlib.suppress(Exception):
            return in_time(partial(call.questions.silent, seconds), 2 * seconds)
    return []


def end_together(rank: int, timeout_minutes: float) -> None:
    """On rank 0, when its work is done, see that every other rank has ended too, or answers: a launcher waits for one
    that is stopped without end. Errors: TimeoutError naming it."""
    for call in _CALLS if rank == 0 else ():
        silent = silent_ranks(60 * timeout_minutes)
        if silent:
            raise TimeoutError(silence(silent, timeout_minutes, call.questions.hosts()))


def threads(ranks: int) -> int:
    """CPU threads of one of `ranks` on this host: OMP_NUM_THREADS, else its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else max(1, cores() // ranks)


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
