"""What each rank of a pipeline holds of a model, in numbers: chunks that are equal hold, take and cost equally much.

Knows no torch and no bytes.
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
    """What layers of one stack differ by in what they take. rotates: it has rotary positions."""

    window: int | None
    rotates: bool
    experts: bool = False


class Chunk(NamedTuple):
    """What a rank holds of the model in one piece: names of its units, and its blocks of each of the model's stacks.

    Ranks whose chunks are equal hold equally much, and take equally long. kinds: of each of its blocks, where those of
    the model are not all alike. before: blocks before its own, of a model whose blocks are known by their numbers: some
    read neighbours, which others before them or after them make.
    """

    names: tuple[str, ...]
    stacks: tuple[int, ...]
    kinds: tuple[LayerKind, ...] = ()
    before: int | None = None

    @property
    def blocks(self) -> int:
        return sum(self.stacks)

    def unit(self, stacks: int) -> int:
        """Which of a chunk's units the one is that follows so many stacks, its blocks counted one by one.

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
    held: dict[tuple[int, int], list[Unit]] = {}
    for unit, place in placement(model, pp, chunks, stage_layers).items():
        held.setdefault(place, []).append(unit)

    def chunk(units: Sequence[Unit]) -> Chunk:
        blocks = [unit for unit in units if isinstance(unit, int)]
        counts = Counter(stack_of[block] for block in blocks)
        return Chunk(
            tuple(unit for unit in units if isinstance(unit, str)),
            tuple(counts[number] for number in range(stacks)),
            tuple(kinds[block] for block in blocks) if kinds and not model.retriever else (),
            (blocks or [0 if "embedding" in units else model.layers])[0] if model.retriever else None,
        )

    return tuple(tuple(chunk(held.get((stage, number), [])) for number in range(chunks)) for stage in range(pp))


def _kinds(model: ModelConfig) -> list[LayerKind]:
    """Of each layer; [] where all are of one."""
    kinds = [
        LayerKind(layer.attention.window, layer.attention.rope is not None, layer.experts is not None)
        for layer in architecture(model).layers
    ]
    return kinds if len(set(kinds)) > 1 else []


def of_kind(model: ModelConfig, kind: LayerKind) -> ModelConfig:
    """The model with layers of one kind alone."""
    rope = () if kind.rotates or model.position != "rope" else (0,)
    model = replace(model, window=kind.window, window_layers=(), local_rope_base=None, rope_layers=rope)
    experts = model.experts if kind.experts else 0
    return replace(model, experts=experts, experts_from=0, experts_every=1, dense_layers=())
