"""Check the options of a model with a retriever in a resolved run. `check` (config/check.py) applies these rules
together with all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mega.core.config.retriever import reading_layers
from mega.core.config.run import RunConfig

Line = Callable[[str, str], str]
"""Function that takes an option's name and a rule, and returns a line of the error message."""


def retriever(run: RunConfig, line: Line) -> Iterator[str]:
    """Yield an error message for each mistake in the options of a retriever."""
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
    # The tokens of the neighbours' encoder are also split over the tensor ranks.
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
    yield from _neighbours(run, line)
    for name, excluded in (
        ("experts", model.experts),
        ("cp", parallel.cp > 1),
        ("reset_attention", run.data.reset_attention),
        ("reset_positions", run.data.reset_positions),
        ("fp8", run.precision.fp8),
        ("sample_interval", run.log.sample_interval is not None),
    ):
        if excluded:
            yield line(name, _EXCLUDED.get(name, "excludes --retriever"))
    if run.finetuning.task not in ("lm",):
        yield line("task", "excludes --retriever; valid there: lm")


def _neighbours(run: RunConfig, line: Line) -> Iterator[str]:
    """Check the source of neighbours. `mega retro` retrieves neighbours only for the samples of --data-path."""
    data, masking = run.data, run.masking
    if data.retro is None:
        unread = run.runtime.dry_run and not (data.data_path or data.train_data)  # a dry run needs no data
        if not data.mock_data and not unread:
            yield line("retriever", "needs --retro, the folder of the neighbours, or --mock-data")
        return
    for name, excluded in (
        ("mock_data", data.mock_data),
        ("chat_data", data.chat_data),
        ("valid_sets", data.valid_sets),
        ("valid_by_corpus", run.evaluation.valid_by_corpus),
        ("fim_data", data.fim_data),
        ("sample_kind", masking.sample_kind != "gpt"),
    ):
        if excluded:
            yield line(name, "excludes --retro, which has neighbours of the samples of token files")


_EXCLUDED = {
    "cp": "must be 1 with --retriever, whose chunks are of whole rows",
    "reset_attention": "excludes --retriever: a chunk of a row may hold parts of several documents",
    "reset_positions": "excludes --retriever, whose neighbours are those of chunks of a row",
}
