"""The training data and the evaluation of a run.

This file knows batches and the sums that a model computes from them; no steps, no checkpoints, and of ranks only the
data axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mega.core.data.batches import Batches


@dataclass(frozen=True)
class HeldOut:
    """A held-out set of samples."""

    name: str
    batches: Batches
    continues: bool = False
    """Each validation starts where the previous one ended; else at the first sample."""
    iterations: int | None = None
    """Global batches per validation; None: --eval-iters."""


@dataclass
class Task:
    """The data of a run."""

    train: Batches | None
    """The training batches; None without training."""
    validation: Sequence[HeldOut] = ()
    test: Sequence[HeldOut] = ()

    def measure(self, means: Mapping[str, float], terms: Mapping[str, float]) -> Mapping[str, float]:
        """The results of a held-out set by name. means: of each term and metric. terms: coefficient of each term.

        "loss" is the sum of the terms; if there are several terms or metrics, each of them is included by name.
        """
        loss = sum(coefficient * means[name] for name, coefficient in terms.items())
        return {"loss": loss, **(means if len(means) > 1 else {})}
