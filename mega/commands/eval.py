"""`mega eval`: score a model on a benchmark."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

from mega.command_line.options import Reads, without
from mega.core.config.compose import GivenOptions
from mega.core.config.option import changed
from mega.core.config.run import Options, flag_of
from mega.core.config.sections import LABELLED
from mega.core.corpus.scorers import KINDS, ScorerOptions
from mega.core.files import check_file, check_not_input, check_source
from mega.core.inference.options import RetrievalOptions
from mega.core.processes.world import World, is_first_rank, ranks, world_from_env
from mega.core.tasks.options import (
    OWN,
    EvalOptions,
    HarnessOptions,
    TaskOptions,
    ToxicityOptions,
    flag,
    task_named,
    unread,
)

LOADS_MODEL = True


def run(
    options: Annotated[Options, Reads("evaluated")],
    given: GivenOptions,
    benchmark: TaskOptions,
    result: EvalOptions,
    harness: HarnessOptions,
    toxicity: ToxicityOptions,
    scorer: Annotated[ScorerOptions, without("key_variable", "connections", "tries", "timeout")],
    retrieval: Annotated[RetrievalOptions, without("retro")],
) -> int:
    """Score a model on a benchmark, in any layout. The model is a mega run, or weights in another program's format.

    The model's directory also provides the tokenizer. An interrupted evaluation resumes when it is started again.
    """
    _note_unused(given)
    world = world_from_env()
    size = ranks(world, options.runtime.nproc, options.runtime.world)
    if options.checkpoint.load is not None and not result.ensemble:
        check_source("--load", options.checkpoint.load)
    task_options = [name for name in OWN if name in changed(benchmark)]
    harness_options = [name for name in changed(harness) if name != "tasks"]
    old_spellings = [name for name in ("cloze_eval", "webtext_eval") if getattr(result, name)]
    retrieval_options = [*changed(retrieval), *(["retro"] if options.data.retro else [])]
    if result.ensemble:
        excluded = [name for name in changed(benchmark) if name in ("task", "valid_data", "limit")]
        excluded += ["tasks"] * bool(harness.tasks) + ["load"] * (options.checkpoint.load is not None)
        _check_effect("--ensemble", [*excluded, *harness_options, *task_options, *old_spellings, *retrieval_options])
        from mega.core.tasks import ensemble

        return ensemble.run(list(result.ensemble), _out(result.json, "ensemble-predictions.jsonl", result.ensemble))
    if harness.tasks:
        _check_effect("--tasks", [*task_options, *old_spellings, *retrieval_options])
        return _harness(options, given, benchmark, harness, (world, size, result.json))
    if benchmark.task:
        _check_effect("--task", old_spellings)
    if benchmark.task.lower() == "toxicity":
        _check_effect("--task toxicity", [*harness_options, *task_options, *retrieval_options])
        toxicity_options = dataclasses.replace(toxicity, scorer=scorer, limit=benchmark.limit)
        return _toxicity((options, given), benchmark.valid_data, toxicity_options, (world, size, result.json))
    _check_effect(f"--task {benchmark.task}", [*changed(toxicity), *changed(scorer)])
    if harness_options:
        raise ValueError(f"{flag(harness_options[0])}: needs --tasks")
    benchmark = dataclasses.replace(benchmark, task=_task(benchmark, result), seed=options.runtime.seed)
    _check_effect(f"--task {benchmark.task}", retrieval_options if benchmark.task in LABELLED else [])
    out = _out(result.json, benchmark.task, benchmark.valid_data)
    from mega.core.retro.retrieve import named_opener
    from mega.core.tasks.evaluate import evaluate, prepare

    retriever = named_opener(dataclasses.replace(retrieval, retro=options.data.retro))
    return _launched(world, size, evaluate, prepare(options, given, benchmark, out, size, retriever))


def _task(benchmark: TaskOptions, result: EvalOptions) -> str:
    """Return the name of the task. Errors: ValueError if no task is given, or the task does not exist."""
    name = benchmark.task or ("lambada" if result.cloze_eval else "ppl" if result.webtext_eval else None)
    if name is None:
        raise ValueError(
            "--task is missing: give lambada, ppl, wikitext103, toxicity, mnli, qqp or race; or --tasks of lm-eval"
        )
    return task_named(name)


def _harness(
    options: Options,
    given: GivenOptions,
    benchmark: TaskOptions,
    harness: HarnessOptions,
    where: tuple[World, int, str | None],
) -> int:
    """Evaluate tasks of lm-eval. Errors: ValueError naming the flag."""
    if benchmark.task or benchmark.valid_data:
        task_names = " ".join(harness.tasks)
        raise ValueError(f"--tasks {task_names}: excludes --task and --valid-data; lm-eval has data of its own")
    from mega.core.tasks.harness import evaluate, prepare

    names = tuple(name for each in harness.tasks for name in each.split(",") if name)
    checked = dataclasses.replace(harness, tasks=names, limit=benchmark.limit)
    world, size, out = where
    return _launched(world, size, evaluate, prepare(options, given, checked, _out(out, "lm-eval"), size))


def _toxicity(
    given: tuple[Options, GivenOptions],
    valid_data: tuple[str, ...],
    options: ToxicityOptions,
    where: tuple[World, int, str | None],
) -> int:
    """Evaluate --task toxicity. Errors: ValueError naming the flag."""
    if len(valid_data) != 1:
        raise ValueError("--valid-data: must be one file of prompts for --task toxicity")
    if not options.scorer.scorer:
        raise ValueError(f"--scorer is missing: give what scores continuations, {KINDS}")
    from mega.core.tasks.toxicity import evaluate, prepare

    options = dataclasses.replace(options, valid_data=valid_data[0])
    world, size, out = where
    return _launched(world, size, evaluate, prepare(*given, options, _out(out, "toxicity", valid_data), size))


def _check_effect(of: str, given: Iterable[str]) -> None:
    """Check that no option is given that has no effect with the option `of`. Errors: ValueError naming the first such
    option in `given`."""
    for name in given:
        raise ValueError(f"{flag(name)}: has no effect with {of}")


Prepared = TypeVar("Prepared")


def _out(given: str | None, name: str, inputs: Iterable[str] = ()) -> str:
    """Return the absolute path of the output file. Errors: ValueError if the file cannot be written, or is one of
    `inputs`."""
    out = given or f"eval-{name}" + ("" if name.endswith(".jsonl") else ".json")
    check_file("--json", out)
    check_not_input("--json", out, inputs)
    return os.path.abspath(out)


def _launched(world: World, size: int, job: Callable[[Prepared], int], prepared: Prepared) -> int:
    if world.source != "alone" or size == 1:
        return job(prepared)
    from mega.core.processes.launch import launch

    return launch(size, job, prepared)


def _note_unused(given: GivenOptions) -> None:
    """Print the given options that have no effect, on stderr of the first rank."""
    unused = [flag_of(name) for name in unread(given.values)]
    if unused and is_first_rank():
        print(f"not used, nothing is trained: {', '.join(unused)}", file=sys.stderr)
