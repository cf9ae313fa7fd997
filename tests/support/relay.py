"""A bad link between two interfaces of a network namespace: frames are passed on late, and some not at all.

    python relay.py FIRST SECOND DELAY LOSS    until it is killed; seconds each way, and the share of lost frames
    python relay.py plain INTERFACE            have the kernel send frames there as they would go over a wire

The kernel's own means (netem) is a module that is not everywhere.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time

ETH_P_ALL, PACKET_OUTGOING, SIOCETHTOOL = 3, 4, 0x8946
OFF = (0x17, 0x19, 0x1F, 0x24, 0x2C)
"""Commands of ethtool that set checksums of what is sent, scatter-gather, and the joining of frames (TSO, GSO, GRO)."""


def plain(interface: str) -> None:
    """Whole frames with checksums of their own, of the size that the interface allows."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in OFF:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP", interface.encode(), ctypes.addressof(value)))


def relay(names: tuple[str, str], delay: float, loss: float) -> None:
    chance, count = random.Random(0), 0
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) for _ in names]
    for end, name in zip(ends, names, strict=True):
        end.bind((name, 0))
    late: list[tuple[float, int, int, bytes]] = []
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        for end in select.select(ends, [], [], wait)[0]:
            frame, source = end.recvfrom(1 << 16)
            if source[2] != PACKET_OUTGOING and chance.random() >= loss:
                count += 1
                heapq.heappush(late, (time.monotonic() + delay, count, 1 - ends.index(end), frame))
        while late and late[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(late)
            ends[to].send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2])
    else:
        relay((sys.argv[1], sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
