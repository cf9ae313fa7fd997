"""Options of a retriever (Retro; Borgeaud et al. 2022): which layers read neighbours, and what reads them first.

A part of the model's section (sections.py). Without --retriever no layer reads neighbours, and none of the others may
be given. Rules about them are in check_retriever.py. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from mega.core.config.mixture import DECODERS
from mega.core.config.option import BELOW_ONE, COUNT, NOT_NEGATIVE, Section, option

_NEEDS = {"retriever": ()}


@dataclass(frozen=True, kw_only=True)
class RetrieverOptions(Section):
    """What of a model reads neighbours."""

    retriever: bool = option(
        False,
        "some layers read the neighbours of each chunk of the text, and an encoder in the first of them does before",
        megatron={"--retro-add-retriever": True},
        families=DECODERS,
    )
    retro_layers: tuple[int, ...] = option(
        (),
        "numbers of the layers that read neighbours, the first layer being 0 [5, or 8 of more than 15 layers, and "
        "every third after it]",
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
        "chunks of a neighbour: the one that was found and those that follow it",
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
        "multiply what layers read of neighbours by this; 0 reads nothing of them",
        megatron="--retro-attention-gate",
        within=NOT_NEGATIVE,
        on_resume="noted",
        needs=_NEEDS,
    )
    retro_rope: bool = option(
        True,
        "rotary positions inside each neighbour; Megatron-LM has none, so that a neighbour is a bag of tokens there",
        megatron={"--retro-add-retriever": False},
        needs=_NEEDS,
        read_with={"position": ("rope",)},
    )
    retro_cross_documents: bool = option(
        False,
        "what follows a neighbour may be of the next document, as in Megatron-LM; else ends of documents are read",
        megatron={"--retro-add-retriever": True},
        on_resume="noted",
        needs=_NEEDS,
    )


def retriever_words(model: RetrieverOptions) -> str:
    """How a model reads neighbours, for a user.

    >>> retriever_words(RetrieverOptions())
    '2 of each chunk of 64 tokens, of 2 chunks each; what follows one is of its document'
    """
    follows = "may be of the next document, as in Megatron-LM" if model.retro_cross_documents else "is of its document"
    of = f"{model.retro_neighbours} of each chunk of {model.retro_chunk_length} tokens"
    return f"{of}, of {model.retro_retrieved_chunks} chunks each; what follows one {follows}"


def reading_layers(options: RetrieverOptions, layers: int) -> tuple[int, ...]:
    """Numbers of the layers that read neighbours, ascending.

    >>> reading_layers(RetrieverOptions(retriever=True), 12), reading_layers(RetrieverOptions(retriever=True), 24)
    ((5, 8, 11), (8, 11, 14, 17, 20, 23))
    """
    if not options.retriever:
        return ()
    return tuple(sorted(options.retro_layers)) or tuple(range(5 if layers <= 15 else 8, layers, 3))


Model = TypeVar("Model", bound=RetrieverOptions)


def with_retriever(model: Model, of: RetrieverOptions) -> Model:
    """`model` with the retriever that another one has."""
    return replace(model, **{field.name: getattr(of, field.name) for field in fields(RetrieverOptions)})
