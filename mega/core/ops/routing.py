"""Routes tokens to experts in plain torch: scores, choice, probabilities, capacity and balance losses.

    logits [t, E]  ->  chosen [t, k], the experts;  probabilities [t, k], the factors of their outputs

Scores are computed in fp32 or wider; probabilities have the dtype of the logits. This module does not depend on ranks,
so the t tokens must include every token that affects a choice or a loss. Sources: Shazeer et al. 2017; Fedus et al.
2022; DeepSeek-V3, 2024; details as in Megatron core 0.19."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch.nn import functional as F

from mega.core.architecture.layer import ExpertGroups, Router

LEAST_SUM = 1e-20
"""Constant added to the sum by which scores are divided, to avoid a division by 0."""

SINKHORN_TOLERANCE = 1e-4
SINKHORN_EPS = 1e-8
SINKHORN_ROUNDS = 1000
"""Maximum number of Sinkhorn iterations. A matrix that has not converged after these iterations is used anyway."""


class Routing(NamedTuple):
    """The chosen experts of each token, and their probabilities."""

    chosen: torch.Tensor  # int64 [t, k]
    probabilities: torch.Tensor  # [t, k]


def accurate(x: torch.Tensor) -> torch.Tensor:
    """Return x in max(fp32, dtype of x)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scores(logits: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute the scores of logits [t, E], in fp32 or wider."""
    x = accurate(logits)
    if kind == "softmax":
        return x.softmax(-1)
    return x.sigmoid() if kind == "sigmoid" else F.softplus(x).sqrt()


def route(
    logits: torch.Tensor,
    router: Router,
    chosen: int,
    balance: torch.Tensor | None = None,
    *,
    matrix: torch.Tensor | None = None,
) -> Routing:
    """Choose the experts of each token, and compute their probabilities.

    balance: [E], a bias that affects only the choice, or the thresholds that `quantile` subtracts. matrix: the result
    of `sinkhorn`, which determines the choice in training.
    """
    if router.choice == "sinkhorn":
        return _by_sinkhorn(logits, chosen, matrix)
    x = accurate(logits)
    expert_scores = x if router.score == "softmax" and router.normalize else scores(logits, router.score)
    choice_scores = expert_scores
    if balance is not None:
        choice_scores = x - balance if router.choice == "quantile" else expert_scores + balance
    experts = largest(choice_scores.detach(), chosen, router.groups)
    return Routing(experts, _probabilities(expert_scores.gather(1, experts), router).to(logits.dtype))


def _probabilities(picked: torch.Tensor, router: Router) -> torch.Tensor:
    """Compute the probabilities of the chosen experts. picked: scores [t, k] of the chosen experts, or logits if the
    softmax follows the choice."""
    if router.score == "softmax":
        probabilities = picked.softmax(-1) if router.normalize else picked
    elif router.normalize and picked.shape[1] > 1:
        probabilities = picked / (picked.sum(-1, keepdim=True) + LEAST_SUM)
    else:
        probabilities = picked
    return probabilities * router.scale if router.scale != 1 else probabilities


def largest(values: torch.Tensor, chosen: int, groups: ExpertGroups | None = None) -> torch.Tensor:
    """Return int64 [t, chosen], the indices of the largest values in each row of [t, E]. With groups, only experts of
    the best groups are chosen."""
    if groups is not None:
        grouped = values.unflatten(1, (groups.count, -1))
        best = grouped.topk(groups.best, -1).values.sum(-1).topk(groups.chosen, -1).indices
        in_best_group = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        values = grouped.masked_fill(~in_best_group[..., None], -torch.inf).flatten(1)
    return values.topk(chosen, -1).indices


def _by_sinkhorn(logits: torch.Tensor, chosen: int, matrix: torch.Tensor | None) -> Routing:
    """Choose the experts with the largest entries of a Sinkhorn matrix (Clark et al. 2022), or with the largest scores
    if `matrix` is None. Probabilities depend only on the logits."""
    x = accurate(logits)
    expert_scores = x.sigmoid() if chosen == 1 else x.softmax(-1)
    experts = largest(expert_scores.detach() if matrix is None else matrix, chosen)
    return Routing(experts, expert_scores.gather(1, experts).to(logits.dtype))


def sinkhorn(logits: torch.Tensor, tolerance: float = SINKHORN_TOLERANCE) -> torch.Tensor:
    """Scale exp(logits) [t, E] so that all rows have equal sums and all columns have equal sums.

    NaN in the logits produces NaN in the matrix, which a training step's check for finite values detects.
    """
    cost = (logits - logits.amax(1, keepdim=True)).exp()  # subtracting the maximum of a row only scales the row
    rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(cost.shape[1])
    for _ in range(SINKHORN_ROUNDS):
        rows = 1 / (cost.shape[0] * ((columns * cost).sum(1) + SINKHORN_EPS))
        before, columns = columns, 1 / (cost.shape[1] * ((rows[:, None] * cost).sum(0) + SINKHORN_EPS))
        if cost.is_meta or not float((columns - before).abs().mean()) > tolerance:
            break
    return columns * cost * rows[:, None]


def quantile(logits: torch.Tensor, balance: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return the thresholds [E] to subtract from logits [t, E] so that every expert is chosen t k / E times.

    balance: the current thresholds.
    """
    x = accurate(logits)
    rivals = (x - balance).topk(chosen + 1, -1).values[:, -1:]
    tokens, count = x.shape
    return (x - rivals).topk(tokens * chosen // count + 1, 0).values[-1]


# -- losses


def load_scores(logits: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute scores [t, E], which sum to 1 for each token, for the balance losses."""
    expert_scores = scores(logits, kind)
    return expert_scores if kind == "softmax" else expert_scores / (expert_scores.sum(-1, keepdim=True) + LEAST_SUM)


def choice_counts(
    own: torch.Tensor, chosen: int, rows: torch.Tensor, batch: int, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [batch, E]: for each row of the batch and each expert, the number of tokens for which this expert has one
    of the `chosen` largest scores. Bias, groups and capacity are ignored. rows: int64 [t], the row of each token.
    valid: bool [t], which tokens are counted; None for all tokens."""
    picked = torch.zeros_like(own).scatter(1, own.detach().topk(chosen, -1).indices, 1.0)
    if valid is not None:
        picked = picked * valid[:, None]
    return own.new_zeros(batch, own.shape[1]).index_add(0, rows, picked)


def imbalance(counts: torch.Tensor, sums: torch.Tensor, chosen: int, tokens: float | torch.Tensor) -> torch.Tensor:
    """Return the sum, over experts and rows, of counts x sums, times E / (k t^2). counts, sums: [..., E]. A balanced
    row contributes 1. tokens: t, either a single number or one number per row."""
    if isinstance(tokens, torch.Tensor):
        rows = (counts * sums).sum(-1) / tokens.clamp(min=1.0).square()
        return rows.sum() * (counts.shape[-1] / chosen)
    return (counts * sums).sum() * (counts.shape[-1] / (chosen * tokens**2))


def z_total(logits: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum over tokens of log(sum(exp(logits)))^2 (Zoph et al. 2022). valid: as in `choice_counts`."""
    squares = accurate(logits).logsumexp(-1).square()
    return squares.sum() if valid is None else (squares * valid).sum()


# -- capacity


def capacity(tokens: int, chosen: int, count: int, factor: float) -> int:
    """Return the maximum number of tokens per expert.

    >>> capacity(24, 1, 8, 1.25), capacity(10, 1, 8, 0.5)
    (4, 1)
    """
    return ceil(tokens * chosen / count * factor)


def kept_choices(
    chosen: torch.Tensor, probabilities: torch.Tensor, numbers: torch.Tensor, limit: int, policy: str
) -> torch.Tensor:
    """Return bool [t, k], which is True for the choices that are kept if each expert processes at most `limit` tokens.

    policy: with "probs", the choices with the largest probabilities are kept, otherwise the choices of the first
    tokens. numbers: int64 [t], the index of each token in the microbatch, which breaks ties between equal
    probabilities.
    """
    by_token = numbers.repeat_interleave(chosen.shape[1]).argsort(stable=True)
    experts, weights = chosen.flatten()[by_token], probabilities.detach().flatten()[by_token]
    if policy == "probs":
        by_weight = weights.argsort(descending=True, stable=True)
        by_token, experts = by_token[by_weight], experts[by_weight]
    by_expert = experts.argsort(stable=True)
    experts = experts[by_expert]
    positions = torch.arange(len(experts), device=experts.device)
    within = positions - torch.searchsorted(experts, experts)  # rank among choices of the same expert
    is_kept = torch.empty_like(experts, dtype=torch.bool)
    is_kept[by_token[by_expert]] = within < limit
    return is_kept.view_as(chosen)
