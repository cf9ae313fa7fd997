"""How tokens choose experts: scores, choice, probabilities, capacity, balance losses and permutation, in plain torch.

    logits [t, E]  ->  chosen [t, k], which experts;  probabilities [t, k], what their outputs are multiplied by

Scores are computed in fp32 at least; probabilities are given in the dtype of the logits. Knows no ranks: `t` are all
tokens that matter to a rule. Sources: Shazeer et al. 2017; Fedus et al. 2022; DeepSeek-V3, 2024; the rules' details are
those of Megatron core 0.19.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch.nn import functional as F

from mega.core.architecture.layer import ExpertGroups, Router

LEAST_SUM = 1e-20
"""Added to a sum of scores that others are divided by."""

SINKHORN_TOLERANCE = 1e-4
SINKHORN_EPS = 1e-8
SINKHORN_ROUNDS = 1000
"""At the most; a matrix that is not near its end by then is taken as it is."""


class Routing(NamedTuple):
    """chosen: int64 [t, k]. probabilities: [t, k]."""

    chosen: torch.Tensor
    probabilities: torch.Tensor


def accurate(x: torch.Tensor) -> torch.Tensor:
    """x in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scores(logits: torch.Tensor, kind: str) -> torch.Tensor:
    """What a router makes of its logits, [t, E], in fp32 at least."""
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
    """The experts of each token. balance: [E], a bias that the choice alone reads, or what `quantile` subtracts.

    matrix: of `sinkhorn`, by which the choice goes in training.
    """
    if router.choice == "sinkhorn":
        return _by_sinkhorn(logits, chosen, matrix)
    x = accurate(logits)
    own = x if router.score == "softmax" and router.normalize else scores(logits, router.score)
    judged = own
    if balance is not None:
        judged = x - balance if router.choice == "quantile" else own + balance
    which = largest(judged.detach(), chosen, router.groups)
    return Routing(which, _probabilities(own.gather(1, which), router).to(logits.dtype))


def _probabilities(picked: torch.Tensor, router: Router) -> torch.Tensor:
    """Of the scores [t, k] of the chosen; of the logits where a softmax follows the choice."""
    if router.score == "softmax":
        probabilities = picked.softmax(-1) if router.normalize else picked
    elif router.normalize and picked.shape[1] > 1:
        probabilities = picked / (picked.sum(-1, keepdim=True) + LEAST_SUM)
    else:
        probabilities = picked
    return probabilities * router.scale if router.scale != 1 else probabilities


def largest(judged: torch.Tensor, chosen: int, groups: ExpertGroups | None = None) -> torch.Tensor:
    """int64 [t, chosen]: the largest of each row of [t, E], from the best groups where there are any."""
    if groups is not None:
        grouped = judged.unflatten(1, (groups.count, -1))
        best = grouped.topk(groups.best, -1).values.sum(-1).topk(groups.chosen, -1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        judged = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    return judged.topk(chosen, -1).indices


def _by_sinkhorn(logits: torch.Tensor, chosen: int, matrix: torch.Tensor | None) -> Routing:
    """Clark et al. 2022. Probabilities are those of the logits alone, whatever matrix the choice goes by."""
    x = accurate(logits)
    own = x.sigmoid() if chosen == 1 else x.softmax(-1)
    which = largest(own.detach() if matrix is None else matrix, chosen)
    return Routing(which, own.gather(1, which).to(logits.dtype))


def sinkhorn(logits: torch.Tensor, tolerance: float = SINKHORN_TOLERANCE) -> torch.Tensor:
    """[t, E] of positive numbers: exp(logits) scaled until every row has the same sum and so has every column.

    Logits that are no numbers make a matrix that is none, in which a guard of the step finds them.
    """
    cost = (logits - logits.amax(1, keepdim=True)).exp()  # rows are scaled anyway
    rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(cost.shape[1])
    for _ in range(SINKHORN_ROUNDS):
        rows = 1 / (cost.shape[0] * ((columns * cost).sum(1) + SINKHORN_EPS))
        before, columns = columns, 1 / (cost.shape[1] * ((rows[:, None] * cost).sum(0) + SINKHORN_EPS))
        if cost.is_meta or not float((columns - before).abs().mean()) > tolerance:
            break
    return columns * cost * rows[:, None]


def quantile(logits: torch.Tensor, balance: torch.Tensor, chosen: int) -> torch.Tensor:
    """[E]: what to subtract from logits [t, E] so that every expert is chosen t k / E times. balance: as of now."""
    x = accurate(logits)
    rivals = (x - balance).topk(chosen + 1, -1).values[:, -1:]
    tokens, count = x.shape
    return (x - rivals).topk(tokens * chosen // count + 1, 0).values[-1]


# -- losses


def load_scores(logits: torch.Tensor, kind: str) -> torch.Tensor:
    """[t, E]: scores that add up to 1, by which balance is judged."""
    own = scores(logits, kind)
    return own if kind == "softmax" else own / (own.sum(-1, keepdim=True) + LEAST_SUM)


def choice_counts(own: torch.Tensor, chosen: int, rows: torch.Tensor, batch: int) -> torch.Tensor:
    """[batch, E]: how many tokens of each row have an expert among their `chosen` largest scores; without any bias,
    group or capacity. rows: int64 [t], the row of each token."""
    picked = torch.zeros_like(own).scatter(1, own.detach().topk(chosen, -1).indices, 1.0)
    return own.new_zeros(batch, own.shape[1]).index_add(0, rows, picked)


def imbalance(counts: torch.Tensor, sums: torch.Tensor, chosen: int, tokens: float) -> torch.Tensor:
    """E / (k t^2) x the sum of counts x sums, both [..., E], over experts and rows; 1 for each row in balance."""
    return (counts * sums).sum() * (counts.shape[-1] / (chosen * tokens**2))


def z_total(logits: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of the square of log(sum(exp(logits))) (Zoph et al. 2022)."""
    return accurate(logits).logsumexp(-1).square().sum()


# -- capacity


def capacity(tokens: int, chosen: int, count: int, factor: float) -> int:
    """How many tokens an expert takes.

    >>> capacity(24, 1, 8, 1.25), capacity(10, 1, 8, 0.5)
    (4, 1)
    """
    return ceil(tokens * chosen / count * factor)


def kept_choices(
    chosen: torch.Tensor, probabilities: torch.Tensor, numbers: torch.Tensor, limit: int, policy: str
) -> torch.Tensor:
    """bool [t, k]: which choices an expert keeps that takes `limit` tokens: those of largest probability, or the first.

    numbers: int64 [t], of the tokens in the microbatch; the lower counts where probabilities are equal.
    """
    by_token = numbers.repeat_interleave(chosen.shape[1]).argsort(stable=True)
    experts, weights = chosen.flatten()[by_token], probabilities.detach().flatten()[by_token]
    if policy == "probs":
        by_weight = weights.argsort(descending=True, stable=True)
        by_token, experts = by_token[by_weight], experts[by_weight]
    by_expert = experts.argsort(stable=True)
    experts = experts[by_expert]
    positions = torch.arange(len(experts), device=experts.device)
    within = positions - torch.searchsorted(experts, experts)  # rank among those of the same expert
    kept = torch.empty_like(experts, dtype=torch.bool)
    kept[by_token[by_expert]] = within < limit
    return kept.view_as(chosen)
