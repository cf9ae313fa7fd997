"""Options of a retriever (Retro; Borgeaud et al. 2022): the layers that attend to neighbours, and the encoder of
neighbours.

These options are part of the model section (sections.py). Without --retriever no layer attends to neighbours, and no
other option of a retriever may be given. `check_retriever.py` contains the rules for these options. This module does
not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from mega.core.config.mixture import DECODERS
from mega.core.config.option import BELOW_ONE, COUNT, NOT_NEGATIVE, Section, option

_NEEDS = {"retriever": ()}


@dataclass(frozen=True, kw_only=True)
class RetrieverOptions(Section):
    """Retriever: the layers that attend to neighbours, and the encoder of the neighbours."""

    retriever: bool = option(
        False,
        "let some layers attend to retrieved neighbours of each chunk of the text; the first of these layers "
        "contains the neighbours' encoder",
        megatron={"--retro-add-retriever": True},
        families=DECODERS,
    )
    retro_layers: tuple[int, ...] = option(
        (),
        "indices of the layers that attend to neighbours, counted from 0 [every third layer, starting at 5, or"
        " at 8 if there are more than 15 layers]",
        within=NOT_NEGATIVE,
        needs=_NEEDS,
    )
    retro_chunk_length: int = option(
        64,
        "number of tokens in a chunk",
        megatron="--retro-gpt-chunk-length",
        within=COUNT,
        most=2**20,
        needs=_NEEDS,
    )
    retro_neighbours: int = option(
        2,
        "number of neighbours per chunk",
        megatron="--retro-num-neighbors",
        within=COUNT,
        most=2**10,
        needs=_NEEDS,
    )
    retro_retrieved_chunks: int = option(
        2,
        "number of chunks in a neighbour: the retrieved chunk and the chunks that follow it",
        megatron="--retro-num-retrieved-chunks",
        within=COUNT,
        most=2**10,
        needs=_NEEDS,
    )
    retro_encoder_layers: int = option(
        2,
        "number of layers in the neighbours' encoder",
        megatron="--retro-encoder-layers",
        within=COUNT,
        most=2**10,
        needs=_NEEDS,
    )
    retro_encoder_hidden_dropout: float = option(
        0.1,
        "dropout probability in the encoder's residual stream",
        megatron="--retro-encoder-hidden-dropout",
        within=BELOW_ONE,
        on_resume="noted",
        needs=_NEEDS,
    )
    retro_encoder_attention_dropout: float = option(
        0.1,
        "dropout probability of the encoder's attention weights",
        megatron="--retro-encoder-attention-dropout",
        within=BELOW_ONE,
        on_resume="noted",
        needs=_NEEDS,
    )
    retro_gate: float = option(
        1.0,
        "multiply the output of attention to neighbours by this; 0 ignores neighbours",
        megatron="--retro-attention-gate",
        within=NOT_NEGATIVE,
        on_resume="noted",
        needs=_NEEDS,
    )
    retro_rope: bool = option(
        True,
        "use rotary positions inside each neighbour; Megatron-LM does not, and so treats a neighbour as a bag "
        "of tokens",
        megatron={"--retro-add-retriever": False},
        needs=_NEEDS,
        read_with={"position": ("rope",)},
    )
    retro_cross_documents: bool = option(
        False,
        "let the chunks after a neighbour continue into the next document, as in Megatron-LM; if off, stop at "
        "the end of the neighbour's document",
        megatron={"--retro-add-retriever": True},
        on_resume="noted",
        needs=_NEEDS,
    )


def retriever_words(model: RetrieverOptions) -> str:
    """Return a message for the user that describes the neighbours of a model.

    >>> retriever_words(RetrieverOptions())
    '2 of each chunk of 64 tokens, of 2 chunks each; what follows one is of its document'
    """
    follows = "may be of the next document, as in Megatron-LM" if model.retro_cross_documents else "is of its document"
    neighbours = f"{model.retro_neighbours} of each chunk of {model.retro_chunk_length} tokens"
    return f"{neighbours}, of {model.retro_retrieved_chunks} chunks each; what follows one {follows}"


def reading_layers(options: RetrieverOptions, layers: int) -> tuple[int, ...]:
    """Return the indices of the layers that attend to neighbours, in ascending order.

    >>> reading_layers(RetrieverOptions(retriever=True), 12), reading_layers(RetrieverOptions(retriever=True), 24)
    ((5, 8, 11), (8, 11, 14, 17, 20, 23))
    """
    if not options.retriever:
        return ()
    return tuple(sorted(options.retro_layers)) or tuple(range(5 if layers <= 15 else 8, layers, 3))


Model = TypeVar("Model", bound=RetrieverOptions)


def with_retriever(model: Model, of: RetrieverOptions) -> Model:
    """Return a copy of `model` with the retriever options of the model `of`."""
    return replace(model, **{field.name: getattr(of, field.name) for field in fields(RetrieverOptions)})
