"""Cross entropy in two halves, so that a cut vocabulary can combine the first over ranks before the second, or in one.

    softmax_parts      logits -> largest logit, sum of exponentials, the label's logit
    softmax_gradient   logits and the whole's log-sum-exp -> gradient of the negative log-likelihood
    nll_and_gradient   logits of the whole vocabulary -> the negative log-likelihood, and its gradient over the logits

Columns from `real` on hold no token: they take no probability and get no gradient. A label outside [0, real) lives on
another rank.
"""

from __future__ import annotations

import math

import torch

from mega.core.ops.norm import accurate


def softmax_parts(x: torch.Tensor, labels: torch.Tensor, real: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [tokens, n], labels int64 [tokens] -> largest, sum of exp(x - largest), label's logit or 0; each [tokens].

    >>> [part.tolist() for part in softmax_parts(torch.tensor([[2.0, 2.0, 9.0]]), torch.tensor([1]), 2)]
    [[2.0], [2.0], [2.0]]
    """
    wide = _masked(x, real)
    largest = wide.amax(-1).clamp(min=torch.finfo(wide.dtype).min)
    total = (wide - largest[:, None]).exp().sum(-1)
    ours = (labels >= 0) & (labels < real)
    target = wide.gather(1, labels.clamp(0, x.shape[1] - 1)[:, None]).squeeze(1).masked_fill(~ours, 0)
    return largest, total, target


def softmax_gradient(
    x: torch.Tensor, labels: torch.Tensor, log_total: torch.Tensor, scale: torch.Tensor, real: int
) -> torch.Tensor:
    """scale (softmax - one at the label) [tokens, n] in x's dtype; log_total and scale [tokens].

    `x` belongs to this op: a fast implementation writes the gradient over it.
    """
    softmax = (_masked(x, real) - log_total[:, None]).exp()
    ours = ((labels >= 0) & (labels < real)).to(softmax.dtype)
    softmax = softmax.scatter_add(1, labels.clamp(0, x.shape[1] - 1)[:, None], -ours[:, None])
    return (softmax * scale[:, None]).to(x.dtype)


def nll_and_gradient(
    x: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor, real: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves, where what multiplies each token's loss is known before: nll [tokens], and `softmax_gradient`'s
    result, which is written over x. scale: [tokens].

    >>> nll, gradient = nll_and_gradient(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([8.0]), 2)
    >>> round(nll.exp().item(), 6), gradient.tolist()
    (2.0, [[4.0, -4.0]])
    """
    largest, total, target = softmax_parts(x, labels, real)
    log_total = total.log() + largest
    return log_total - target, x.copy_(softmax_gradient(x, labels, log_total, scale, real))


def _masked(x: torch.Tensor, real: int) -> torch.Tensor:
    wide = x.to(accurate(x.dtype))
    if real == x.shape[1]:
        return wide
    return wide.masked_fill(torch.arange(x.shape[1], device=x.device) >= real, -math.inf)
