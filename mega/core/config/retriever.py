"""Options of a retriever (Retro; Borgeaud et al. 2022): which layers read neighbours, and the encoder of neighbours.

These options are part of the model section (sections.py). Without --retriever no layer reads neighbours, and no other
option of a retriever may be given. check_retriever.py holds the rules. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from mega.core.config.mixture import DECODERS
from mega.core.config.option import BELOW_ONE, COUNT, NOT_NEGATIVE, Section, option

_NEEDS = {"retriever": ()}


@dataclass(frozen=True, kw_only=True)
class RetrieverOptions(Section):
    """Retriever: the layers that read neighbours, and their encoder."""

    retriever: bool = option(
        False,
        "some layers read the neighbours of each chunk of the text, which an encoder in the first "
        "of these layers encodes",
        megatron={"--retro-add-retriever": True},
        families=DECODERS,
    )
    retro_layers: tuple[int, ...] = option(
        (),
        "indices of the layers that read neighbours, counted from 0 [every third layer from 5 on, "
        "or from 8 on with more than 15 layers]",
        within=NOT_NEGATIVE,
        needs=_NEEDS,
    )
    retro_chunk_length: int = option(
        64,
        "tokens of a chunk",
        megatron="--retro-gpt-chunk-length",
        within=COUNT,
        most=2**20,
        needs=_NEEDS,
    )
    retro_neighbours: int = option(
        2,
        "neighbours of a chunk that are read",
        megatron="--retro-num-neighbors",
        within=COUNT,
        most=2**10,
        needs=_NEEDS,
    )
    retro_retrieved_chunks: int = option(
        2,
        "chunks of a neighbour: the retrieved one and those that follow it",
        megatron="--retro-num-retrieved-chunks",
        within=COUNT,
        most=2**10,
        needs=_NEEDS,
    )
    retro_encoder_layers: int = option(
        2,
        "layers of the neighbours' encoder",
        megatron="--retro-encoder-layers",
        within=COUNT,
        most=2**10,
        needs=_NEEDS,
    )
    retro_encoder_hidden_dropout: float = option(
        0.1,
        "dropout of the encoder's residual stream",
        megatron="--retro-encoder-hidden-dropout",
        within=BELOW_ONE,
        on_resume="noted",
        needs=_NEEDS,
    )
    retro_encoder_attention_dropout: float = option(
        0.1,
        "dropout of the encoder's attention weights",
        megatron="--retro-encoder-attention-dropout",
        within=BELOW_ONE,
        on_resume="noted",
        needs=_NEEDS,
    )
    retro_gate: float = option(
        1.0,
        "multiply the output of attention to neighbours by this; 0 ignores them",
        megatron="--retro-attention-gate",
        within=NOT_NEGATIVE,
        on_resume="noted",
        needs=_NEEDS,
    )
    retro_rope: bool = option(
        True,
        "rotary positions inside each neighbour; Megatron-LM has none there, so a neighbour is a bag of tokens",
        megatron={"--retro-add-retriever": False},
        needs=_NEEDS,
        read_with={"position": ("rope",)},
    )
    retro_cross_documents: bool = option(
        False,
        "the chunks after a neighbour may belong to the next document, as in Megatron-LM; if off, "
        "they end with the neighbour's document",
        megatron={"--retro-add-retriever": True},
        on_resume="noted",
        needs=_NEEDS,
    )


def retriever_words(model: RetrieverOptions) -> str:
    """A message for the user that describes how a model reads neighbours.

    >>> retriever_words(RetrieverOptions())
    '2 of each chunk of 64 tokens, of 2 chunks each; what follows one is of its document'
    """
    follows = "may be of the next document, as in Megatron-LM" if model.retro_cross_documents else "is of its document"
    neighbours = f"{model.retro_neighbours} of each chunk of {model.retro_chunk_length} tokens"
    return f"{neighbours}, of {model.retro_retrieved_chunks} chunks each; what follows one {follows}"


def reading_layers(options: RetrieverOptions, layers: int) -> tuple[int, ...]:
    """Indices of the layers that read neighbours, in ascending order.

    >>> reading_layers(RetrieverOptions(retriever=True), 12), reading_layers(RetrieverOptions(retriever=True), 24)
    ((5, 8, 11), (8, 11, 14, 17, 20, 23))
    """
    if not options.retriever:
        return ()
    return tuple(sorted(options.retro_layers)) or tuple(range(5 if layers <= 15 else 8, layers, 3))


Model = TypeVar("Model", bound=RetrieverOptions)


def with_retriever(model: Model, of: RetrieverOptions) -> Model:
    """`model` with the retriever of the model `of`."""
    return replace(model, **{field.name: getattr(of, field.name) for field in fields(RetrieverOptions)})
