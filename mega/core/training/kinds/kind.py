"""The interface of a kind of task, for the training loop. This module does not import torch,
because a launcher opens datasets before any rank starts."""

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
    """The functions that a kind of task provides."""

    datasets: Callable[[RunConfig, Tokenizer | None], Datasets]
    """Opens the datasets of a resolved run, without torch. Errors: ValueError naming flag or file."""
    task: Callable[[RunConfig, Datasets, Tokenizer | None, Mesh], Task]
    """Returns this data rank's shard of the datasets, and their evaluation."""
    objective: Callable[[RunConfig], Objective | None] = lambda run: None
    """Returns the loss of the model's head; None means next-token prediction."""
    begin: Callable[[TrainState, Datasets, ResumePoint | None], None] = lambda state, data, point: None
    """Called on every rank after the weights have been initialized or loaded."""
    questions: Callable[[Options], int] | None = None
    """Returns the number of samples in one epoch, for kinds that support --epochs."""
