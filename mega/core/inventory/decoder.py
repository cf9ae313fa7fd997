"""The tensors of left-to-right language models: GPT and Llama are values of one table.

Names are Hugging Face's Llama names, so that a Llama checkpoint needs no renaming; GPT uses the same names
with biases and `model.embed_positions.weight` added. Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator

from mega.core.config.sections import ModelConfig
from mega.core.inventory.block import blocks, norm
from mega.core.inventory.tensor import Cut, Init, Table, Tensor, Unit, resolved


def units(model: ModelConfig) -> tuple[Unit, ...]:
    return ("embedding", *range(resolved(model.layers, "layers")), "head")


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """From the embedding to the head."""
    hidden, vocab = resolved(model.hidden, "hidden"), resolved(model.vocab, "vocab")
    normal = Init(std=model.init_std)
    rows = Cut(0, "tp", vocab, multiple=model.vocab_multiple)
    yield from embeddings(model)
    yield from blocks(model)
    yield from norm(model, "model.norm", hidden, "head", "sequence")
    if not model.tied:
        yield Tensor("lm_head.weight", (vocab, hidden), ("head",), normal, rows)


def embeddings(model: ModelConfig) -> Iterator[Tensor]:
    """The tables of tokens, which the head may share, and of positions."""
    hidden, vocab = resolved(model.hidden, "hidden"), resolved(model.vocab, "vocab")
    normal = Init(std=model.init_std)
    rows = Cut(0, "tp", vocab, multiple=model.vocab_multiple)
    ends: tuple[Unit, ...] = ("embedding", "head") if model.tied else ("embedding",)
    yield Tensor("model.embed_tokens.weight", (vocab, hidden), ends, normal, rows)
    if model.position == "learned":
        table = (resolved(model.positions, "positions"), hidden)
        yield Tensor("model.embed_positions.weight", table, ("embedding",), normal, partial=("sequence",))


TABLE = Table(tensors, units)
