"""A kind of task from outside: counting, judged in bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mega.core.config.run import RunConfig
from mega.core.data.build import Datasets
from mega.core.parallel.mesh import Mesh
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.kinds import pretraining
from mega.core.training.kinds.kind import TaskKind
from mega.core.training.kinds.task import Task

NAME = "counting"


class Counting:
    """Sample i counts up from i."""

    def __init__(self, length: int, vocab: int) -> None:
        self._length, self._vocab = length, vocab

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        return (sample + np.arange(self._length + 1)) % self._vocab


class Judged(Task):
    def measure(self, means: Mapping[str, float], terms: Mapping[str, float]) -> Mapping[str, float]:
        return {**super().measure(means, terms), "surprise": means["lm"] / np.log(2)}


def datasets(run: RunConfig, tokenizer: Tokenizer | None) -> Datasets:
    assert run.batch.seq_length and run.model.vocab
    rows = Counting(run.batch.seq_length, run.model.vocab)
    return Datasets(train=rows, valid=rows)


def task(run: RunConfig, data: Datasets, tokenizer: Tokenizer | None, mesh: Mesh) -> Judged:
    made = pretraining.task(run, data, tokenizer, mesh)
    return Judged(made.train, made.validation, made.test)


KIND = TaskKind(datasets, task)
