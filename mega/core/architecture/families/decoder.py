"""Left-to-right language models: GPT and Llama are values of one decoder."""

from __future__ import annotations

from mega.core.architecture.families import parts
from mega.core.architecture.model import Architecture, Output, Words
from mega.core.config.sections import ModelConfig


def decoder(options: ModelConfig) -> Architecture:
    """One stack of causal layers, and logits without a bias."""
    return parts.architecture(
        options,
        input=parts.inputs(options),
        stacks=(parts.stack(options, parts.layer(options), options.layers),),
        output=Output(words=Words(tied=options.tied, bias=False, transform=None), pooler=False, rows=None),
    )
