"""The training data and the evaluation of a run.

This module depends on batches, on the sums that a model computes from them, and on the data axis of the mesh. It does
not depend on steps or checkpoints.
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
    """Whether each validation starts where the previous validation ended. If false, it starts at the first sample."""
    iterations: int | None = None
    """Number of global batches per validation; None means --eval-iters."""


@dataclass
class Task:
    """The data of a run."""

    train: Batches | None
    """The training batches; None if the run does not train."""
    validation: Sequence[HeldOut] = ()
    test: Sequence[HeldOut] = ()

    def measure(self, means: Mapping[str, float], terms: Mapping[str, float]) -> Mapping[str, float]:
        """Return the results of a held-out set, by name. means: name of each term and metric -> its mean. terms: name
        of each term -> its coefficient. "loss" is the weighted sum of the terms; if there are several terms or metrics,
        each is included by name.
        """
        loss = sum(coefficient * means[name] for name, coefficient in terms.items())
        return {"loss": loss, **(means if len(means) > 1 else {})}
