"""Find the exact nearest vectors by Euclidean distance, block by block, with at most two blocks in memory.

A matrix product selects the best candidates of a block. The distances of these candidates are then recomputed from
differences in float64, so that the order does not depend on rounding errors of the product. Ties are broken by the
lower index.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

SPARE = 16
"""Number of additional candidates per block, needed because rounding may rank a true neighbour too low."""


def nearest(
    queries: NDArray[np.float32], blocks: Iterable[tuple[int, NDArray[np.float32]]], count: int, device: torch.device
) -> NDArray[np.int64]:
    """Return the indices of the vectors nearest to each query, int64 [n, count], padded with -1.

    blocks: pairs (index of the first vector, vectors [m, width]).
    """
    query_vectors = torch.from_numpy(np.ascontiguousarray(queries)).to(device)
    distances = torch.full((len(query_vectors), count), torch.inf, dtype=torch.float64, device=device)
    numbers = torch.full((len(query_vectors), count), -1, dtype=torch.int64, device=device)
    for first, vectors in blocks:
        block = torch.from_numpy(np.array(vectors)).to(device)
        candidates, exact = _of_block(query_vectors, block, count)
        distances, numbers = _best(torch.cat([distances, exact], 1), torch.cat([numbers, candidates + first], 1), count)
    return numbers.cpu().numpy()


def _of_block(query_vectors: torch.Tensor, block: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best candidates in a block: their indices within the block, and their distances."""
    # [n, m]: |v - q|^2 without |q|^2, which is the same for all candidates of a query.
    rough = block.square().sum(1) - 2 * query_vectors @ block.T
    candidates = rough.topk(min(count + SPARE, len(block)), 1, largest=False).indices
    exact = torch.stack(
        [
            (block[row].double() - one.double()).square().sum(1)
            for one, row in zip(query_vectors, candidates, strict=True)
        ]
    )
    return candidates, exact


def _best(distances: torch.Tensor, numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort by distance, with ties broken by the lower index, and return the first `count` candidates."""
    by_number = numbers.argsort(dim=1, stable=True)
    distances, numbers = distances.gather(1, by_number), numbers.gather(1, by_number)
    order = distances.argsort(dim=1, stable=True)[:, :count]
    return distances.gather(1, order), numbers.gather(1, order)
