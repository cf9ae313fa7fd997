"""`mega eval`: the score of a model on a benchmark."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import typer

from mega.core.config.compose import GivenOptions
from mega.core.config.run import RunConfig, flag_of, options_with
from mega.core.config.world import World, is_first_rank, ranks, world_from_env
from mega.core.files import check_file, check_source
from mega.options import Reads

LOADS_MODEL = True


def run(
    run: Annotated[RunConfig, Reads("evaluated")],
    given: GivenOptions,
    task: Annotated[
        str | None, typer.Option("--task", help="lambada, ppl of a corpus, wikitext103, toxicity, mnli, qqp or race")
    ] = None,
    valid_data: Annotated[
        list[str] | None,
        typer.Option(
            "--valid-data", help="what is scored: one file, of ppl also token files' prefix; several of labels"
        ),
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
    json_key: Annotated[str, typer.Option("--json-key", "--json-keys", help="the text's key in JSON lines")] = "text",
    random_windows: Annotated[
        int | None, typer.Option("--random-windows", help="of ppl, score so many windows drawn at random")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="score only the first so many examples")] = None,
    ensemble: Annotated[
        list[str] | None,
        typer.Option("--ensemble", help="of mnli, qqp and race: predictions of several models instead of a model"),
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--tasks", help="tasks of lm-eval instead, such as hellaswag,gsm8k")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", help="of --tasks: examples in front of a question", min=0)
    ] = None,
    include_path: Annotated[
        str | None, typer.Option("--include-path", help="of --tasks: a directory of more task files")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="of --tasks: ask in the form of the model's conversations")
    ] = False,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="of --tasks: keep every question and answer in --json")
    ] = False,
    scorer: Annotated[
        str | None, typer.Option("--scorer", help="of toxicity: https://HOST, model:DIR, words:FILE or scores:FILE")
    ] = None,
    continuations: Annotated[
        int | None, typer.Option("--continuations", help="of toxicity: of each prompt [25]", min=1)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", "--out-seq-length", help="of toxicity: of a continuation [20]", min=1)
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", "--top_p", help="of toxicity [0.9]")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="of toxicity [1]")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="of --scorer https: requests a second [any]")] = None,
    cloze_eval: Annotated[bool, typer.Option("--cloze-eval", help="Megatron-LM v1's --task lambada")] = False,
    webtext_eval: Annotated[bool, typer.Option("--webtext-eval", help="Megatron-LM v1's --task ppl")] = False,
) -> int:
    """Score a model on a benchmark, at any layout: a run of ours or a directory of others' weights, as it lies.

    The model and its tokenizer are the directory's. Killed and started again, it resumes where it was.
    """
    _note_unused(given)
    world = world_from_env()
    size = ranks(world, run.runtime.nproc, run.runtime.world)
    if run.checkpoint.load is not None and not ensemble:
        check_source("--load", run.checkpoint.load)
    own: dict[str, Any] = {"overlapping_eval": overlapping_eval, "strict_lambada": strict_lambada}
    own |= {"detokenizer": detokenizer, "context_window": context_window, "json_key": json_key}
    own["random_windows"] = random_windows
    of_tasks: dict[str, Any] = {"num_fewshot": num_fewshot, "include_path": include_path, "log_samples": log_samples}
    of_tasks["apply_chat_template"] = apply_chat_template
    old = {"cloze_eval": cloze_eval, "webtext_eval": webtext_eval}
    if ensemble:
        others = {"task": task, "tasks": tasks, "load": run.checkpoint.load, "valid_data": valid_data, "limit": limit}
        _check_effect("--ensemble", {**others, **of_tasks, **own, **old})
    elif tasks or task is not None:
        _check_effect("--tasks" if tasks else "--task", {**own, **old} if tasks else old)
    if ensemble:
        from mega.core.tasks import ensemble as several

        return several.run(ensemble, _out(out, "ensemble-predictions.jsonl"))
    if tasks:
        if task is not None or valid_data:
            raise ValueError(
                f"--tasks {' '.join(tasks)}: excludes --task and --valid-data; lm-eval has data of its own"
            )
        from mega.core.tasks import harness

        names = tuple(name for each in tasks for name in each.split(",") if name)
        asked = harness.HarnessOptions(names, limit=limit, **of_tasks)
        return _launched(world, size, harness.evaluate, harness.prepare(run, given, asked, _out(out, "lm-eval"), size))
    drawn: dict[str, Any] = {"continuations": continuations, "tokens": tokens, "top_p": top_p}
    drawn["temperature"] = temperature
    if (task or "").lower() == "toxicity":
        _check_effect("--task toxicity", {**of_tasks, **own, **old})
        return _toxicity((run, given), valid_data or [], (scorer, rate), drawn | {"limit": limit}, (world, size, out))
    _check_effect(f"--task {task}", {**drawn, "scorer": scorer, "rate": rate})
    if needing := [name for name, value in of_tasks.items() if value]:
        raise ValueError(f"--{needing[0].replace('_', '-')}: needs --tasks")
    from mega.core.tasks.options import TaskOptions, task_named

    named = task or ("lambada" if cloze_eval else "ppl" if webtext_eval else None)
    if named is None:
        raise ValueError(
            "--task is missing: give lambada, ppl, wikitext103, toxicity, mnli, qqp or race; or --tasks of lm-eval"
        )
    chosen = task_named(named)
    options = TaskOptions(chosen, tuple(valid_data or ()), **own, limit=limit, seed=run.runtime.seed)
    from mega.core.tasks.evaluate import evaluate, prepare

    return _launched(world, size, evaluate, prepare(run, given, options, _out(out, options.task), size))


def _toxicity(
    given: tuple[RunConfig, GivenOptions],
    valid_data: list[str],
    scorer: tuple[str | None, float | None],
    drawn: Mapping[str, Any],
    where: tuple[World, int, str | None],
) -> int:
    """--task toxicity. Errors: ValueError naming the flag."""
    from mega.core.corpus.scorers import KINDS, ScorerOptions
    from mega.core.tasks import toxicity

    if len(valid_data) != 1:
        raise ValueError("--valid-data: must be one file of prompts for --task toxicity")
    if scorer[0] is None:
        raise ValueError(f"--scorer is missing: give what scores continuations, {KINDS}")
    how = ScorerOptions(scorer=scorer[0], rate=scorer[1] or 0.0)
    typed = {name: value for name, value in drawn.items() if value is not None}
    options = toxicity.ToxicityOptions(valid_data=valid_data[0], scorer=how, **typed)
    world, size, out = where
    return _launched(world, size, toxicity.evaluate, toxicity.prepare(*given, options, _out(out, "toxicity"), size))


def _check_effect(of: str, given: Mapping[str, Any]) -> None:
    """Errors: ValueError naming a flag that was given and has no effect with `of`."""
    for name, value in given.items():
        if value not in (None, False, "text"):  # "text" is what --json-key holds where it was not given
            raise ValueError(f"--{name.replace('_', '-')}: has no effect with {of}")


def _out(given: str | None, name: str) -> str:
    """The file of the result. Errors: ValueError where it cannot be one."""
    out = given or f"eval-{name}" + ("" if name.endswith(".jsonl") else ".json")
    check_file("--json", out)
    return os.path.abspath(out)


def _launched(world: World, size: int, job: Callable[[Any], int], prepared: Any) -> int:
    if world.source != "alone" or size == 1:
        return job(prepared)
    from mega.core.processes.launch import launch

    return launch(size, job, prepared)


def _note_unused(given: GivenOptions) -> None:
    """On stderr of the first rank, what was given and is not read."""
    read = {*options_with(evaluated=True), *options_with(on_resume="must match"), "positions"}
    unused = [flag_of(name) for name in given.values if name not in read]
    if unused and is_first_rank():
        print(f"not used, nothing is trained: {', '.join(unused)}", file=sys.stderr)
