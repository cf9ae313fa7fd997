"""What a run is trained on and judged by, by the name that --task gives its kind.

There is one loop; a kind gives it datasets and a `Task`. A kind is imported when a run has it. No torch is
imported: a launcher opens datasets before any rank starts.

kind, task     what a kind is, and what the loop is given by it
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
"""Kind of task -> what loads it."""


def kind_of(run: AnyRun) -> TaskKind:
    """The kind of task that a run has."""
    return KINDS[run.finetuning.task]()


def register_task(name: str, load: Callable[[], TaskKind], needs: tuple[str, ...] = ()) -> None:
    """Make `name` a choice of --task, on every rank. load: imports its kind. needs: the options without which it has
    nothing to train on."""
    KINDS[name], TASKS[name] = load, needs
