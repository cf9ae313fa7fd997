"""The score of a model on a benchmark, as `mega eval --task` gives it."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from mega.api.config import named
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
    """One number of a score, and the ends of its 95 % confidence interval where it has one."""

    value: float | None
    """None where nothing counts."""
    low: float | None
    high: float | None


@dataclass(frozen=True)
class EvaluationResult:
    """A score, the same on every rank."""

    task: str
    figures: Mapping[str, ScoredFigure]
    """By name, such as "accuracy" or "ppl"."""
    tokens: int
    """That the model computed."""
    settings: Mapping[str, Json]
    """Everything that makes the score: model, data, tokenizer, options."""


def evaluate(
    path: str | Path,
    task: str,
    data: str | Path | list[str | Path],
    *,
    out: str | Path | None = None,
    verbose: bool = False,
    **options: object,
) -> EvaluationResult:
    """Score the model at `path`, of any form that `mega.load` opens, on a benchmark at any layout.

    task: lambada, ppl, wikitext103, mnli, qqp or race. data: its file, of labels several. out: the result as a file of
    JSON, which `mega report` reads. options: keywords of `mega eval`, such as `tp=2`, `nproc=2`, `micro_batch=8`,
    `limit=100` and the benchmark's own; of a model with a retriever `retro` and `embedder`. As one process, on `nproc`
    local ranks, or as a rank of a launcher. verbose: print what `mega eval` prints.

    Errors: ValueError naming the option or file, its value and the rule, before any rank starts.
    """
    from mega.core.inference.options import RetrievalOptions
    from mega.core.retro.retrieve import named_opener
    from mega.core.tasks.evaluate import note, prepare
    from mega.core.tasks.options import TaskOptions, task_named

    own = schema_of({"benchmark": TaskOptions, "retrieval": RetrievalOptions}, {"retrieval": ["retro"]})
    files = [os.fspath(each) for each in (data if isinstance(data, list) else [data])]
    of_task = {name: value for name, value in options.items() if name in own.entries}
    asked = with_folders(named({**of_task, "task": task, "valid_data": files}, own), own.entries.values())
    given = named({name: value for name, value in options.items() if name not in own.entries}, run_schema())
    _check_read(given)
    place = local_place("path", os.fspath(path))
    check_source("--load", place)
    run = compose(None, {}, {**given, "load": place})
    world = world_from_env()
    size = ranks(world, run.runtime.nproc)
    benchmark = cast(TaskOptions, own.value("benchmark", {**asked, "task": task_named(task)}))
    benchmark = replace(benchmark, seed=run.runtime.seed)
    retrieval = cast(RetrievalOptions, own.value("retrieval", asked))
    retriever = named_opener(replace(retrieval, retro=run.data.retro))
    if retriever is not None and benchmark.task in LABELLED:
        raise ValueError(f"retro: has no effect with task {benchmark.task}")
    with tempfile.TemporaryDirectory(prefix="mega-eval-") as folder:
        file = str(Path(folder) / "result.json") if out is None else os.path.abspath(out)
        check_file("--json", file)
        given_options = GivenOptions(None, {**given, "load": place})
        checked = prepare(run, given_options, benchmark, file, size, retriever, note if verbose else None)
        if world.source == "alone" and size > 1:
            from mega.api.ranks import launch

            return launch(_score, checked, ranks=size)[0]
        return _score(checked)


def _check_read(given: Iterable[str]) -> None:
    """Errors: ValueError naming options of a run that no score depends on."""
    from mega.core.tasks.options import unread

    if "load" in given:
        raise ValueError("load: the model is that of `path`; leave it out")
    if unused := unread(given):
        raise ValueError(f"{', '.join(unused)}: not used, nothing is trained; leave them out")


def _score(checked: CheckedEvaluation) -> EvaluationResult:
    from mega.core.processes.connect import disconnect
    from mega.core.tasks.evaluate import evaluation_result

    atexit.register(disconnect)
    found = evaluation_result(checked)
    figures = {
        str(each["name"]): ScoredFigure(each["value"], each["low"], each["high"])
        for each in cast(list[dict[str, float | None]], found["figures"])
    }
    return EvaluationResult(checked.options.task, figures, cast(int, found["tokens"]), below(found, "settings"))
