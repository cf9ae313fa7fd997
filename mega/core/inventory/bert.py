"""The tensors of BERT: a stack read in both directions, a head for masked words, and one for the order of two parts.

Norms stand before each branch, as in Megatron-LM's BERT, or after it, as in the original (Devlin et al. 2018), which
has none after the last block and one after the embeddings instead. The output layer is the tied embedding with a bias
of its own, cut like the vocabulary. What judges a row is small, and whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mega.core.config.sections import ModelConfig
from mega.core.inventory.block import blocks, norm
from mega.core.inventory.decoder import embeddings, units
from mega.core.inventory.tensor import Cut, Init, Table, Tensor, resolved


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """From the embedding to the heads."""
    hidden = resolved(model.hidden, "hidden")
    pre = model.norm_placement == "pre"
    # Only the head for words shares the table: a stage that held it for nothing would wait for its gradient.
    yield from embeddings(replace(model, tied=model.tied and model.head == "lm"))
    if types := token_types(model):
        normal = Init(std=model.init_std)
        yield Tensor("model.embed_types.weight", (types, hidden), ("embedding",), normal, partial=("sequence",))
    if not pre:
        yield from norm(model, "model.embed_norm", hidden, "embedding", "sequence")
    yield from blocks(model)
    if pre:
        yield from norm(model, "model.norm", hidden, "head", "sequence")
    if model.head == "lm":
        yield from _words(model)
    if model.binary_head or model.head in ("classification", "choice"):
        yield from _dense(model, "pooler.dense", hidden)
    if model.head == "classification":
        yield from _dense(model, "classification_head", model.classes)
    elif model.head == "choice":
        yield from _dense(model, "multichoice_head", 1)
    elif model.binary_head and model.head == "lm":
        yield from _dense(model, "binary_head", 2)


def token_types(model: ModelConfig) -> int:
    """Parts of a row that the embedding tells apart: Megatron-LM's has them along with the binary head."""
    return (2 if model.binary_head else 0) if model.token_types is None else model.token_types


def _words(model: ModelConfig) -> Iterator[Tensor]:
    """The head for masked words: what acts on a token is whole on every rank, which may have its own tokens only."""
    hidden, vocab = resolved(model.hidden, "hidden"), resolved(model.vocab, "vocab")
    for tensor in _dense(model, "lm_head.dense", hidden):
        yield replace(tensor, partial=("sequence",))
    yield from norm(model, "lm_head.norm", hidden, "head", "sequence")
    yield Tensor("lm_head.bias", (vocab,), ("head",), Init(), Cut(0, "tp", vocab, multiple=model.vocab_multiple))


def _dense(model: ModelConfig, name: str, outs: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (outs, resolved(model.hidden, "hidden")), ("head",), Init(std=model.init_std))
    yield Tensor(f"{name}.bias", (outs,), ("head",), Init())


TABLE = Table(tensors, units)
