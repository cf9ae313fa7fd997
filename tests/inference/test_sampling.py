"""What may be drawn, and how likely."""

from __future__ import annotations

import math

import pytest
import torch

from mega.core.inference.beam import BeamSearch
from mega.core.inference.request import Request, RequestError, Sampling
from mega.core.inference.sampling import SeenIds, draw, penalised, probabilities, uniform

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
        (Sampling(top_p=1e-300), [0, 1, 0, 0]),
    ],
)
def test_probabilities(how: Sampling, expected: list[float]) -> None:
    both = probabilities(torch.stack([LOGITS, LOGITS.flip(0)]), how)
    torch.testing.assert_close(both, torch.tensor([expected, expected[::-1]], dtype=torch.float32))


def test_equal_logits_keep_the_nucleus_small() -> None:
    assert (probabilities(torch.zeros(10), Sampling(top_p=0.25)) > 0).sum() == 3


@pytest.mark.parametrize(
    "how",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_k=9),
        Sampling(top_p=0.7),
        Sampling(min_p=0.1),
        Sampling(top_k=20, top_p=0.8, min_p=0.05, temperature=1.3),
    ],
)
def test_50_000_draws_have_the_filtered_distribution(how: Sampling) -> None:
    """Chi squared below the value that it exceeds once in a million times (Wilson and Hilferty 1931)."""
    logits = torch.linspace(2.5, -2.5, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    kept = probabilities(logits, how)
    chances = torch.tensor([uniform(7, number) for number in range(50_000)], dtype=torch.float64)[:, None]
    drawn = torch.bincount(draw(kept.expand(50_000, -1), chances), minlength=40)
    assert not drawn[kept == 0].any()
    expected = kept[kept > 0].double() / kept.sum() * 50_000
    squared = float(((drawn[kept > 0] - expected) ** 2 / expected).sum())
    free = len(expected) - 1
    assert squared < free * (1 - 2 / (9 * free) + 4.75 * math.sqrt(2 / (9 * free))) ** 3


def test_filters_are_those_of_the_definitions() -> None:
    """Every filter against a slow form of its own, on logits without ties."""
    logits = torch.randn(30, generator=torch.Generator().manual_seed(2))
    order = logits.argsort(descending=True).tolist()
    likely = logits.softmax(0)
    assert set(probabilities(logits, Sampling(top_k=7)).nonzero()[:, 0].tolist()) == set(order[:7])
    nucleus = next(n for n in range(31) if float(likely[order[:n]].sum()) >= 0.6)
    assert set(probabilities(logits, Sampling(top_p=0.6)).nonzero()[:, 0].tolist()) == set(order[:nucleus])
    near = {at for at in range(30) if likely[at] >= 0.3 * likely.max()}
    assert set(probabilities(logits, Sampling(min_p=0.3)).nonzero()[:, 0].tolist()) == near


def test_each_row_is_filtered_alone() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(2)) * torch.tensor([[0.1], [1.0], [5.0]])
    how = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05)
    together = probabilities(logits, how)
    assert torch.equal(together, torch.stack([probabilities(row, how) for row in logits]))


def test_the_penalty_makes_what_was_seen_less_likely() -> None:
    seen = torch.tensor([[True, True, False]])
    assert penalised(torch.tensor([[2.0, -2.0, 1.0]]), seen, torch.tensor([[2.0]])).tolist() == [[1.0, -4.0, 1.0]]


def test_what_an_answer_holds_and_what_a_request_names_change_logits() -> None:
    """Once by presence, by each time it is there by frequency; the prompt's ids count in neither."""
    ids = SeenIds(2, 3, torch.device("cpu"))
    ids.seen[1, 2] = True  # of the prompt
    ids.add(torch.tensor([1]), torch.tensor([0]))
    ids.add(torch.tensor([1]), torch.tensor([0]))
    ids.favour(torch.tensor([[1, 1]]), torch.tensor([5.0]))
    one, presence, frequency = torch.ones(2, 1), torch.full((2, 1), 0.5), torch.full((2, 1), 0.25)
    found = ids.adjusted(torch.zeros(2, 3), torch.tensor([1, -1]), one, presence, frequency)
    assert found.tolist() == [[-1.0, 5.0, 0.0], [0.0, 0.0, 0.0]]
    ids.clear(torch.tensor([1]))
    assert not ids.counts.any() and not ids.seen.any() and not ids.bias.any()


def test_a_share_that_was_rounded_away_is_not_drawn() -> None:
    found = torch.tensor([[0.25, 0.75, 0.0]])
    for chance, expected in ((0.0, 0), (0.25, 1), (1 - 2**-53, 1)):
        assert draw(found, torch.tensor([[chance]], dtype=torch.float64)).tolist() == [expected]


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"temperature": t}, f"temperature {t}") for t in (-1.0, math.nan, math.inf)]
    + [({"top_k": -1}, "top_k -1"), ({"top_p": 0.0}, "top_p 0.0"), ({"top_k": 1.0}, "top_k 1.0")]
    + [({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound 0.6"), ({"seed": 2**64}, f"seed {2**64}")]
    + [({"min_p": 1.5}, "min_p 1.5"), ({"repetition_penalty": 0.0}, "repetition_penalty 0.0")]
    + [({"temperature": 1e300}, "from 0 .* to 1e"), ({"top_k": 1 << 63}, "0 .off. to 2147483648")]
    + [({"repetition_penalty": penalty}, "from 0.001 to 1000") for penalty in (1e-300, 1e300)],
)
def test_what_cannot_be_is_refused(options: dict[str, float], flag: str) -> None:
    with pytest.raises(RequestError, match=flag):
        Sampling(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [400.0, -1e10, math.nan])
def test_a_penalty_that_no_length_bears_is_refused(penalty: float) -> None:
    for most in (-20.0, 20.0):
        search = BeamSearch(1, 5, frozenset({2}), Request(prompt=(1,), tokens=5, length_penalty=most).length_penalty)
        search.live = [(-1.0, (1,) * 100_000)]
        assert search.advance([((2, -1.0),)]) == [] and math.isfinite(search.finished[0].score)
    with pytest.raises(RequestError, match="must be a number from -20 to 20"):
        Request(prompt=(1,), tokens=5, beams=2, length_penalty=penalty)


@pytest.mark.parametrize("temperature", [1e-30, 1e-300])
def test_the_coldest_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([500.0, 3.0, -1e30, 499.0])
    assert probabilities(logits, Sampling(temperature=temperature)).tolist() == [1.0, 0.0, 0.0, 0.0]
