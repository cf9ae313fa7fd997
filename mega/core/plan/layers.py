"""Assigns the blocks and other units of a model to pipeline ranks and chunks. Units are identified by name or
number."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)
"""The number of a block, or the name of another unit of the model, as in `architecture.Unit`."""


def stage_layers(
    layers: int, stages: int, chunks: int = 1, explicit: Sequence[int] = ()
) -> tuple[tuple[range, ...], ...]:
    """Return the blocks that every chunk of every rank holds, as `[rank][chunk] -> range` of global block numbers.

    layers: number of blocks in the whole model. stages: number of pipeline ranks. chunks: number of model chunks per
        rank.
    explicit: for stages of unequal size, the number of blocks in each of the `stages * chunks` global stages, indexed
        by chunk * stages + rank. The sum must be `layers`. A stage with an embedding or the head may have 0 blocks.

    Raises ValueError if the blocks do not divide equally and `explicit` is empty.

    >>> stage_layers(8, stages=2, chunks=2)
    ((range(0, 2), range(4, 6)), (range(2, 4), range(6, 8)))
    >>> stage_layers(8, stages=3, explicit=(3, 3, 2))
    ((range(0, 3),), (range(3, 6),), (range(6, 8),))
    """
    for name, value in (("--pp", stages), ("--chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be 1 or more")
    sizes = _explicit(explicit, layers, stages, chunks) if explicit else _equal(layers, stages, chunks)
    ends = list(accumulate(sizes))
    blocks = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return tuple(tuple(blocks[rank::stages]) for rank in range(stages))


def _equal(layers: int, stages: int, chunks: int) -> Sequence[int]:
    """Return equal numbers of blocks for all stages. Errors: ValueError if the blocks do not divide equally."""
    pieces = stages * chunks
    if layers < 1 or layers % pieces:
        raise ValueError(
            f"--layers {layers}: must be a multiple of --pp {stages} x --chunks {chunks} = {pieces}, "
            f"or give --stage-layers with {pieces} numbers that add up to {layers}"
        )
    return [layers // pieces] * pieces


def _explicit(explicit: Sequence[int], layers: int, stages: int, chunks: int) -> Sequence[int]:
    """Check the values of --stage-layers. Errors: ValueError if their count, sign or sum is wrong."""
    value = " ".join(map(str, explicit))
    if len(explicit) != stages * chunks:
        raise ValueError(
            f"--stage-layers {value}: has {len(explicit)} numbers, must have "
            f"--pp {stages} x --chunks {chunks} = {stages * chunks}"
        )
    if min(explicit) < 0:
        raise ValueError(f"--stage-layers {value}: every number must be 0 or more")
    if sum(explicit) != layers:
        raise ValueError(f"--stage-layers {value}: adds up to {sum(explicit)}, must be --layers {layers}")
    return explicit


def split_layers(encoder: int, decoder: int, stages: int, split: int) -> tuple[int, ...]:
    """Return the number of blocks in each stage if the stages before `split` hold the encoder and the other stages hold
    the decoder. Raises ValueError if the encoder or the decoder has no stages, or if its blocks do not divide equally.

    >>> split_layers(6, 8, stages=4, split=2), split_layers(6, 8, stages=3, split=1)
    ((3, 3, 4, 4), (6, 4, 4))
    """
    if stages == 1:
        raise ValueError(f"--split-rank {split}: needs --pp of at least 2")
    if not 0 < split < stages:
        raise ValueError(
            f"--split-rank {split}: leaves a side without a stage; valid with --pp {stages}: {_to(stages)}"
        )
    for name, blocks, share in (("--layers", encoder, split), ("--decoder-layers", decoder, stages - split)):
        if blocks % share:
            stages_of = "stages before" if name == "--layers" else "stages from"
            raise ValueError(
                f"--split-rank {split}: {name} {blocks} must be divisible by {share}, the {stages_of} it; "
                "choose another, or give --stage-layers instead"
            )
    return (encoder // split,) * split + (decoder // (stages - split),) * (stages - split)


def _to(stages: int) -> str:
    return "1" if stages == 2 else f"1 to {stages - 1}"


def unit_stages(units: Sequence[Unit], layers: Sequence[Sequence[range]]) -> dict[Unit, tuple[int, int]]:
    """Return a map from each unit to the (pipeline rank, chunk) that holds the unit. units: the units in the order of
    the forward pass.

    layers: the result of `stage_layers`. Units before the first block belong to the first stage, units after the last
    block to the last stage, and other units to the stage of the next block.

    >>> unit_stages(["embedding", 0, 1, "head"], stage_layers(2, stages=2))
    {'embedding': (0, 0), 0: (0, 0), 1: (1, 0), 'head': (1, 0)}
    """
    block_stages: Mapping[Hashable, tuple[int, int]] = {
        block: (rank, chunk) for rank, chunks in enumerate(layers) for chunk, run in enumerate(chunks) for block in run
    }
    stages: dict[Unit, tuple[int, int]] = {}
    stage = len(layers) - 1, len(layers[0]) - 1
    for unit in reversed(units):
        stage = stages[unit] = block_stages.get(unit, stage)
    # The first stage may have no blocks. Without this loop, the embedding would be assigned to the stage of the first
    # block.
    for unit in itertools.takewhile(lambda unit: unit not in block_stages, units):
        stages[unit] = 0, 0
    return dict(reversed(stages.items()))
