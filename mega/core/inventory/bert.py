"""The tensors of BERT: a stack read in both directions, a head for masked words, and one for the order of two parts.

Norms stand before each branch, as in Megatron-LM's BERT, or after it, as in the original (Devlin et al. 2018), which
has none after the last block and one after the embeddings instead. The output layer is the tied embedding with a bias
of its own, cut like the vocabulary. What judges a row is small, and whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from mega.core.config.sections import ModelConfig
from mega.core.inventory.block import blocks, norm
from mega.core.inventory.decoder import embeddings, units
from mega.core.inventory.tensor import Cut, Init, Table, Tensor, resolved


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """From the embedding to the heads."""
    hidden, vocab = resolved(model.hidden, "hidden"), resolved(model.vocab, "vocab")
    normal = Init(std=model.init_std)
    pre = model.norm_placement == "pre"
    yield from embeddings(model)
    if model.binary_head:
        yield Tensor("model.embed_types.weight", (2, hidden), ("embedding",), normal, partial=("sequence",))
    if not pre:
        yield from norm(model, "model.embed_norm", hidden, "embedding", "sequence")
    yield from blocks(model)
    if pre:
        yield from norm(model, "model.norm", hidden, "head", "sequence")
    yield Tensor("lm_head.dense.weight", (hidden, hidden), ("head",), normal, partial=("sequence",))
    yield Tensor("lm_head.dense.bias", (hidden,), ("head",), Init(), partial=("sequence",))
    yield from norm(model, "lm_head.norm", hidden, "head", "sequence")
    rows = Cut(0, "tp", vocab, multiple=model.vocab_multiple)
    yield Tensor("lm_head.bias", (vocab,), ("head",), Init(), rows)
    if model.binary_head:
        yield Tensor("pooler.dense.weight", (hidden, hidden), ("head",), normal)
        yield Tensor("pooler.dense.bias", (hidden,), ("head",), Init())
        yield Tensor("binary_head.weight", (2, hidden), ("head",), normal)
        yield Tensor("binary_head.bias", (2,), ("head",), Init())


TABLE = Table(tensors, units)
