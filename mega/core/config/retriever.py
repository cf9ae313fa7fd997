"""Options of a retriever (Retro; Borgeaud et al. 2022): which layers read neighbours, and what reads them first.

A part of the model's section (sections.py). Without --retriever no layer reads neighbours, and none of the others may
be given. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega.core.config.mixture import DECODERS
from mega.core.config.option import BELOW_ONE, COUNT, NOT_NEGATIVE, Section, option

if TYPE_CHECKING:
    from mega.core.config.run import RunConfig


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


def reading_layers(options: RetrieverOptions, layers: int) -> tuple[int, ...]:
    """Numbers of the layers that read neighbours, ascending.

    >>> reading_layers(RetrieverOptions(retriever=True), 12), reading_layers(RetrieverOptions(retriever=True), 24)
    ((5, 8, 11), (8, 11, 14, 17, 20, 23))
    """
    if not options.retriever:
        return ()
    return tuple(sorted(options.retro_layers)) or tuple(range(5 if layers <= 15 else 8, layers, 3))


Line = Callable[[str, str], str]
"""Option, rule -> a line of the message."""


def retriever(run: RunConfig, line: Line) -> Iterator[str]:
    """A line for each mistake in the options of a retriever, in a resolved run."""
    model, parallel, length = run.model, run.parallel, run.model.retro_chunk_length
    if not model.retriever:
        return
    reading = reading_layers(model, model.layers)
    if not reading:
        yield line("retriever", f"reads from layer 5 on, but there are {model.layers}; give --retro-layers")
    elif reading[-1] >= model.layers:
        yield line("retro_layers", f"has no layer {reading[-1]}; valid: 0 to {model.layers - 1}")
    elif len(set(reading)) < len(reading):
        yield line("retro_layers", "names a layer twice")
    if run.batch.seq_length % length:
        yield line("retro_chunk_length", f"must divide --seq-length {run.batch.seq_length}")
    elif parallel.sequence_parallel:
        each = model.retro_neighbours * model.retro_retrieved_chunks * length
        tokens = run.batch.micro_batch * (run.batch.seq_length // length) * each
        if tokens % parallel.tp:
            yield line("tp", f"must divide the {tokens} tokens of a microbatch's neighbours under --sequence-parallel")
    longest = length * model.retro_retrieved_chunks
    if model.position == "learned" and longest > model.positions:
        yield line("positions", f"must be at least {longest}, the tokens of a neighbour")
    if model.norm_placement != "pre" or model.parallel_branches != "no":
        yield line("retriever", "needs --norm-placement pre and --parallel-branches no")
    if not run.data.mock_data:
        yield line("retriever", "needs --mock-data: neighbours of token files cannot be read yet")
    for name, excluded in (
        ("experts", model.experts),
        ("cp", parallel.cp > 1),
        ("reset_attention", run.data.reset_attention),
        ("reset_positions", run.data.reset_positions),
        ("fp8", run.precision.fp8),
        ("tp_overlap", parallel.tp_overlap),
        ("cuda_graph", run.runtime.cuda_graph),
    ):
        if excluded:
            yield line(name, _EXCLUDED.get(name, "excludes --retriever"))
    if run.finetuning.task not in ("lm",):
        yield line("task", "excludes --retriever; valid there: lm")


_EXCLUDED = {
    "cp": "must be 1 with --retriever, whose chunks are of whole rows",
    "reset_attention": "excludes --retriever: a chunk of a row may hold parts of several documents",
    "reset_positions": "excludes --retriever, whose neighbours are those of chunks of a row",
}
