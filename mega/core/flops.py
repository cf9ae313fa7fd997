"""Floating-point operations of a model.

Only matmuls are counted, with a multiply and an add as two operations; norms, softmax and activations are not counted.
This module does not depend on devices or durations.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from mega.core.architecture import Architecture, Tensor, architecture, inventory
from mega.core.architecture.families.parts import CROSS
from mega.core.architecture.families.retriever import ATTENTION
from mega.core.architecture.layer import NeighbourAttention
from mega.core.config.resolve import predicted_tokens, text_lengths
from mega.core.config.run import RunConfig
from mega.core.config.sections import ModelConfig


@lru_cache(maxsize=16)
def matmul_parameters(model: ModelConfig, trainable: bool = False) -> int:
    """Elements of all tensors except lookup tables: the input embedding and the positions.

    A tied embedding counts once, because the head multiplies with it. trainable: count trained tensors only.
    """
    return sum(tensor.elements for tensor in _matmul_tensors(model) if tensor.trainable or not trainable)


def _matmul_tensors(model: ModelConfig) -> Iterator[Tensor]:
    for tensor in inventory(model):
        looked_up = "embedding" in tensor.units and not (architecture(model).tied and "head" in tensor.units)
        if not looked_up:
            yield tensor


def model_flops_per_token(run: RunConfig) -> float:
    """Operations for the forward and backward pass of one token in a resolved `run`: 6 N + 4 F + 12 L h s.

    N: elements of the trained matrices, each weighted by the share of a sample's tokens that it multiplies.
    F: the same for frozen matrices, which have no weight gradient.
    L h: layers x heads x head_dim. s: number of keys of one token. Attention counts the full square, although half of
    the square is masked, as published utilisations do (Chowdhery et al. 2022, appendix B). For a layer with a window, s
    is the maximum number of keys that one token attends to. For an encoder-decoder model the result is the mean over
    the tokens of both stacks. If losses read only some tokens of a bidirectional model, the last layer counts only
    these tokens, except in the projections to queries, keys and values (model/bert.py).

    >>> from mega.core.config.compose import compose
    >>> from mega.core.config.resolve import resolve
    >>> run = resolve(compose("llama2-7b", flags={"micro_batch": 1}), world=1)
    >>> round(model_flops_per_token(run) / 1e9, 2)
    46.09
    """
    lengths, predicted = text_lengths(run), predicted_tokens(run)
    matmuls = _matmul_flops(run.model, lengths, predicted)
    return (matmuls + _attention_flops(architecture(run.model), lengths, predicted)) / sum(lengths)


def _attention_flops(model: Architecture, lengths: tuple[int, ...], predicted: int) -> float:
    """Attention operations (scores, and scores times values) of one sample. lengths: number of tokens in each stack.
    predicted: number of tokens for which the head computes logits."""
    return (
        sum(
            12.0
            * attention.width
            * (_read(model, lengths, predicted) if number == len(model.layers) - 1 else length)
            * attention.most_keys(length if attention.source == "self" else lengths[0])
            for stack, length in zip(model.stacks, lengths, strict=True)
            for number, layer in zip(stack.numbers, stack.layers, strict=True)
            for attention in layer.attentions
        )
        + sum(
            12.0 * attention.width * lengths[-1] * attention.most_keys(lengths[-1])
            for each in model.output.ahead
            for attention in each.layer.attentions
        )
        + sum(_neighbour_flops(layer.neighbours, lengths[0]) for layer in model.layers if layer.neighbours is not None)
    )


def _read(model: Architecture, lengths: tuple[int, ...], predicted: int) -> int:
    """Return the number of tokens of a sample for which the last layer computes its output."""
    if not model.layers[-1].queries_alone:
        return lengths[-1]
    return min(lengths[-1], predicted + (model.output.rows is not None))


def _neighbour_flops(mixer: NeighbourAttention, length: int) -> float:
    """Operations of one sample's attention to its neighbours, and of the attention in the neighbours' encoder."""
    chunks, neighbour_tokens = length // mixer.chunk, mixer.neighbours * mixer.width
    operations = 12.0 * mixer.attention.width * length * neighbour_tokens
    for layer in mixer.encoder:
        for attention in layer.attentions:
            keys = mixer.width if attention.source == "self" else mixer.chunk
            operations += 12.0 * attention.width * chunks * neighbour_tokens * keys
    return operations


@lru_cache(maxsize=16)
def _matmul_flops(options: ModelConfig, lengths: tuple[int, ...], predicted: int) -> float:
    """Operations of one sample in matmuls with weights."""
    model = architecture(options)
    return sum(
        (6.0 if tensor.trainable else 4.0) * tensor.elements * tensor.share * _tokens(model, tensor, lengths, predicted)
        for tensor in _matmul_tensors(options)
    )


def _tokens(model: Architecture, tensor: Tensor, lengths: tuple[int, ...], predicted: int) -> int:
    """Return the number of tokens of a sample that are multiplied by a matrix."""
    rows, unit = model.output.rows, tensor.units[-1]
    if tensor.name.startswith(("pooler.", *(() if rows is None else (f"{rows.name}.",)))):
        return 1
    if unit == "head":
        ahead = model.output.ahead
        if any(tensor.name.startswith(f"{each.name}.") for each in ahead):
            return lengths[-1]
        words = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
        return predicted + (len(ahead) * lengths[-1] if tensor.name == words else 0)
    of_memory = tensor.name.endswith((f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"))
    if isinstance(unit, int) and (reading := model.layers[unit].neighbours) is not None:
        encodes = f".{reading.prefix}." in tensor.name
        if encodes != of_memory:
            return lengths[0] // reading.chunk * reading.neighbours * reading.width
        return lengths[0]
    if f"{CROSS}.k_proj" in tensor.name or f"{CROSS}.v_proj" in tensor.name:  # multiply the encoder's output
        return lengths[0]
    if unit == len(model.layers) - 1 and not any(f".{name}_proj." in tensor.name for name in "qkv"):
        return _read(model, lengths, predicted)
    # A norm between two stacks belongs to the first unit of the second stack, but acts on the first stack's tokens.
    stack_lengths = (length for stack, length in zip(model.stacks, lengths, strict=True) if unit in stack.numbers)
    return next(stack_lengths, lengths[0])
