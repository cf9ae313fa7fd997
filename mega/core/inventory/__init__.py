"""Every LOGICAL tensor of a model, once: name, whole shape, cuts, init, decay, units, partial gradients.

One table a family, read by everything that must agree about a model: layers (which tensors, how large, how cut),
initialisation, gradient norms and reductions, optimizer spans, checkpoints, converters and the memory estimator.

    >>> tensors = inventory(ModelConfig(layers=1, hidden=8, heads=2, vocab=10, positions=4, ...))
    >>> next(t for t in tensors if t.name.endswith("q_proj.weight"))
    Tensor(name='model.layers.0.self_attn.q_proj.weight', shape=(8, 8), cut=Cut(dim=0, axis='tp', parts=2), ...)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mega.core.config.sections import ModelConfig
from mega.core.inventory import bert, decoder, t5
from mega.core.inventory.adapters import adapted, linear_names, without_adapters
from mega.core.inventory.tensor import Cut, Init, Partial, Table, Tensor, Unit, padded
from mega.core.plan.layers import stage_layers, unit_stages

__all__ = [
    "TABLES",
    "Cut",
    "Init",
    "Partial",
    "Shape",
    "Table",
    "Tensor",
    "Unit",
    "inventory",
    "linears",
    "padded",
    "parameters",
    "placement",
    "shape",
    "units",
    "without_adapters",
]

TABLES: dict[str, Table] = {"gpt": decoder.TABLE, "llama": decoder.TABLE, "bert": bert.TABLE, "t5": t5.TABLE}
"""Family -> its table."""


def inventory(model: ModelConfig) -> Iterator[Tensor]:
    """The logical tensors of a resolved model config, adapters included, in the order of its forward pass.

    Errors: ValueError where --lora-targets names none of its linears.
    """
    return adapted(model, TABLES[model.family].tensors(model))


def linears(model: ModelConfig) -> list[str]:
    """What the linears of a model's blocks are called, of which --lora-targets chooses some."""
    return linear_names(TABLES[model.family].tensors(model))


def units(model: ModelConfig) -> tuple[Unit, ...]:
    """The units of a resolved model config, in the order of its forward pass."""
    return TABLES[model.family].units(model)


class Shape(NamedTuple):
    """How a model's units follow one another: a stack of equal blocks, between names.

    stack_of: block -> its stack. after: name -> stacks before it.
    """

    stack_of: Mapping[int, int]
    after: Mapping[str, int]


@lru_cache(maxsize=16)
def shape(model: ModelConfig) -> Shape:
    """Of a resolved model.

    >>> shape(ModelConfig(family="t5", layers=1, decoder_layers=2))
    Shape(stack_of={0: 0, 1: 1, 2: 1}, after={'embedding': 0, 'middle': 1, 'head': 2})
    """
    stack_of, after, begun = dict[int, int](), dict[str, int](), 0
    for unit in units(model):
        if isinstance(unit, int):
            stack_of[unit] = begun
        else:
            begun = after[unit] = len(set(stack_of.values()))
    return Shape(stack_of, after)


def placement(model: ModelConfig, pp: int, chunks: int, layers: Sequence[int] = ()) -> dict[Unit, tuple[int, int]]:
    """Unit -> (pipeline rank, chunk) that holds it. layers: blocks of each global stage, where they are not equal."""
    return unit_stages(units(model), stage_layers(model.blocks, pp, chunks, layers))


@lru_cache(maxsize=16)
def parameters(model: ModelConfig) -> int:
    """Elements of all logical tensors: true vocabulary rows, tied tensors once."""
    return sum(tensor.elements for tensor in inventory(model))
