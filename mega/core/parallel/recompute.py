"""Keeping a run of blocks' input instead of everything inside it: the rest is computed again in the backward pass.

Dropout is a function of what it acts on, so no random state is restored. With `share`, tensor ranks that all
hold the same input keep a part of it each and gather it again (Megatron's distributed saved activations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mega.core.ops.recompute import recompute
from mega.core.parallel.collectives import all_gather, conjugate, local_shard
from mega.core.parallel.mesh import Axis


def _own_part(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A copy: a view would keep the whole alive."""
    return local_shard(x, axis).clone()


def recomputed(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, share: Axis | None = None) -> torch.Tensor:
    """run(x), of which only x is kept for the backward pass; x [tokens, h], over `share` a part of its tokens."""
    if share is None or share.size == 1:
        return recompute(run, x)
    part = conjugate(x, share, _own_part, all_gather)

    def from_part(part: torch.Tensor) -> torch.Tensor:
        return run(conjugate(part, share, all_gather, _own_part))  # every rank computes the whole's same gradient

    return recompute(from_part, part)


def groups(blocks: int, method: str | None, layers: int | None) -> Iterator[tuple[range, bool]]:
    """A stage's blocks in runs: (which, whether the run is computed again).

    uniform: every run of `layers` blocks. block: the first `layers` blocks one by one, the rest kept.

    >>> list(groups(5, "uniform", 2))
    [(range(0, 2), True), (range(2, 4), True), (range(4, 5), True)]
    >>> list(groups(3, "block", 1))
    [(range(0, 1), True), (range(1, 3), False)]
    >>> list(groups(3, None, None))
    [(range(0, 3), False)]
    """
    if method == "uniform":
        step = layers or 1
        for first in range(0, blocks, step):
            yield range(first, min(first + step, blocks)), True
        return
    single = min(layers or 0, blocks) if method == "block" else 0
    for number in range(single):
        yield range(number, number + 1), True
    if single < blocks:
        yield range(single, blocks), False
