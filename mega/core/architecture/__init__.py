"""What a model IS: an architecture of layers as values, and every logical tensor that follows from it.

model, layer, families    a model and a layer as values, made from options by one function a family
tensor, tensors, adapters logical tensors, by one walk, and adapters as some of them; words: all of it in words

>>> model = architecture(ModelConfig(layers=1, hidden=8, heads=2, vocab=10, positions=4, ...))
>>> model.layers[0].attention.heads
2
>>> next(tensor for tensor in tensors(model) if tensor.name.endswith("q_proj.weight"))
Tensor(name='model.layers.0.self_attn.q_proj.weight', shape=(8, 8), cuts=(Cut(dim=0, axis='tp', parts=2),), ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mega.core.architecture.adapters import adapted, linear_names, without_adapters
from mega.core.architecture.families.bert import bert
from mega.core.architecture.families.decoder import decoder
from mega.core.architecture.families.t5 import t5
from mega.core.architecture.model import Architecture
from mega.core.architecture.tensor import Cut, Init, Partial, Tensor, Unit, padded
from mega.core.architecture.tensors import tensors
from mega.core.config.sections import ModelConfig
from mega.core.plan.layers import stage_layers, unit_stages

__all__ = [
    "FAMILIES",
    "Architecture",
    "Cut",
    "Init",
    "Partial",
    "Shape",
    "Tensor",
    "Unit",
    "active_parameters",
    "architecture",
    "inventory",
    "linears",
    "padded",
    "parameters",
    "placement",
    "shape",
    "units",
    "without_adapters",
]

FAMILIES: dict[str, Callable[[ModelConfig], Architecture]] = {"gpt": decoder, "llama": decoder, "bert": bert, "t5": t5}
"""Family -> the architecture that its options give."""


@lru_cache(maxsize=64)
def architecture(options: ModelConfig) -> Architecture:
    """What the options of a resolved model describe."""
    return FAMILIES[options.family](options)


def inventory(options: ModelConfig) -> Iterator[Tensor]:
    """The logical tensors of a resolved model, adapters included, in the order of its forward pass.

    Errors: ValueError where --lora-targets names none of its linears.
    """
    model = architecture(options)
    return adapted(model.adapters, tensors(model))


def linears(options: ModelConfig) -> list[str]:
    """What the linears of a model's layers are called, of which --lora-targets chooses some."""
    return linear_names(tensors(architecture(options)))


def units(options: ModelConfig) -> tuple[Unit, ...]:
    """The units of a resolved model, in the order of its forward pass."""
    return architecture(options).units


class Shape(NamedTuple):
    """How a model's units follow one another: a stack of layers, between names.

    stack_of: layer -> its stack. after: name -> stacks before it.
    """

    stack_of: Mapping[int, int]
    after: Mapping[str, int]


@lru_cache(maxsize=16)
def shape(options: ModelConfig) -> Shape:
    """Of a resolved model.

    >>> shape(ModelConfig(family="t5", layers=1, decoder_layers=2, hidden=8, heads=2, ...))
    Shape(stack_of={0: 0, 1: 1, 2: 1}, after={'embedding': 0, 'middle': 1, 'head': 2})
    """
    stack_of, after, begun = dict[int, int](), dict[str, int](), 0
    for unit in units(options):
        if isinstance(unit, int):
            stack_of[unit] = begun
        else:
            begun = after[unit] = len(set(stack_of.values()))
    return Shape(stack_of, after)


def placement(options: ModelConfig, pp: int, chunks: int, layers: Sequence[int] = ()) -> dict[Unit, tuple[int, int]]:
    """Unit -> (pipeline rank, chunk) that holds it. layers: those of each global stage, where they are not equal."""
    return unit_stages(units(options), stage_layers(options.blocks, pp, chunks, layers))


@lru_cache(maxsize=16)
def parameters(options: ModelConfig) -> int:
    """Elements of all logical tensors: true vocabulary rows, tied tensors once."""
    return sum(tensor.elements for tensor in inventory(options))


@lru_cache(maxsize=16)
def active_parameters(options: ModelConfig) -> int:
    """Those that a token passes: of the experts of a layer as many as it chooses."""
    return round(sum(tensor.elements * tensor.share for tensor in inventory(options)))
