"""From logits to tokens: penalty, temperature, then the k best, the p likeliest, those near the best. Knows no model.

A row's result depends on that row alone, and a draw on one number in [0, 1) that comes with it: no stream, no state.
Source of top-p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1; of min-p: Nguyen et
al. 2024; of the repetition penalty: Keskar et al. 2019, section 4.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mega.core.inference.request import TINY, Sampling
from mega.core.ops.counter import key


@dataclass(frozen=True, eq=False)
class Filters:
    """How each of m rows is filtered, all [m, 1]. most_k: the largest top_k, 0 where top_k is not needed; top_p, min_p:
    None where all are off.

    temperature: 1 for a greedy row, whose probabilities are not asked for.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    most_k: int
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [m, vocab] in fp32 -> probabilities [m, vocab]."""
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.most_k:
            best = logits.topk(min(self.most_k, logits.shape[-1])).values
            least = best.gather(-1, (self.top_k.clamp(max=best.shape[-1]) - 1).clamp(min=0))
            logits = logits.masked_fill((logits < least) & (self.top_k > 0), -torch.inf)
        if self.top_p is not None:
            best, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
            enough = (best.cumsum(-1) - best >= self.top_p) & (self.top_p < 1)  # reached without this one
            logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), -torch.inf)
        if self.min_p is not None:
            logits = logits.masked_fill(logits < self.min_p.log(), -torch.inf)
        return logits.softmax(-1)


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """logits [..., vocab] -> what `choose` draws from, [..., vocab].

    >>> probabilities(torch.tensor([0.5, 0.3, 0.2]).log(), Sampling(top_p=0.6))  # 0.5 does not reach 0.6
    tensor([0.6250, 0.3750, 0.0000])
    """
    rows = logits.float().reshape(-1, logits.shape[-1])
    if how.greedy:
        return torch.nn.functional.one_hot(rows.argmax(-1), rows.shape[-1]).float().view(logits.shape)

    def column(value: float) -> torch.Tensor:
        return torch.full((len(rows), 1), value, device=logits.device)

    filters = Filters(
        column(how.temperature),
        column(how.top_k).long(),
        how.top_k,
        column(top_p_after(how, 0)) if how.top_p < 1 else None,
        column(how.min_p) if how.min_p > 0 else None,
    )
    return filters(rows).view(logits.shape)


def penalised(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """logits [m, vocab] made less likely where `seen`, bool [m, vocab], by penalty [m, 1]."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class SeenIds:
    """What the logits of requests in flight are adjusted by, a row each: whether an id was in the text, how often it is
    in the answer, and what the request adds to its logit; the last from the first request on that does."""

    def __init__(self, requests: int, vocab: int, device: torch.device) -> None:
        self.seen = torch.zeros(requests, vocab, dtype=torch.bool, device=device)
        self.counts = torch.zeros(requests, vocab, dtype=torch.float32, device=device)
        self.bias: torch.Tensor | None = None

    def clear(self, rows: torch.Tensor) -> None:
        for each in (self.seen, self.counts, self.bias):
            if each is not None:
                each[rows] = 0

    def favour(self, pairs: torch.Tensor, bias: torch.Tensor) -> None:
        """pairs [b, 2]: row and id. bias [b]."""
        if self.bias is None:
            self.bias = torch.zeros_like(self.counts)
        self.bias[pairs[:, 0], pairs[:, 1]] = bias.float()

    def add(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """New tokens of answers."""
        self.seen[rows, ids] = True
        self.counts[rows, ids] += 1

    def adjusted(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        penalty: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """logits [m, vocab]. rows [m]: of these tables, below 0 for one that is left as it is. penalty, presence,
        frequency [m, 1]: as of `Sampling` (OpenAI's API reference has the last two)."""
        mine, at = (rows >= 0)[:, None], rows.clamp(min=0)
        counts = self.counts[at] * mine
        logits = penalised(logits, self.seen[at] & mine, penalty)
        logits = logits - (counts > 0) * presence - counts * frequency
        return logits if self.bias is None else logits + self.bias[at] * mine


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Of each row of [m, vocab] the first id of the largest, [m]."""
    if logits.is_cpu:  # numpy's takes a fifth of the time of torch's
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.max(-1).indices


def draw(found: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Ids [m] from probabilities [m, vocab], by float64 numbers in [0, 1) [m, 1]: an id whose share of the whole begins
    at or before the number and ends after it."""
    ends = found.double().cumsum(-1)
    ids = torch.searchsorted(ends, uniform * ends[:, -1:], right=True)[:, 0]
    return torch.where(ids < found.shape[-1], ids, found.argmax(-1))  # where the last share was rounded away


def uniform(seed: int, number: int) -> float:
    """In [0, 1): what the new token `number` of a request with this seed is drawn by.

    >>> uniform(1, 0) == uniform(1, 0) != uniform(1, 1)
    True
    """
    return ((key(seed, "sample", number) & ((1 << 64) - 1)) >> 11) / (1 << 53)


def top_p_after(how: Sampling, tokens: int) -> float:
    """Top-p of the token after `tokens` new ones: it decays, down to its bound.

    >>> [top_p_after(Sampling(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3), n) for n in range(3)]
    [0.8, 0.4, 0.3]
    """
    decayed = how.top_p * math.pow(how.top_p_decay, tokens) if how.top_p_decay else how.top_p
    return max(decayed, how.top_p_bound, TINY)  # fp32's 0 would keep no token at all
