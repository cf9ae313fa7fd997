"""What may be drawn, and how likely."""

from __future__ import annotations

import math

import pytest
import torch

from mega.core.inference.request import RequestError, Sampling
from mega.core.inference.sampling import choose, probabilities

LOGITS = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Sampling(), [0.1, 0.5, 0.15, 0.25]),
        (Sampling(temperature=0.0), [0, 1, 0, 0]),
        (Sampling(temperature=0.5), [0.01 / 0.345, 0.25 / 0.345, 0.0225 / 0.345, 0.0625 / 0.345]),
        (Sampling(top_k=2), [0, 2 / 3, 0, 1 / 3]),
        (Sampling(top_k=9), [0.1, 0.5, 0.15, 0.25]),
        (Sampling(top_p=0.4), [0, 1, 0, 0]),
        (Sampling(top_p=0.6), [0, 2 / 3, 0, 1 / 3]),
        (Sampling(top_p=0.8), [0, 5 / 9, 1.5 / 9, 2.5 / 9]),
        (Sampling(top_k=3, top_p=0.6), [0, 2 / 3, 0, 1 / 3]),
    ],
)
def test_probabilities(how: Sampling, expected: list[float]) -> None:
    both = probabilities(torch.stack([LOGITS, LOGITS.flip(0)]), how)
    torch.testing.assert_close(both, torch.tensor([expected, expected[::-1]], dtype=torch.float32))


def test_equal_logits_keep_the_nucleus_small() -> None:
    assert (probabilities(torch.zeros(10), Sampling(top_p=0.25)) > 0).sum() == 3


def test_draws_follow_the_seed_and_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = [choose(LOGITS, Sampling(), generator) for _ in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    torch.testing.assert_close(shares, LOGITS.exp(), atol=0.03, rtol=0)
    generator.manual_seed(3)
    assert drawn[:50] == [choose(LOGITS, Sampling(), generator) for _ in range(50)]


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"temperature": t}, f"temperature {t}") for t in (-1.0, math.nan, math.inf)]
    + [({"top_k": -1}, "top_k -1"), ({"top_p": 0.0}, "top_p 0.0")],
)
def test_what_cannot_be_is_refused(options: dict[str, float], flag: str) -> None:
    with pytest.raises(RequestError, match=flag):
        Sampling(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-30, 1e-300])
def test_the_coldest_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([500.0, 3.0, -1e30, 499.0])
    assert probabilities(logits, Sampling(temperature=temperature)).tolist() == [1.0, 0.0, 0.0, 0.0]
