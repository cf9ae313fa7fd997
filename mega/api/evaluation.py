"""Score a model on a benchmark, as `mega eval --task` does."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from mega.api.config import checked_keywords
from mega.core.config.compose import GivenOptions, compose
from mega.core.config.run import run_schema
from mega.core.config.schema import schema_of
from mega.core.config.sections import LABELLED
from mega.core.files import check_file, check_source
from mega.core.hub.folders import local_place, with_folders
from mega.core.processes.world import ranks, world_from_env
from mega.core.untrusted import Json, below

if TYPE_CHECKING:
    from mega.core.tasks.evaluate import CheckedEvaluation


class ScoredFigure(NamedTuple):
    """A figure, such as an accuracy, with the bounds of the 95 % confidence interval if available."""

    value: float | None
    """The value of the figure; None if no example was scored."""
    low: float | None
    high: float | None


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation, identical on every rank."""

    task: str
    figures: Mapping[str, ScoredFigure]
    """Name, such as "accuracy" or "ppl" -> figure."""
    tokens: int
    """Number of tokens that the model processed."""
    settings: Mapping[str, Json]
    """All inputs that determine the result: model, data, tokenizer, options."""


def evaluate(
    path: str | Path,
    task: str,
    data: str | Path | list[str | Path],
    *,
    out: str | Path | None = None,
    verbose: bool = False,
    **options: object,
) -> EvaluationResult:
    """Score a model on a benchmark, in any layout. path: weights in any format that `mega.load` opens.

    The evaluation uses this process, `nproc` new local ranks, or the ranks of a launcher. task: lambada, ppl,
    wikitext103, mnli, qqp or race. data: the benchmark's file, or several files for labelled tasks. out: JSON file to
    write, which `mega report` reads. options: those of `mega eval`, such as `tp=2`, `nproc=2`, `limit=100` and options
    of the benchmark; with a retriever also `retro` and `embedder`. verbose: whether to print what `mega eval` prints.

    Errors: ValueError naming the option or file, its value and the rule, before any rank starts.
    """
    from mega.core.inference.options import RetrievalOptions
    from mega.core.retro.retrieve import named_opener
    from mega.core.tasks.evaluate import note, prepare
    from mega.core.tasks.options import TaskOptions, task_named

    schema = schema_of({"benchmark": TaskOptions, "retrieval": RetrievalOptions}, {"retrieval": ["retro"]})
    files = [os.fspath(each) for each in (data if isinstance(data, list) else [data])]
    keywords = {name: options[name] for name in options if name in schema.entries} | {"task": task, "valid_data": files}
    task_options = with_folders(checked_keywords(keywords, schema), schema.entries.values())
    run_keywords = {name: value for name, value in options.items() if name not in schema.entries}
    run_options = checked_keywords(run_keywords, run_schema())
    _check_read(run_options)
    check_source("--load", model_path := local_place("path", os.fspath(path)))
    run = compose(None, {}, {**run_options, "load": model_path})
    world = world_from_env()
    size = ranks(world, run.runtime.nproc)
    benchmark = cast(TaskOptions, schema.value("benchmark", {**task_options, "task": task_named(task)}))
    benchmark = replace(benchmark, seed=run.runtime.seed)
    retrieval = cast(RetrievalOptions, schema.value("retrieval", task_options))
    retriever = named_opener(replace(retrieval, retro=run.data.retro))
    if retriever is not None and benchmark.task in LABELLED:
        raise ValueError(f"retro: has no effect with task {benchmark.task}")
    with tempfile.TemporaryDirectory(prefix="mega-eval-") as folder:
        file = str(Path(folder) / "result.json") if out is None else os.path.abspath(out)
        check_file("--json", file)
        given_options = GivenOptions(None, {**run_options, "load": model_path})
        checked = prepare(run, given_options, benchmark, file, size, retriever, note if verbose else None)
        if world.source == "alone" and size > 1:
            from mega.api.ranks import launch

            return launch(_score, checked, ranks=size)[0]
        return _score(checked)


def _check_read(given: Iterable[str]) -> None:
    """Check the options. Errors: ValueError naming options of a run that do not affect an evaluation."""
    from mega.core.tasks.options import unread

    if "load" in given:
        raise ValueError("load: the model is that of `path`; leave it out")
    if unused := unread(given):
        raise ValueError(f"{', '.join(unused)}: not used, nothing is trained; leave them out")


def _score(checked: CheckedEvaluation) -> EvaluationResult:
    from mega.core.processes.connect import disconnect
    from mega.core.tasks.evaluate import evaluation_result

    atexit.register(disconnect)
    result = evaluation_result(checked)
    figures = {
        str(each["name"]): ScoredFigure(each["value"], each["low"], each["high"])
        for each in cast(list[dict[str, float | None]], result["figures"])
    }
    return EvaluationResult(checked.options.task, figures, cast(int, result["tokens"]), below(result, "settings"))
