"""Just enough of the protocol-buffer wire format to read a message's fields by number. It knows no schema.

Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct
from collections import defaultdict

Value = int | bytes

_UNENDED = "no protocol buffer (a number without an end)"


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
    found: list[int] = []
    for value in values:
        found += _varints(value) if isinstance(value, bytes) else [value]
    if max(found, default=0) >> 63:
        return [number - (1 << 64) if number >> 63 else number for number in found]
    return found


def packed_floats(values: list[Value]) -> list[float]:
    """A repeated float, packed or not."""
    data = b"".join(value for value in values if isinstance(value, bytes))
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def _varints(data: bytes) -> list[int]:
    """As `_varint`, one after another. A row of tokens has hundreds, most of them below 128 and so a byte each."""
    if data.isascii():
        return list(data)
    found = []
    number = shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(number)
            number = shift = 0
        elif shift > 63:
            break
    if shift:
        raise ValueError(_UNENDED)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    number = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(_UNENDED)
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
