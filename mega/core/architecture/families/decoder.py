"""Left-to-right language models: GPT and Llama are values of one decoder."""

from __future__ import annotations

from mega.core.architecture.families import parts
from mega.core.architecture.model import Architecture, Output, Words
from mega.core.config.sections import ModelConfig


def decoder(options: ModelConfig) -> Architecture:
    """One stack of causal layers, and logits."""
    words = Words(
        tied=options.tied,
        bias=options.head_bias,
        transform=None,
        divisor=options.logit_divisor,
        softcap=options.logit_softcap,
    )
    return parts.architecture(
        options,
        input=parts.inputs(options),
        stacks=(parts.stack(options, lambda number: parts.layer(options, number=number), options.layers),),
        output=Output(words=words, pooler=False, rows=None),
    )
