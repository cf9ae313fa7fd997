"""The architecture of a model as frozen dataclasses, and all of its logical tensors.

model, layer, families    a model and its layers as dataclasses, which one function per family creates from options
tensor, tensors, adapters the logical tensors of models and of adapters; words: descriptions for users

>>> from mega.core.config.compose import compose
>>> from mega.core.config.resolve import resolve
>>> llama = architecture(resolve(compose("llama3-8b", flags={"micro_batch": 1}), world=1).model)
>>> llama.layers[0].attention.heads
32
>>> query = next(tensor for tensor in tensors(llama) if tensor.name.endswith("q_proj.weight"))
>>> query.name, query.shape, query.cuts
('model.layers.0.self_attn.q_proj.weight', (4096, 4096), (Cut(dim=0, axis='tp', parts=32, multiple=0),))
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
"""Model family -> the function that creates the family's architecture from options."""


@lru_cache(maxsize=64)
def architecture(options: ModelConfig) -> Architecture:
    """Return the architecture described by the options of a resolved model."""
    return FAMILIES[options.family](options)


def inventory(options: ModelConfig) -> Iterator[Tensor]:
    """Yield the logical tensors of a resolved model, including adapters, in the order of the forward pass.

    Errors: ValueError if --lora-targets names something other than the model's linear layers.
    """
    model = architecture(options)
    return adapted(model.adapters, tensors(model))


def linears(options: ModelConfig) -> list[str]:
    """Return the names of the linear layers in a model's blocks, which are the valid values of --lora-targets."""
    return linear_names(tensors(architecture(options)))


def units(options: ModelConfig) -> tuple[Unit, ...]:
    """Return the units of a resolved model, in the order of the forward pass."""
    return architecture(options).units


class Shape(NamedTuple):
    """The order of a model's units, which are stacks of layers separated by named units."""

    stack_of: Mapping[int, int]  # layer -> index of its stack
    after: Mapping[str, int]  # named unit -> number of stacks before it


@lru_cache(maxsize=16)
def shape(options: ModelConfig) -> Shape:
    """Return the order of a resolved model's units.

    >>> from mega.core.config.compose import compose
    >>> from mega.core.config.resolve import resolve
    >>> flags = {"layers": 1, "decoder_layers": 2, "micro_batch": 1}
    >>> shape(resolve(compose("t5-220m", flags=flags), world=1).model)
    Shape(stack_of={0: 0, 1: 1, 2: 1}, after={'embedding': 0, 'middle': 1, 'head': 2})
    """
    stack_of, after, stacks_before = dict[int, int](), dict[str, int](), 0
    for unit in units(options):
        if isinstance(unit, int):
            stack_of[unit] = stacks_before
        else:
            stacks_before = after[unit] = len(set(stack_of.values()))
    return Shape(stack_of, after)


def placement(options: ModelConfig, pp: int, chunks: int, layers: Sequence[int] = ()) -> dict[Unit, tuple[int, int]]:
    """Return a map from each unit to the (pipeline rank, chunk) that holds the unit. layers: number of layers in each
    global stage; () if all stages have the same number of layers."""
    return unit_stages(units(options), stage_layers(options.blocks, pp, chunks, layers))


@lru_cache(maxsize=16)
def parameters(options: ModelConfig) -> int:
    """Return the number of elements in all logical tensors, without vocabulary padding. Tied tensors are counted
    once."""
    return sum(tensor.elements for tensor in inventory(options))


@lru_cache(maxsize=16)
def active_parameters(options: ModelConfig) -> int:
    """Return the number of parameters used for one token. For a mixture of experts, only the experts chosen for a token
    are counted."""
    return round(sum(tensor.elements * tensor.share for tensor in inventory(options)))
