"""Describes the model chunks of each pipeline rank as numbers. Ranks with equal descriptions need equal memory and
time.

This module does not import torch, and does not depend on sizes in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from mega.core.architecture import Unit, architecture, placement, shape
from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig


class LayerKind(NamedTuple):
    """The properties of a layer that affect memory or time and can differ within a stack."""

    window: int | None
    """Attention window, or None."""
    rotates: bool
    """Whether the layer has rotary positions."""
    experts: bool = False
    """Whether the layer has experts."""


class Chunk(NamedTuple):
    """A contiguous part of the model on one pipeline rank."""

    names: tuple[str, ...]
    """Names of the chunk's units that are outside the stacks of blocks."""
    stacks: tuple[int, ...]
    """Number of the chunk's blocks in each stack of the model."""
    kinds: tuple[LayerKind, ...] = ()
    """Kind of each block of the chunk; empty if all blocks of the model are alike."""
    before: int | None = None
    """Number of blocks that precede the chunk in the model. None unless a block's position affects memory or time, as
    in Retro, where some blocks read retrieved neighbours that other blocks encode."""

    @property
    def blocks(self) -> int:
        return sum(self.stacks)

    def unit(self, stacks: int) -> int:
        """Return the index of the unit that follows the given number of stacks, among all units of the chunk. Each
        block is a unit.

        >>> Chunk(("embedding", "middle", "head"), (2, 3)).unit(1)
        3
        """
        return sum(self.stacks[:stacks]) + stacks


def stage_chunks(run: RunConfig) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of every pipeline stage of a resolved `run`, as `[stage][chunk]`."""
    parallel = run.parallel
    return _stage_chunks(run.model, parallel.pp, parallel.chunks, parallel.stage_layers)


@lru_cache(maxsize=256)
def _stage_chunks(
    model: ModelConfig, pp: int, chunks: int, stage_layers: tuple[int, ...]
) -> tuple[tuple[Chunk, ...], ...]:
    stack_of, stacks, kinds = shape(model).stack_of, len(model.stacks), _kinds(model)
    units_at: dict[tuple[int, int], list[Unit]] = {}
    for unit, place in placement(model, pp, chunks, stage_layers).items():
        units_at.setdefault(place, []).append(unit)

    def chunk(units: Sequence[Unit]) -> Chunk:
        blocks = [unit for unit in units if isinstance(unit, int)]
        counts = Counter(stack_of[block] for block in blocks)
        return Chunk(
            tuple(unit for unit in units if isinstance(unit, str)),
            tuple(counts[number] for number in range(stacks)),
            tuple(kinds[block] for block in blocks) if kinds and not model.retriever else (),
            (blocks or [0 if "embedding" in units else model.layers])[0] if model.retriever else None,
        )

    return tuple(tuple(chunk(units_at.get((stage, number), [])) for number in range(chunks)) for stage in range(pp))


def _kinds(model: ModelConfig) -> list[LayerKind]:
    """List the kind of each layer; an empty list if all layers have the same kind."""
    kinds = [
        LayerKind(layer.attention.window, layer.attention.rope is not None, layer.experts is not None)
        for layer in architecture(model).layers
    ]
    return kinds if len(set(kinds)) > 1 else []


def of_kind(model: ModelConfig, kind: LayerKind) -> ModelConfig:
    """Return `model` with every layer changed to the kind `kind`."""
    rope = () if kind.rotates or model.position != "rope" else (0,)
    model = replace(model, window=kind.window, window_layers=(), local_rope_base=None, rope_layers=rope)
    experts = model.experts if kind.experts else 0
    return replace(model, experts=experts, experts_from=0, experts_every=1, dense_layers=())
