"""The tensors of encoder-decoder language models: Megatron-LM's T5, which is not Hugging Face's.

Names are those of Hugging Face's BART, whose blocks are alike, with Llama's within a block. Encoder, decoder and head
share one table of tokens, encoder and decoder one of positions. Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mega.core.config.sections import ModelConfig
from mega.core.inventory.block import attention, block, norm
from mega.core.inventory.tensor import Cut, Init, Table, Tensor, Unit, resolved

CROSS = "encoder_attn"
"""A decoder block's attention to what the encoder made of its tokens."""


def units(model: ModelConfig) -> tuple[Unit, ...]:
    """Blocks are numbered from the encoder's first to the decoder's last. "middle" is the encoder's final norm and the
    decoder's embedding."""
    encoder, decoder = depths(model)
    return ("embedding", *range(encoder), "middle", *range(encoder, encoder + decoder), "head")


def depths(model: ModelConfig) -> tuple[int, int]:
    """Blocks of the encoder and of the decoder."""
    return resolved(model.layers, "layers"), resolved(model.decoder_layers, "decoder_layers")


def block_prefix(model: ModelConfig, number: int) -> str:
    """What the names of a block's tensors begin with.

    >>> block_prefix(ModelConfig(layers=2, decoder_layers=3), 2)
    'model.decoder.layers.0.'
    """
    encoder, _ = depths(model)
    return f"model.decoder.layers.{number - encoder}." if number >= encoder else f"model.encoder.layers.{number}."


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """From the encoder's embedding to the decoder's head."""
    hidden, vocab = resolved(model.hidden, "hidden"), resolved(model.vocab, "vocab")
    normal, rows = Init(std=model.init_std), Cut(0, "tp", vocab, multiple=model.vocab_multiple)
    looked_up: tuple[Unit, ...] = ("embedding", "middle")
    yield Tensor("model.embed_tokens.weight", (vocab, hidden), (*looked_up, "head"), normal, rows)
    if model.position == "learned":
        table = (resolved(model.positions, "positions"), hidden)
        yield Tensor("model.embed_positions.weight", table, looked_up, normal, partial=("sequence",))
    encoder, decoder = depths(model)
    for number in range(encoder + decoder):
        if number == encoder:
            yield from norm(model, "model.encoder.norm", hidden, "middle", "sequence")
        for tensor in block(model, number) if number < encoder else _decoder_block(model, number):
            yield replace(tensor, name=block_prefix(model, number) + tensor.name)
    yield from norm(model, "model.decoder.norm", hidden, "head", "sequence")
    yield Tensor("lm_head.bias", (vocab,), ("head",), Init(), rows)


def _decoder_block(model: ModelConfig, number: int) -> Iterator[Tensor]:
    """An encoder's, with cross attention and its norm before the feed-forward layer's."""
    for tensor in block(model, number):
        if tensor.name == "post_attention_layernorm.weight":
            hidden = resolved(model.hidden, "hidden")
            yield from norm(model, f"{CROSS}_layernorm", hidden, number, "sequence")
            yield from attention(model, CROSS, number)
        yield tensor


TABLE = Table(tensors, units)
