"""Cross entropy, either as two ops, between which ranks with a sharded vocabulary combine their results, or as a single
op.

    softmax_parts      logits -> largest logit, sum of exponentials, logit of the label
    softmax_gradient   logits and the log-sum-exp over all ranks -> gradient of the negative log-likelihood
    nll_and_gradient   logits of the whole vocabulary -> the negative log-likelihood, and its gradient

Columns from index `real` on are padding, which has probability 0 and gradient 0. A label outside [0, real) belongs to
another rank.
"""

from __future__ import annotations

import math

import torch

from mega.core.ops.norm import accurate


def softmax_parts(x: torch.Tensor, labels: torch.Tensor, real: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three tensors [tokens] for x [tokens, n] and labels int64 [tokens]: the largest logit, the sum of exp(x -
    largest), and the label's logit, or 0 if another rank has the label.

    >>> [part.tolist() for part in softmax_parts(torch.tensor([[2.0, 2.0, 9.0]]), torch.tensor([1]), 2)]
    [[2.0], [2.0], [2.0]]
    """
    logits = _masked(x, real)
    largest = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    total = (logits - largest[:, None]).exp().sum(-1)
    in_shard = (labels >= 0) & (labels < real)
    target = logits.gather(1, labels.clamp(0, x.shape[1] - 1)[:, None]).squeeze(1).masked_fill(~in_shard, 0)
    return largest, total, target


def softmax_gradient(
    x: torch.Tensor, labels: torch.Tensor, log_total: torch.Tensor, scale: torch.Tensor, real: int
) -> torch.Tensor:
    """Return the gradient scale * (softmax - one_hot(label)), [tokens, n] in the dtype of x. log_total, scale:
    [tokens].

    The caller must not use `x` afterwards, because a fast implementation overwrites `x` with the gradient.
    """
    softmax = (_masked(x, real) - log_total[:, None]).exp()
    in_shard = ((labels >= 0) & (labels < real)).to(softmax.dtype)
    softmax = softmax.scatter_add(1, labels.clamp(0, x.shape[1] - 1)[:, None], -in_shard[:, None])
    return (softmax * scale[:, None]).to(x.dtype)


def nll_and_gradient(
    x: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor, real: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the negative log-likelihood and its gradient, for losses whose scale is known in advance.

    scale: [tokens], the factor of each token's loss. Returns nll [tokens] and the gradient [tokens, n], which may
    overwrite x.

    >>> nll, gradient = nll_and_gradient(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([8.0]), 2)
    >>> round(nll.exp().item(), 6), gradient.tolist()
    (2.0, [[4.0, -4.0]])
    """
    largest, total, target = softmax_parts(x, labels, real)
    log_total = total.log() + largest
    return log_total - target, x.copy_(softmax_gradient(x, labels, log_total, scale, real))


def _masked(x: torch.Tensor, real: int) -> torch.Tensor:
    logits = x.to(accurate(x.dtype))
    if real == x.shape[1]:
        return logits
    return logits.masked_fill(torch.arange(x.shape[1], device=x.device) >= real, -math.inf)
