"""`mega eval`: the score of a model on a benchmark."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from mega.core.config.compose import GivenOptions
from mega.core.config.run import RunConfig, flag_of, options_with
from mega.core.config.world import is_first_rank, ranks, world_from_env
from mega.core.files import check_file
from mega.options import Reads


def run(
    run: Annotated[RunConfig, Reads("evaluated")],
    given: GivenOptions,
    task: Annotated[str | None, typer.Option("--task", help="wikitext103, lambada or ppl (a corpus)")] = None,
    valid_data: Annotated[
        list[str] | None, typer.Option("--valid-data", help="what is scored: one file, of ppl also token files' prefix")
    ] = None,
    out: Annotated[str | None, typer.Option("--json", help="file of the result [eval-TASK.json here]")] = None,
    overlapping_eval: Annotated[
        int | None,
        typer.Option("--overlapping-eval", help="how far windows are apart [wikitext103: 32; ppl: --seq-length]"),
    ] = None,
    strict_lambada: Annotated[
        bool, typer.Option("--strict-lambada", help="the last word must be right, not only the last token")
    ] = False,
    detokenizer: Annotated[
        Literal["wiki", "ptb", "fairseq", "none"] | None,
        typer.Option("--detokenizer", help="how wikitext103 becomes plain text [by the file's path]"),
    ] = None,
    context_window: Annotated[
        int | None,
        typer.Option("--context-window", help="score wikitext103 as fairseq does, with so many tokens seen (992)"),
    ] = None,
    json_key: Annotated[str, typer.Option("--json-key", help="the text's key in JSON lines")] = "text",
    random_windows: Annotated[
        int | None, typer.Option("--random-windows", help="of ppl, score so many windows drawn at random")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="score only the first so many examples")] = None,
    cloze_eval: Annotated[bool, typer.Option("--cloze-eval", help="Megatron-LM v1's --task lambada")] = False,
    webtext_eval: Annotated[bool, typer.Option("--webtext-eval", help="Megatron-LM v1's --task ppl")] = False,
) -> int:
    """Score a model on a benchmark, at any layout: a run of ours or a directory of others' weights, as it lies.

    The model and its tokenizer are the directory's. Killed and started again, it goes on where it was.
    """
    from mega.core.tasks.options import TaskOptions, task_named

    named = task or ("lambada" if cloze_eval else "ppl" if webtext_eval else None)
    if named is None:
        raise ValueError("--task is missing: give wikitext103, lambada or ppl")
    named = task_named(named)
    out = out or f"eval-{named}.json"
    check_file("--json", out)
    options = TaskOptions(
        named,
        tuple(valid_data or ()),
        overlapping_eval,
        strict_lambada,
        detokenizer,
        context_window,
        json_key,
        random_windows,
        limit,
        run.runtime.seed,
    )
    world = world_from_env()
    size = ranks(world, run.runtime.nproc, run.runtime.world)
    if is_first_rank():
        _note_unused(given)
    from mega.core.tasks.evaluate import evaluate, prepare

    evaluation = prepare(run, given, options, os.path.abspath(out), size)
    if world.source != "alone" or size == 1:
        return evaluate(evaluation)
    from mega.core.parallel.launch import launch

    return launch(size, evaluate, evaluation)


def _note_unused(given: GivenOptions) -> None:
    """On stderr, what was given and is not read."""
    read = {*options_with(evaluated=True), *options_with(on_resume="must match"), "positions"}
    if unused := [flag_of(name) for name in given.values if name not in read]:
        print(f"not used, nothing is trained: {', '.join(unused)}", file=sys.stderr)
