"""Training objectives of left-to-right models other than next-token prediction, computed from the losses of tokens.

The head computes the negative log-likelihood of every label, in any parallel layout, and an `Objective` computes loss
terms from these values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch.nn import functional as F

from mega.core.batch import DecoderBatch, PreferenceBatch, Term


class Objective(Protocol):
    """A training objective. terms, metrics: the names of the objective's results."""

    @property
    def terms(self) -> tuple[str, ...]: ...
    @property
    def metrics(self) -> tuple[str, ...]: ...

    def __call__(self, nll: torch.Tensor, batch: DecoderBatch) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """Compute the loss terms and metrics, in the order of `terms` and `metrics`. nll: [tokens of the whole
        rows]."""


@dataclass(frozen=True)
class Preference:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7), with label smoothing (Mitchell 2023).

    d = beta (log p(chosen) - log p(rejected) - log p_ref(chosen) + log p_ref(rejected))
    loss = -(1 - smoothing) log sigmoid(d) - smoothing log sigmoid(-d)
    """

    beta: float
    smoothing: float = 0.0
    """The assumed probability that the labels of a pair are swapped."""
    terms: tuple[str, ...] = ("dpo",)
    metrics: tuple[str, ...] = ("accuracy", "margin", "chosen", "rejected")
    """accuracy: fraction of pairs with d > 0. margin: mean d. chosen, rejected: mean beta (log p - log p_ref)."""

    def __call__(self, nll: torch.Tensor, batch: DecoderBatch) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        assert isinstance(batch, PreferenceBatch) and batch.reference is not None
        gained = row_log_probabilities(nll, batch).view(-1, 2) - batch.reference.to(nll.dtype)
        rewards = self.beta * gained
        margin = rewards[:, 0] - rewards[:, 1]
        loss = -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)
        metrics = torch.stack([(margin > 0).to(nll.dtype), margin, rewards[:, 0], rewards[:, 1]]).detach()
        pairs = torch.full((), float(len(loss)), dtype=nll.dtype, device=nll.device)
        return (Term(loss.sum(), pairs),), tuple(Term(each.sum(), pairs) for each in metrics)


class Predictions(Protocol):
    """The predictions of a model for a batch, with gradients. Logits are computed only once, for both properties."""

    @property
    def logits(self) -> torch.Tensor:
        """Logits [b, s, vocab], gathered over the tensor ranks."""

    @property
    def logprobs(self) -> torch.Tensor:
        """Log-probabilities of the labels, [b, s], computed without gathering logits."""


LossFunction = Callable[[Predictions, DecoderBatch], torch.Tensor]
"""Function that returns a loss per token, [b, s], or per sequence or group of sequences, [b] or fewer."""


@dataclass(frozen=True)
class CustomLoss:
    """A loss that a user-supplied function computes from predictions.

    level: "token" weights each token by the batch's loss_weights in the mean; "sequence" weights each row equally.
    """

    function: LossFunction
    level: Literal["token", "sequence"] = "token"

    def __call__(self, predictions: Predictions, batch: DecoderBatch) -> Term:
        """Return the loss term of a batch. Errors: ValueError if the loss has a wrong shape."""
        losses, shape = self.function(predictions, batch), tuple(batch.tokens.shape)
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))  # a sum in bf16 is inexact: 256 + 1 is 256
        if self.level == "sequence":
            if losses.dim() != 1 or not losses.numel() or shape[0] % losses.numel():
                raise ValueError(
                    f"loss: has shape {tuple(losses.shape)}; must be [{shape[0]}], one value for each sequence, or one "
                    "for each group of as many"
                )
            count = torch.full((), float(shape[0]), dtype=losses.dtype, device=losses.device)
            return Term(losses.mean() * count, count)
        if tuple(losses.shape) != shape:
            raise ValueError(f"loss: has shape {tuple(losses.shape)}; must be {shape}, one value for each token")
        weights = batch.loss_weights.to(losses.dtype)
        return Term((losses * weights).sum(), weights.sum())


@dataclass(frozen=True)
class SequenceBatch(DecoderBatch):
    """A batch whose loss weights each row equally, with the fields of `DecoderBatch`."""

    @classmethod
    def of(cls, batch: DecoderBatch) -> SequenceBatch:
        """Return a `SequenceBatch` with the rows of `batch`."""
        return cls(**{each.name: getattr(batch, each.name) for each in fields(DecoderBatch)})

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"lm": torch.ones(len(self.tokens), device=self.tokens.device)}

    def split(self, index: int, size: int) -> SequenceBatch:
        assert size == 1, "a loss of a sequence needs its whole row"
        return self


def row_log_probabilities(nll: torch.Tensor, batch: DecoderBatch) -> torch.Tensor:
    """Return the sum of the log-probabilities of each row's trained labels, [b]. nll: [b s]."""
    return -(nll.view(batch.tokens.shape) * batch.loss_weights.to(nll.dtype)).sum(1)
