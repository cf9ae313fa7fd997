"""Just enough of the protocol-buffer wire format to read a message's fields by number. It knows no schema.

Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator

Value = int | bytes


def fields(message: bytes) -> dict[int, list[Value]]:
    """Field number -> its values in order: integers, and bytes for all that has a length or a fixed width.

    >>> fields(bytes([8, 150, 1, 18, 2]) + b"hi")
    {1: [150], 2: [b'hi']}

    Raises ValueError where the bytes are not a message.
    """
    found: dict[int, list[Value]] = defaultdict(list)
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            found[key >> 3].append(value)
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"no protocol buffer (wire type {kind})")
        size, at = _varint(message, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + size > len(message):
            raise ValueError("no protocol buffer (cut short)")
        found[key >> 3].append(message[at : at + size])
        at += size
    return dict(found)


def packed_integers(values: list[Value]) -> list[int]:
    """A repeated int64, packed or not; negative numbers are 64-bit two's complement."""
    unsigned = [number for value in values for number in (_varints(value) if isinstance(value, bytes) else [value])]
    return [number - (1 << 64) if number >> 63 else number for number in unsigned]


def packed_floats(values: list[Value]) -> list[float]:
    """A repeated float, packed or not."""
    data = b"".join(value for value in values if isinstance(value, bytes))
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        number, at = _varint(data, at)
        yield number


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    number = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("no protocol buffer (a number without an end)")
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
