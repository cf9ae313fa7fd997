"""What a kind of task is: the part of a run that one loop is given. No torch: a launcher opens datasets before any rank
starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega.core.config.run import Options, RunConfig
from mega.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mega.core.data.build import Datasets
    from mega.core.model.objective import Objective
    from mega.core.parallel.mesh import Mesh
    from mega.core.training.kinds.task import Task
    from mega.core.training.saves.resume import ResumePoint
    from mega.core.training.state import TrainState


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
    questions: Callable[[Options], int] | None = None
