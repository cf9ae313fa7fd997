"""What a left-to-right model may be trained towards instead of the next token: losses from each token's.

The head computes the negative log-likelihood of every label, whatever the layout; an `Objective` makes terms of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from mega.core.batch import DecoderBatch, PreferenceBatch, Term


class Objective(Protocol):
    """terms, metrics: names of what it finds."""

    @property
    def terms(self) -> tuple[str, ...]: ...
    @property
    def metrics(self) -> tuple[str, ...]: ...

    def __call__(self, nll: torch.Tensor, batch: DecoderBatch) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """Terms and metrics, in the order of their names. nll: [tokens of the whole rows]."""


@dataclass(frozen=True)
class Preference:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7), with label smoothing (Mitchell 2023).

        d = beta (log p(chosen) - log p(rejected) - the same under the reference)
        loss = -(1 - smoothing) log sigmoid(d) - smoothing log sigmoid(-d)

    accuracy: share of pairs with d > 0. margin: mean d. chosen, rejected: mean beta (log p - reference).
    """

    beta: float
    smoothing: float = 0.0
    terms: tuple[str, ...] = ("dpo",)
    metrics: tuple[str, ...] = ("accuracy", "margin", "chosen", "rejected")

    def __call__(self, nll: torch.Tensor, batch: DecoderBatch) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        assert isinstance(batch, PreferenceBatch) and batch.reference is not None
        gained = row_log_probabilities(nll, batch).view(-1, 2) - batch.reference.to(nll.dtype)
        rewards = self.beta * gained
        margin = rewards[:, 0] - rewards[:, 1]
        loss = -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)
        found = torch.stack([(margin > 0).to(nll.dtype), margin, rewards[:, 0], rewards[:, 1]]).detach()
        pairs = torch.full((), float(len(loss)), dtype=nll.dtype, device=nll.device)
        return (Term(loss.sum(), pairs),), tuple(Term(each.sum(), pairs) for each in found)


def row_log_probabilities(nll: torch.Tensor, batch: DecoderBatch) -> torch.Tensor:
    """Sum of the log-probabilities of each row's trained labels, [b]. nll: [b s]."""
    return -(nll.view(batch.tokens.shape) * batch.loss_weights.to(nll.dtype)).sum(1)
