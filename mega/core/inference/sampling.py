"""From logits to a token: temperature, then the k best, then the p likeliest. Knows no model.

Source of top-p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
"""

from __future__ import annotations

import torch

from mega.core.inference.request import Sampling


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """logits [..., vocab] -> what `choose` draws from, [..., vocab].

    >>> probabilities(torch.tensor([0.5, 0.3, 0.2]).log(), Sampling(top_p=0.6))  # 0.5 does not reach 0.6
    tensor([0.6250, 0.3750, 0.0000])
    """
    logits = logits.float()
    if how.greedy:
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
