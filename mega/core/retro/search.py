"""The nearest of many vectors by Euclidean distance, exactly, block by block: memory is that of two blocks.

A block's best candidates are found by a matrix product and then judged again by differences in float64, so that the
order of what is found does not depend on how products are rounded; equal distances go by the lower number.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

SPARE = 16
"""Candidates of a block beyond those that are wanted, which rounding may have put behind them."""


def nearest(
    queries: NDArray[np.float32], blocks: Iterable[tuple[int, NDArray[np.float32]]], count: int, device: torch.device
) -> NDArray[np.int64]:
    """int64 [n, count]: for each query the numbers of its nearest vectors, -1 where there are fewer.

    blocks: number of the first vector, vectors [m, width].
    """
    asked = torch.from_numpy(np.ascontiguousarray(queries)).to(device)
    distances = torch.full((len(asked), count), torch.inf, dtype=torch.float64, device=device)
    numbers = torch.full((len(asked), count), -1, dtype=torch.int64, device=device)
    for first, vectors in blocks:
        block = torch.from_numpy(np.array(vectors)).to(device)
        found, exact = _of_block(asked, block, count)
        distances, numbers = _best(torch.cat([distances, exact], 1), torch.cat([numbers, found + first], 1), count)
    return numbers.cpu().numpy()


def _of_block(asked: torch.Tensor, block: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in the block, and distances, of the best candidates."""
    rough = block.square().sum(1) - 2 * asked @ block.T
    found = rough.topk(min(count + SPARE, len(block)), 1, largest=False).indices
    exact = torch.stack(
        [(block[mine].double() - one.double()).square().sum(1) for one, mine in zip(asked, found, strict=True)]
    )
    return found, exact


def _best(distances: torch.Tensor, numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` by distance, then by number."""
    by_number = numbers.argsort(dim=1, stable=True)
    distances, numbers = distances.gather(1, by_number), numbers.gather(1, by_number)
    order = distances.argsort(dim=1, stable=True)[:, :count]
    return distances.gather(1, order), numbers.gather(1, order)
