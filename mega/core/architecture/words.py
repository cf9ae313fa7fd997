"""A model's shape and its size in words, for those who look at a run, a preset or a checkpoint. No tensor is listed."""

from __future__ import annotations

from mega.core.architecture.model import Architecture


def shape_words(model: Architecture) -> str:
    """What a model is; its first layer stands for all.

    >>> shape_words(architecture(resolve(compose("llama3-8b", flags={"micro_batch": 1}), world=1).model))
    'llama, 32 layers, hidden 4096, 32 heads (8 of keys and values), ffn 14336, vocabulary 128,256'
    """
    attention = model.block.attention
    shared = "" if attention.kv_heads == attention.heads else f" ({attention.kv_heads} of keys and values)"
    layers = " + ".join(str(len(stack.layers)) for stack in model.stacks)
    return (
        f"{model.family}, {layers} layers, hidden {model.hidden}, {attention.heads} heads{shared}, "
        f"ffn {model.block.feed_forward.width}, vocabulary {model.input.vocab:,}"
    )


def size_words(model: Architecture) -> str:
    """The same in short, as servers have it."""
    return f"{model.family}, {len(model.layers)} blocks of {model.hidden}"
