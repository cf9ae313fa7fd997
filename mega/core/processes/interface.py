"""Chooses the network interface through which gloo reaches the ranks of other hosts.

By default, torch uses the address of the host's name, which on many systems is a loopback address (127.0.1.1 on
Debian), so ranks on other hosts would connect to themselves. This module chooses the interface of the route to
MASTER_ADDR. On the host of MASTER_ADDR, it chooses the interface of the route to a rank on another host. A
GLOO_SOCKET_IFNAME set by the user has precedence.
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
"""The ioctl request SIOCGIFADDR for the IPv4 address of an interface."""


def choose_interface(store: Store, world: World) -> None:
    """Set GLOO_SOCKET_IFNAME. With several hosts, all ranks must call this function. store: the store of the
    rendezvous."""
    if VARIABLE in os.environ or world.size == world.local_size:
        return
    address = own_address(os.environ["MASTER_ADDR"])
    store.set(f"address/{world.rank}", address)
    for rank in range(world.size if _is_loopback(address) else 0):
        other = store.get(f"address/{rank}").decode()
        if not _is_loopback(other):
            address = own_address(other)
            break
    name = interface_of(address)
    if name is not None and not _is_loopback(address):
        os.environ[VARIABLE] = name


def own_address(other: str) -> str:
    """Return this host's source address for packets to the host `other`, or "" if the name cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, target in socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as connection:
                connection.connect(target)  # for a datagram socket, this only chooses a route
                return str(connection.getsockname()[0])
    return ""


def is_own(name: str) -> bool:
    """Whether an address, or a host name, refers to this host.

    >>> is_own("localhost"), is_own("127.0.1.1"), is_own("192.0.2.1")
    (True, True, False)
    """
    address = own_address(name)  # an address of this host is returned unchanged
    with contextlib.suppress(OSError, UnicodeError):
        addresses = {str(target[0]) for *_, target in socket.getaddrinfo(name, 1)} if address else set()
        return address in addresses or any(map(_is_loopback, addresses))  # the source for 127.0.1.1 is 127.0.0.1
    return False


def own_addresses() -> set[str]:
    """Return all addresses of this host that other hosts may use.

    >>> any(map(_is_loopback, own_addresses()))
    False
    """
    addresses = {address for _, name in socket.if_nameindex() for address in _addresses(name)}
    return {address for address in addresses if not _is_loopback(address)}


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address, or None if the system does not report the name.

    >>> interface_of("127.0.0.1") in ("lo", "lo0", None)
    True
    """
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    return None


def _addresses(name: str) -> list[str]:
    """Return the IPv4 and IPv6 addresses of an interface."""
    addresses = list[str]()
    request = array.array("B", struct.pack("256s", name.encode()[:15]))  # struct ifreq, with the address at byte 20
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        fcntl.ioctl(query.fileno(), _ADDRESS_OF, request)
        addresses.append(socket.inet_ntoa(request.tobytes()[20:24]))
    with contextlib.suppress(OSError):
        rows = map(str.split, Path("/proc/net/if_inet6").read_text().splitlines())
        addresses += [str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if row[-1] == name]
    return addresses


def _is_loopback(address: str) -> bool:
    """Whether an address is a loopback address or not a valid address.

    >>> _is_loopback("127.0.1.1"), _is_loopback("::1"), _is_loopback("10.0.0.1"), _is_loopback("")
    (True, True, False, True)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return True
