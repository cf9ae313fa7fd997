"""Left-to-right language models. GPT and Llama are configurations of one decoder."""

from __future__ import annotations

from collections.abc import Iterator

from mega.core.architecture.families import parts
from mega.core.architecture.families.retriever import layer
from mega.core.architecture.model import Ahead, Architecture, Output, Words
from mega.core.config.sections import ModelConfig


def decoder(options: ModelConfig) -> Architecture:
    """Return a decoder's architecture: a stack of causal layers, and logits. Some layers may attend to neighbours."""
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
        output=Output(words=words, ahead=tuple(_ahead(options)), pooler=False, rows=None),
    )


def _ahead(options: ModelConfig) -> Iterator[Ahead]:
    """Return the layers of multi-token prediction, which have the architecture of the stack's last layer and
    Megatron-LM's names."""
    for number in range(options.mtp_layers):
        name = f"mtp.layers.{number}"
        yield Ahead(
            name=name,
            token_norm=parts.norm(options, f"{name}.enorm"),
            stream_norm=parts.norm(options, f"{name}.hnorm"),
            layer=layer(options, options.layers - 1),
            norm=parts.norm(options, f"{name}.final_layernorm"),
            loss=f"mtp_{number + 1}_loss",
            coefficient=options.mtp_loss / options.mtp_layers,
        )
