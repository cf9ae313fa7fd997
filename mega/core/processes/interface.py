"""By which network interface gloo of this host reaches the ranks of others.

torch takes the address of the host's own name, which on many systems is a loopback one (Debian's 127.0.1.1): ranks of
other hosts then connect to themselves. What leads to MASTER_ADDR is taken instead; where that is this host itself, what
leads to a rank of another one. A GLOO_SOCKET_IFNAME that the user has set counts. It knows no collectives.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from mega.core.processes.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

VARIABLE = "GLOO_SOCKET_IFNAME"

_ADDRESS_OF = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface."""


def choose_interface(store: Store, world: World) -> None:
    """Set GLOO_SOCKET_IFNAME for ranks of several hosts, which all call this. store: that they have met in."""
    if VARIABLE in os.environ or world.size == world.local_size:
        return
    own = own_address(os.environ["MASTER_ADDR"])
    store.set(f"address/{world.rank}", own)
    for rank in range(world.size if _is_loopback(own) else 0):
        other = store.get(f"address/{rank}").decode()
        if not _is_loopback(other):
            own = own_address(other)
            break
    name = interface_of(own)
    if name is not None and not _is_loopback(own):
        os.environ[VARIABLE] = name


def own_address(other: str) -> str:
    """This host's address on the way to another one, as the system routes it; "" where it cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, place in socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as way:
                way.connect(place)  # of datagrams: nothing is sent
                return str(way.getsockname()[0])
    return ""


def is_own(name: str) -> bool:
    """Whether an address, or a host's name, means this host.

    >>> is_own("localhost"), is_own("127.0.1.1"), is_own("192.0.2.1")
    (True, True, False)
    """
    address = own_address(name)  # the way to an address of one's own begins there
    with contextlib.suppress(OSError, UnicodeError):
        found = {str(place[0]) for *_, place in socket.getaddrinfo(name, 1)} if address else set()
        return address in found or any(map(_is_loopback, found))  # 127.0.1.1 is reached from 127.0.0.1
    return False


def own_addresses() -> set[str]:
    """All addresses of this host by which another one may know it.

    >>> any(map(_is_loopback, own_addresses()))
    False
    """
    found = {address for _, name in socket.if_nameindex() for address in _addresses(name)}
    return {address for address in found if not _is_loopback(address)}


def interface_of(address: str) -> str | None:
    """The interface that has this address; None where the system does not say.

    >>> interface_of("127.0.0.1") in ("lo", "lo0", None)
    True
    """
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    return None


def _addresses(name: str) -> list[str]:
    found = list[str]()
    request = array.array("B", struct.pack("256s", name.encode()[:15]))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        fcntl.ioctl(ask.fileno(), _ADDRESS_OF, request)
        found.append(socket.inet_ntoa(request.tobytes()[20:24]))
    with contextlib.suppress(OSError):
        rows = map(str.split, Path("/proc/net/if_inet6").read_text().splitlines())
        found += [str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if row[-1] == name]
    return found


def _is_loopback(address: str) -> bool:
    """
    >>> _is_loopback("127.0.1.1"), _is_loopback("::1"), _is_loopback("10.0.0.1"), _is_loopback("")
    (True, True, False, True)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return True
