"""Learning rate and weight decay: golden vectors of Megatron-LM's schedules."""

from __future__ import annotations

import pytest

from mega.core.optim.schedule import LearningRate, WeightDecay

AT = (0, 1, 50, 100, 101, 550, 1000, 1001)
RATES = {
    "linear": (0, 1.5e-6, 7.5e-5, 1.5e-4, 1.498444444e-4, 8e-5, 1e-5, 1e-5),
    "cosine": (0, 1.5e-6, 7.5e-5, 1.5e-4, 1.499995735e-4, 8e-5, 1e-5, 1e-5),
    "inverse-square-root": (0, 1.5e-6, 7.5e-5, 1.5e-4, 1.492555785e-4, 6.396021491e-5, 4.743416490e-5, 1e-5),
    "constant": (0, 1.5e-6, 7.5e-5, 1.5e-4, 1.5e-4, 1.5e-4, 1.5e-4, 1.5e-4),
}


@pytest.mark.parametrize("style", RATES)
def test_learning_rate(style: str) -> None:
    rate = LearningRate(peak=1.5e-4, least=1e-5, warmup=100, decay=1000, style=style)
    assert [rate(samples) for samples in AT] == pytest.approx(RATES[style], rel=1e-9)


@pytest.mark.parametrize(
    ("style", "half"),
    [("exponential", 2 * 0.5**0.5 - 1), ("linear", 0.5), ("cosine", 0.5), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_warm_up_then_stable_then_decay(style: str, half: float) -> None:
    """Megatron-core's WSD: the peak until the last 200 of 1000 samples, then down to the least."""
    rate = LearningRate(1.5e-4, 1e-5, warmup=100, decay=1000, style="wsd", anneal=200, anneal_style=style)
    assert [rate(at) for at in (50, 100, 101, 800)] == [7.5e-5, 1.5e-4, 1.5e-4, 1.5e-4]
    assert [rate(at) for at in (900, 1000, 1001)] == pytest.approx([1e-5 + half * 1.4e-4, 1e-5, 1e-5], rel=1e-9)


def test_warm_up_from_an_initial_rate() -> None:
    rate = LearningRate(peak=1.0, least=0.0, warmup=10, decay=100, style="cosine", initial=0.5)
    assert (rate(0), rate(5), rate(10)) == (0.5, 0.75, 1.0)


def test_without_warm_up_the_peak_comes_first() -> None:
    assert LearningRate(peak=1.0, least=0.0, warmup=0, decay=100, style="linear")(0) == 1.0


@pytest.mark.parametrize(
    ("style", "expected"),
    [("linear", (0.0325, 0.055, 0.1)), ("cosine", (0.02318019485, 0.055, 0.1)), ("constant", (0.1, 0.1, 0.1))],
)
def test_weight_decay(style: str, expected: tuple[float, ...]) -> None:
    decay = WeightDecay(start=0.01, end=0.1, total=1000, style=style)
    assert [decay(samples) for samples in (250, 500, 1000)] == pytest.approx(expected, rel=1e-9)
