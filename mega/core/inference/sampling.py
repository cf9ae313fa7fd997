"""From logits to a token: temperature, then the k best, then the p likeliest. Knows no model.

Source of top-p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How to choose. temperature 0 takes the likeliest; top_k 0 and top_p 1 are off.

    Errors: ValueError naming the flag.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"--temperature {self.temperature}: must be a number of at least 0 (0 takes the likeliest)"
            )
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: must be at least 0 (0 is off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1 (1 is off)")


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """logits [..., vocab] -> what `choose` draws from, [..., vocab].

    >>> probabilities(torch.tensor([0.5, 0.3, 0.2]).log(), Sampling(top_p=0.6))  # 0.5 does not reach 0.6
    tensor([0.6250, 0.3750, 0.0000])
    """
    logits = logits.float()
    # Below what fp32 distinguishes from 0 the likeliest has all.
    if how.temperature < torch.finfo(torch.float32).tiny:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = (logits - logits.amax(-1, keepdim=True)) / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        least = logits.topk(how.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if how.top_p < 1:
        best, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        enough = best.cumsum(-1) - best >= how.top_p  # reached without this one
        logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), -torch.inf)
    return logits.softmax(-1)


def choose(logits: torch.Tensor, how: Sampling, generator: torch.Generator | None = None) -> int:
    """One token id from logits [vocab]; the same generator state gives the same id."""
    return int(torch.multinomial(probabilities(logits, how), 1, generator=generator))
