"""One-line descriptions of a model's shape and size, for summaries of runs, presets and checkpoints."""

from __future__ import annotations

from mega.core.architecture import active_parameters, parameters
from mega.core.architecture.model import Architecture
from mega.core.config.sections import ModelConfig
from mega.core.words import count_words


def shape_words(model: Architecture) -> str:
    """Describe the shape of a model by its first layer and its first mixture of experts.

    >>> from mega.core.architecture import architecture
    >>> from mega.core.config.compose import compose
    >>> from mega.core.config.resolve import resolve
    >>> shape_words(architecture(resolve(compose("llama3-8b", flags={"micro_batch": 1}), world=1).model))
    'llama, 32 layers, hidden 4096, 32 heads (8 of keys and values), ffn 14336, vocabulary 128,256'
    """
    attention = model.block.attention
    shared = "" if attention.kv_heads == attention.heads else f" ({attention.kv_heads} of keys and values)"
    layers = " + ".join(str(len(stack.layers)) for stack in model.stacks)
    return (
        f"{model.family}, {layers} layers, hidden {model.hidden}, {attention.heads} heads{shared}, "
        f"{_feed_forward(model)}, vocabulary {model.input.vocab:,}"
    )


def _feed_forward(model: Architecture) -> str:
    """Describe the feed-forward networks of all layers."""
    mixtures = [layer.experts for layer in model.layers if layer.experts is not None]
    dense = [layer for layer in model.layers if layer.experts is None]
    words = [f"ffn {dense[0].feed_forward.width}"] if dense else []
    if mixtures:
        first = mixtures[0]
        shared = "" if first.shared is None else f" and a shared one of {first.shared.width}"
        layers = f" in {len(mixtures)} layers" if dense else ""
        words.append(f"{first.count} experts of {first.expert.width}, {first.chosen} chosen{shared}{layers}")
    return ", ".join(words)


def parameter_words(options: ModelConfig) -> str:
    """Describe the number of parameters, and for a mixture of experts also the number used per token.

    >>> from mega.core.config.compose import compose
    >>> from mega.core.config.resolve import resolve
    >>> parameter_words(resolve(compose("mixtral-8x7b", flags={"micro_batch": 1}), world=1).model)
    '46.7B parameters, 12.9B active'
    """
    words = f"{count_words(parameters(options))} parameters"
    return f"{words}, {count_words(active_parameters(options))} active" if options.experts else words


def size_words(model: Architecture) -> str:
    """Describe the shape of a model briefly, for use by servers."""
    return f"{model.family}, {len(model.layers)} blocks of {model.hidden}"
