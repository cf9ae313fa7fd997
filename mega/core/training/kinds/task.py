"""What a run trains on and what it is judged by.

It knows batches and the sums that a model makes of them; no steps, no checkpoints, no ranks but the data coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mega.core.data.batches import Batches


@dataclass(frozen=True)
class HeldOut:
    """A set of samples that a model is judged by.

    continues: each validation reads on where the one before ended; else all read it from its first sample. iterations:
    global batches that a validation reads [--eval-iters].
    """

    name: str
    batches: Batches
    continues: bool = False
    iterations: int | None = None


@dataclass
class Task:
    """train: where the batches of a step come from; None where nothing is to be trained."""

    train: Batches | None
    validation: Sequence[HeldOut] = ()
    test: Sequence[HeldOut] = ()

    def measure(self, means: Mapping[str, float], terms: Mapping[str, float]) -> Mapping[str, float]:
        """What is reported of a held-out set, "loss" among it, from the mean of each term and metric: the sum of the
        terms, and each by its name where there are several or other metrics."""
        loss = sum(coefficient * means[name] for name, coefficient in terms.items())
        return {"loss": loss, **(means if len(means) > 1 else {})}
