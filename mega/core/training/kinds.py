"""The kinds of task that a run may have, by the name that --task gives them: what it reads, and what it is judged by.

There is one loop; a kind gives it datasets and a `Task`. A kind is a module with a function for each field of
`TaskKind`, imported when a run has it. No torch: a launcher opens datasets before any rank starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mega.core.config.run import RunConfig
from mega.core.config.sections import LABELLED, TASKS
from mega.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mega.core.data.build import Datasets
    from mega.core.model.objective import Objective
    from mega.core.parallel.mesh import Mesh
    from mega.core.training.resume import ResumePoint
    from mega.core.training.state import TrainState
    from mega.core.training.task import Task


@dataclass(frozen=True)
class TaskKind:
    """datasets: what a resolved run reads, opened without torch. Errors: ValueError naming flag or file.

    task: this data coordinate's part of them, and how held-out sets are judged. objective: what the model's head makes
    of them; None is the next token. begin: called on every rank when the state has its first weights, or those that it
    resumes with. questions: samples of one pass over the training set, where a run may be measured in --epochs.
    """

    datasets: Callable[[RunConfig, Tokenizer | None], Datasets]
    task: Callable[[RunConfig, Datasets, Tokenizer | None, Mesh], Task]
    objective: Callable[[RunConfig], Objective | None] = lambda run: None
    begin: Callable[[TrainState, Datasets, ResumePoint | None], None] = lambda state, data, point: None
    questions: Callable[[RunConfig], int] | None = None


def _language_model() -> TaskKind:
    from mega.core.training.pretraining import KIND

    return KIND


def _preferences() -> TaskKind:
    from mega.core.training.dpo import KIND

    return KIND


def _labels(task: str) -> TaskKind:
    from mega.core.data.formats import format_of
    from mega.core.training.labelled import kind

    return kind(format_of(task))


KINDS: dict[str, Callable[[], TaskKind]] = {
    "lm": _language_model,
    "dpo": _preferences,
    **{task: partial(_labels, task) for task in LABELLED},
}
"""Kind of task -> what loads it."""


def kind_of(run: RunConfig) -> TaskKind:
    """The kind of task that a run has."""
    return KINDS[run.finetuning.task]()


def register_task(name: str, load: Callable[[], TaskKind], needs: tuple[str, ...] = ()) -> None:
    """Make `name` a choice of --task, on every rank. load: imports its kind. needs: the options without which it has
    nothing to train on."""
    KINDS[name], TASKS[name] = load, needs
