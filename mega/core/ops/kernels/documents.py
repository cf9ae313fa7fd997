"""Which tiles of keys a tile of queries needs, and the other way round, if tokens see only tokens of their document."""

from __future__ import annotations

import torch

from mega.core.ops.kernels.language import cdiv, jit, launch, tl


@jit
def _attention_documents(
    own_at, own_stride, other_at, other_stride, bounds_at, own_length, other_length,
    OWN: tl.constexpr, OTHER: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store the bounds of the keys that are in the documents of a tile of queries, or the bounds of the queries for a
    tile of keys. Bounds are ordered like those of `_keys_seen`."""
    tile, batch = tl.program_id(0), tl.program_id(1)
    position = tile * OWN + tl.arange(0, OWN)
    # Beyond the end of the row, repeat the row's last token.
    documents = tl.load(own_at + batch * own_stride + tl.minimum(position, own_length - 1))
    low, high = tl.min(documents, 0), tl.max(documents, 0)
    tiles = tl.cdiv(other_length, OTHER)
    first, end, whole_first, whole_end, wholes = tiles, 0, tiles, 0, 0
    for begin in range(0, tiles, TILES):
        number = begin + tl.arange(0, TILES)
        other_position = tl.minimum(number[:, None] * OTHER + tl.arange(0, OTHER)[None, :], other_length - 1)
        other_documents = tl.load(other_at + batch * other_stride + other_position)
        least, most = tl.min(other_documents, 1), tl.max(other_documents, 1)
        overlaps = (number < tiles) & (least <= high) & (most >= low)
        whole = (number < tiles) & (least == high) & (most == low) & (low == high)
        first = tl.minimum(first, tl.min(tl.where(overlaps, number, tiles), 0))
        end = tl.maximum(end, tl.max(tl.where(overlaps, number + 1, 0), 0))
        whole_first = tl.minimum(whole_first, tl.min(tl.where(whole, number, tiles), 0))
        whole_end = tl.maximum(whole_end, tl.max(tl.where(whole, number + 1, 0), 0))
        wholes += tl.sum(whole.to(tl.int32), 0)
    whole_end = tl.where(wholes == whole_end - whole_first, whole_end, 0)  # if the range has a gap, check every score
    bounds = bounds_at + (batch * tl.num_programs(0) + tile) * 4
    tl.store(bounds, first * OTHER)
    tl.store(bounds + 1, whole_first * OTHER)
    tl.store(bounds + 2, whole_end * OTHER)
    tl.store(bounds + 3, end * OTHER)


def bounds(own: torch.Tensor, other: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Return int32 [b, tiles, 4] for tiles of `size` tokens: the first token of the other side with a document of the
    tile; the first one from which on whole steps are visible to the whole tile; the end of those; and the end of the
    tile's documents. All four are multiples of `step`.

    own, other: int64 [b, s] and [b, t], the documents of both sides.
    """
    count = cdiv(own.shape[1], size)
    to = torch.empty(own.shape[0], count, 4, dtype=torch.int32, device=own.device)
    launch(
        _attention_documents, (count, own.shape[0]), own, own.stride(0), other, other.stride(0), to, own.shape[1],
        other.shape[1], OWN=size, OTHER=step, TILES=2048 // step,
    )  # fmt: skip
    return to
