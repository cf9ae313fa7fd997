"""Read the fields of a protocol-buffer message by number, without a schema. Only a small part of the wire format is
supported.

Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct
from collections import defaultdict

Value = int | bytes

_UNENDED = "no protocol buffer (a number without an end)"


def fields(message: bytes) -> dict[int, list[Value]]:
    """Return a map from each field number to the field's values in order. Values are integers, or bytes for fields with
    a length or a fixed width.

    >>> fields(bytes([8, 150, 1, 18, 2]) + b"hi")
    {1: [150], 2: [b'hi']}

    Raises ValueError if the bytes are not a message.
    """
    values: dict[int, list[Value]] = defaultdict(list)
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        # A key is field number * 8 + wire type. Wire types: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
        kind = key & 7
        if kind == 0:
            value, offset = _varint(message, offset)
            values[key >> 3].append(value)
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"no protocol buffer (wire type {kind})")
        size, offset = _varint(message, offset) if kind == 2 else (8 if kind == 1 else 4, offset)
        if offset + size > len(message):
            raise ValueError("no protocol buffer (cut short)")
        values[key >> 3].append(message[offset : offset + size])
        offset += size
    return dict(values)


def packed_integers(values: list[Value]) -> list[int]:
    """Return the values of a repeated int64 field, packed or not. Negative numbers are in 64-bit two's complement."""
    numbers: list[int] = []
    for value in values:
        numbers += _varints(value) if isinstance(value, bytes) else [value]
    if max(numbers, default=0) >> 63:
        return [number - (1 << 64) if number >> 63 else number for number in numbers]
    return numbers


def packed_floats(values: list[Value]) -> list[float]:
    """Return the values of a repeated float field, packed or not."""
    data = b"".join(value for value in values if isinstance(value, bytes))
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def _varints(data: bytes) -> list[int]:
    """Decode consecutive varints. If all bytes are below 128, each byte is one number."""
    if data.isascii():
        return list(data)
    numbers = []
    number = shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            number = shift = 0
        elif shift > 63:
            break
    if shift:
        raise ValueError(_UNENDED)
    return numbers


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number stored in groups of seven bits, lowest group first. Return the number and the offset of the next
    byte."""
    number = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(_UNENDED)
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
