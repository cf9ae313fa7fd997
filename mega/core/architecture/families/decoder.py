"""Left-to-right language models: GPT and Llama are values of one decoder."""

from __future__ import annotations

from mega.core.architecture.families import parts
from mega.core.architecture.model import Architecture, Output, Words
from mega.core.config.sections import ModelConfig


def decoder(options: ModelConfig) -> Architecture:
    """One stack of causal layers, and logits without a bias."""
    parts.check_depth(options.layers)
    made = (parts.layer(options, number=number) for number in range(options.layers if options.experts else 1))
    layers = tuple(made) if options.experts else (next(made),) * options.layers
    return parts.architecture(
        options,
        input=parts.inputs(options),
        stacks=(parts.stack(options, layers, options.layers),),
        output=Output(words=Words(tied=options.tied, bias=False, transform=None), pooler=False, rows=None),
    )
