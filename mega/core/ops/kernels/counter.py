"""Dropout masks inside kernels, bitwise identical to those of `ops.counter`.

One draw of 32 bits is used for two elements that are eight apart. With tensor cores, a thread has rows and columns that
are eight apart, so one draw is enough for two scores, in either orientation of the tile.
"""

from __future__ import annotations

from mega.core.ops.kernels.language import COMPILED, jit, tl

FOLD = tl and tl.constexpr(
    "{ .reg .b64 product; .reg .b32 low, high; mul.wide.u32 product, $1, $2; mov.b64 {low, high}, product;"
    " xor.b32 $0, low, high; }"
)
"""Assembly that multiplies two 32-bit numbers and returns the exclusive or of the product's two halves."""


@jit
def row_keys(keys, site, number):
    """Compute `counter.row_keys` of token keys at one site of the model, as uint64."""
    z = (keys + site + number.to(tl.int64) * 0x2545F4914F6CDD1D).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@jit
def _fold(x, factor):
    if COMPILED:  # the compiler would turn the lines below into a product of 64-bit numbers
        return tl.inline_asm_elementwise(FOLD, "=r,r,r", [x, factor], dtype=tl.uint32, is_pure=True, pack=1)
    bits64 = x.to(tl.uint64) * factor
    return (bits64 >> 32).to(tl.uint32) ^ bits64.to(tl.uint32)


@jit
def kept_elements(row, elements, threshold):
    """Return a mask of the elements of one row that survive. row: uint64, from `row_keys`."""
    group = ((elements >> 4 << 3) | (elements & 7)).to(tl.uint32)
    bits = _fold(_fold(row.to(tl.uint32) ^ group, 0xD2511F53) ^ (row >> 32).to(tl.uint32), 0xCD9E8D57)
    return tl.where(elements & 8 != 0, bits, bits << 16) >= threshold.to(tl.uint32)


@jit
def kept(rows, first, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_FIRST: tl.constexpr, threshold):
    """Compute `counter.keep_mask` for the elements first, first + 1, ... of each row.

    rows: uint64 [R], from `row_keys`. threshold: elements are dropped with probability threshold / 2^32. ALIGNED:
    whether `first` is a multiple of 16. Returns [R, BLOCK], or [BLOCK, R] with COLUMNS_FIRST.
    """
    offset = tl.arange(0, BLOCK)
    if ALIGNED:  # written so that the compiler recognises that two elements share a draw
        group = (first >> 1) + ((offset >> 4 << 3) | (offset & 7))
        late = offset & 8
    else:
        element = first + offset
        group = (element >> 4 << 3) | (element & 7)
        late = element & 8
    low, high = rows.to(tl.uint32), (rows >> 32).to(tl.uint32)
    group = group.to(tl.uint32)
    if COLUMNS_FIRST:
        low, high, group, late = low[None, :], high[None, :], group[:, None], late[:, None]
    else:
        low, high, group, late = low[:, None], high[:, None], group[None, :], late[None, :]
    bits = _fold(_fold(low ^ group, 0xD2511F53) ^ high, 0xCD9E8D57)
    return tl.where(late != 0, bits, bits << 16) >= threshold.to(tl.uint32)
