"""Kinds of training tasks, which --task selects by name. A kind determines the datasets and the evaluation of a run.

A kind provides the datasets and a `Task` for the training loop. The loop is the same for all kinds. A kind is imported
only when a run needs it. This package does not import torch, because a launcher opens datasets before any rank starts.

kind, task     the interface of a kind, and the `Task` that a kind creates for the loop
pretraining    token files, conversations, random tokens
labelled       rows with labels
dpo            pairs of answers
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mega.core.config.run import AnyRun
from mega.core.config.sections import LABELLED, TASKS
from mega.core.training.kinds.kind import TaskKind


def _language_model() -> TaskKind:
    from mega.core.training.kinds.pretraining import KIND

    return KIND


def _preferences() -> TaskKind:
    from mega.core.training.kinds.dpo import KIND

    return KIND


def _labels(task: str) -> TaskKind:
    from mega.core.data.formats import format_of
    from mega.core.training.kinds.labelled import kind

    return kind(format_of(task))


KINDS: dict[str, Callable[[], TaskKind]] = {
    "lm": _language_model,
    "dpo": _preferences,
    **{task: partial(_labels, task) for task in LABELLED},
}
"""Name of a kind -> the function that imports it."""


def kind_of(run: AnyRun) -> TaskKind:
    """Return the kind of a run's task."""
    return KINDS[run.finetuning.task]()


def register_task(name: str, load: Callable[[], TaskKind], needs: tuple[str, ...] = ()) -> None:
    """Register a kind of task as a value of --task. Must be called on every rank. load: function that imports the kind.
    needs: names of the options that specify the training data."""
    KINDS[name], TASKS[name] = load, needs
