"""Choose tokens from logits with penalties, temperature, top-k, top-p, min-p and a random draw.

The result for a row depends only on the row and on its random number in [0, 1), which the caller provides. Sources:
Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1 (top-p); Nguyen et al. 2024 (min-p);
Keskar et al. 2019, section 4.1 (repetition penalty).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mega.core.inference.request import TINY, Sampling
from mega.core.ops.counter import key


@dataclass(frozen=True, eq=False)
class Filters:
    """The filter parameters of m rows, as tensors [m, 1]."""

    temperature: torch.Tensor
    """Divisor of the logits; 1 for greedy rows, whose probabilities are not used."""
    top_k: torch.Tensor
    most_k: int
    """The largest top_k of all rows; 0 if top-k is disabled in all rows."""
    top_p: torch.Tensor | None
    """Value of top-p for each row; None if top-p is disabled in all rows."""
    min_p: torch.Tensor | None
    """Value of min-p for each row; None if min-p is disabled in all rows."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert logits [m, vocab] in fp32 to probabilities [m, vocab]."""
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.most_k:
            best = logits.topk(min(self.most_k, logits.shape[-1])).values
            least = best.gather(-1, (self.top_k.clamp(max=best.shape[-1]) - 1).clamp(min=0))
            logits = logits.masked_fill((logits < least) & (self.top_k > 0), -torch.inf)
        if self.top_p is not None:
            best, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
            # A token is dropped if the probabilities of more likely tokens already add up to p.
            enough = (best.cumsum(-1) - best >= self.top_p) & (self.top_p < 1)
            logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), -torch.inf)
        if self.min_p is not None:
            logits = logits.masked_fill(logits < self.min_p.log(), -torch.inf)
        return logits.softmax(-1)


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Convert logits [..., vocab] to the probabilities from which a token is drawn, [..., vocab].

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
    """Apply the repetition penalty [m, 1] to logits [m, vocab], where `seen`, bool [m, vocab], is True."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class SeenIds:
    """Tables for adjusting the logits of requests in flight. For each request and id, the tables contain whether the id
    occurs in the text, how often it occurs in the answer, and its bias. The table of biases is allocated for the first
    request with a bias."""

    def __init__(self, requests: int, vocab: int, device: torch.device) -> None:
        self.seen = torch.zeros(requests, vocab, dtype=torch.bool, device=device)
        self.counts = torch.zeros(requests, vocab, dtype=torch.float32, device=device)
        self.bias: torch.Tensor | None = None

    def clear(self, rows: torch.Tensor) -> None:
        for each in (self.seen, self.counts, self.bias):
            if each is not None:
                each[rows] = 0

    def favour(self, pairs: torch.Tensor, bias: torch.Tensor) -> None:
        """Set biases. pairs: (row, id) of each bias, [b, 2]. bias: values, [b]."""
        if self.bias is None:
            self.bias = torch.zeros_like(self.counts)
        self.bias[pairs[:, 0], pairs[:, 1]] = bias.float()

    def add(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Record new tokens of answers."""
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
        """Adjust logits [m, vocab]. rows: row of each request in the tables, [m]; negative to leave the logits
        unchanged. penalty, presence, frequency: values as in `Sampling`, [m, 1]. OpenAI's API reference defines the
        presence and frequency penalties."""
        has_row, table_rows = (rows >= 0)[:, None], rows.clamp(min=0)
        counts = self.counts[table_rows] * has_row
        logits = penalised(logits, self.seen[table_rows] & has_row, penalty)
        logits = logits - (counts > 0) * presence - counts * frequency
        return logits if self.bias is None else logits + self.bias[table_rows] * has_row


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the first id with the largest logit in each row of [m, vocab], as a tensor [m]."""
    if logits.is_cpu:  # numpy is five times as fast as torch
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.max(-1).indices


def draw(shares: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw ids [m] from probabilities [m, vocab]. uniform: float64 numbers in [0, 1), [m, 1]. Each number selects the
    id whose interval of the cumulative distribution contains the number."""
    ends = shares.double().cumsum(-1)
    ids = torch.searchsorted(ends, uniform * ends[:, -1:], right=True)[:, 0]
    # Because of rounding, a number can lie above the last interval.
    return torch.where(ids < shares.shape[-1], ids, shares.argmax(-1))


def uniform(seed: int, number: int) -> float:
    """Return the random number in [0, 1) that selects new token `number` of a request with the given seed.

    >>> uniform(1, 0) == uniform(1, 0) != uniform(1, 1)
    True
    """
    return ((key(seed, "sample", number) & ((1 << 64) - 1)) >> 11) / (1 << 53)


def top_p_after(how: Sampling, tokens: int) -> float:
    """Return the decayed top-p after `tokens` new tokens, but at least the bound.

    >>> [top_p_after(Sampling(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3), n) for n in range(3)]
    [0.8, 0.4, 0.3]
    """
    decayed = how.top_p * math.pow(how.top_p_decay, tokens) if how.top_p_decay else how.top_p
    return max(decayed, how.top_p_bound, TINY)  # a top-p of 0 would keep no token
