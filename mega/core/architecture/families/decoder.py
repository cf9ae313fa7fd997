"""Left-to-right language models: GPT and Llama are values of one decoder."""

from __future__ import annotations

from mega.core.architecture.families import parts
from mega.core.architecture.families.retriever import layer
from mega.core.architecture.model import Architecture, Output, Words
from mega.core.config.sections import ModelConfig


def decoder(options: ModelConfig) -> Architecture:
    """One stack of causal layers, of which some may read neighbours, and logits."""
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
        stacks=(parts.stack(options, lambda number: layer(options, number), options.layers),),
        output=Output(words=words, pooler=False, rows=None),
    )
