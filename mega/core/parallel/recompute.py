"""Activation recomputation, which saves only the input of some blocks and runs these blocks again in the backward pass.

Dropout is a function of element positions, so no random state has to be restored. With `share`, each of the tensor
ranks that hold the same input saves a shard of it, and the shards are gathered later (Megatron's distributed saved
activations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mega.core.ops.recompute import recompute
from mega.core.parallel.collectives import all_gather, conjugate, local_shard
from mega.core.parallel.mesh import Axis


def _own_part(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a copy of this rank's shard of `x`, because a view would keep the whole tensor alive."""
    return local_shard(x, axis).clone()


def recomputed(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, share: Axis | None = None) -> torch.Tensor:
    """Return run(x), saving only x [tokens, h] for the backward pass. With `share`, each rank of that axis saves a
    shard of x."""
    if share is None or share.size == 1:
        return recompute(run, x)
    part = conjugate(x, share, _own_part, all_gather)

    def from_part(part: torch.Tensor) -> torch.Tensor:
        return run(conjugate(part, share, all_gather, _own_part))  # no sum, because every rank has the whole gradient

    return recompute(from_part, part)


def groups(blocks: int, method: str | None, layers: int | None) -> Iterator[tuple[range, bool]]:
    """Divide a stage's blocks into groups of consecutive blocks, and yield (range of blocks, whether the group is
    recomputed) for each group.

    uniform: recompute all blocks, in groups of `layers`. block: recompute the first `layers` blocks one by one, and
    save the activations of the other blocks.

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
