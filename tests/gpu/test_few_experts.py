"""Our kernels of a mixture of experts for few tokens, against the plain form in float64 and in the same dtype.

On a CUDA device as they are; without one where Triton is installed, whose interpreter runs them on a CPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mega.core.architecture import units
from mega.core.architecture.layer import Router
from mega.core.model.decoder import DecoderStage
from mega.core.ops.few_experts import ExpertRule, ExpertWeights, FewExperts, plain_experts, trusted
from mega.core.ops.few_rows import NormOf
from mega.core.ops.norm import NormForm
from mega.core.ops.paged_attention import PLAIN as PLAIN_ATTENTION
from mega.core.ops.suite import choose, forward_only
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory, initialise
from tests.inference.test_engine import FAMILIES, GREEDY, Request, answers, engine_of, prompts, tokens
from tests.support.triton import CUDA, DEVICE, needs_kernels

pytestmark = [pytest.mark.gpu, needs_kernels]
DTYPE = torch.bfloat16 if CUDA else torch.float16
ROUTER = Router(
    score="softmax", normalize=True, scale=1.0, choice="largest", groups=None, bias=False, balance_rate=None,
    quantile_ema=0.0, dtype=None, jitter=0.0, losses=(),
)  # fmt: skip


def kernels() -> FewExperts:
    from mega.core.ops.kernels.few_experts import FEW_EXPERTS

    return FEW_EXPERTS


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def weights_of(count: int, local: range, hidden: int, width: int, gate: bool) -> ExpertWeights:
    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=DEVICE) / shape[1] ** 0.5).to(DTYPE)

    up = drawn(len(local) * width * (1 + gate), hidden)
    return ExpertWeights(4 * drawn(count, hidden), up, drawn(len(local) * hidden, width), local)


def check(rng: random.Random, count: int, chosen: int, hidden: int, width: int, tokens_: int) -> None:
    """Within twice the error of the plain form."""
    gate = rng.random() < 0.6
    first = rng.choice([0, 0, count // 2])
    local = range(first, rng.randint(first + 1, count) if rng.random() < 0.5 else count)
    router = replace(
        ROUTER, normalize=rng.random() < 0.5, scale=rng.choice([1.0, 2.5]), dtype=rng.choice([None, "fp32"])
    )
    rule = ExpertRule(router, chosen, "swiglu" if gate else rng.choice(["gelu", "relu2", "silu"]))
    weights = weights_of(count, local, hidden, width, gate)
    x = torch.randn(tokens_, hidden, device=DEVICE).to(DTYPE)
    norm = None
    if rng.random() < 0.7:
        shift = torch.randn(hidden, device=DEVICE).to(DTYPE) if rng.random() < 0.3 else None
        norm = NormOf(torch.randn(hidden, device=DEVICE).to(DTYPE), shift, 1e-5, NormForm(offset=rng.random() < 0.3))
    into = torch.randn(tokens_, hidden, device=DEVICE).to(DTYPE) if rng.random() < 0.5 else None
    assert kernels().takes(tokens_, weights, rule)

    def wide(given: Any) -> Any:
        return given.double() if isinstance(given, torch.Tensor) else given

    exact_weights = ExpertWeights(weights.router.double(), weights.up.double(), weights.down.double(), local)
    exact_norm = None if norm is None else NormOf(wide(norm.weight), wide(norm.bias), norm.eps, norm.form)
    exact = plain_experts(x.double(), exact_weights, rule, exact_norm, wide(into))
    plain, ours = (
        run(x, weights, rule, norm, None if into is None else into.clone()) for run in (plain_experts, kernels().run)
    )
    assert ours.shape == plain.shape and ours.dtype == plain.dtype
    # The norm is rounded before the router only in the plain form; 1e-3 is less than one choice of another expert.
    assert error(ours, exact) <= 2 * error(plain, exact) + 1e-3, (error(ours, exact), error(plain, exact), rule, local)


@pytest.mark.parametrize("seed", range(24))
def test_experts(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    count = rng.choice([3, 8, 16, 60, 128])
    shape = (
        (8 * rng.randint(1, 256), 8 * rng.randint(1, 300)) if CUDA else (8 * rng.randint(1, 9), 8 * rng.randint(1, 9))
    )
    check(rng, count, rng.randint(1, min(count, 8)), *shape, rng.choice([1, 1, 2, 5, 17, 64]))


@pytest.mark.parametrize("tokens_, chosen, width", [(1, 2, 14336), (1, 8, 768), (64, 2, 14336), (128, 8, 768)])
@pytest.mark.skipif(not CUDA, reason="too large for the interpreter")
def test_experts_of_large_models(tokens_: int, chosen: int, width: int) -> None:
    torch.manual_seed(0)
    hidden, count = (4096, 8) if chosen == 2 else (2048, 128)
    check(random.Random(1), count, chosen, hidden, width, tokens_)


def test_logits_that_are_not_finite_give_outputs_that_are_not_finite() -> None:
    """And no address outside of the weights is read."""
    weights, rule = weights_of(8, range(8), 32, 16, True), ExpertRule(ROUTER, 2, "swiglu")
    for tokens_ in (1, 3):
        x = torch.full((tokens_, 32), torch.nan, device=DEVICE, dtype=DTYPE)
        assert not kernels().run(x, weights, rule, None, None).isfinite().any()


@pytest.mark.parametrize("stale", [0, 1, 7, 2**31 - 1])
def test_a_token_that_is_not_finite_leaves_the_others_alone(stale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever numbers are in the memory of the choices before."""
    torch.manual_seed(0)
    weights, rule = weights_of(8, range(8), 32, 16, True), ExpertRule(ROUTER, 8, "swiglu")
    x = torch.randn(2, 32, device=DEVICE).to(DTYPE)
    expected, damaged, empty = kernels().run(x, weights, rule, None, None), x.clone(), torch.empty
    damaged[0] = torch.nan

    def filled(*shape: Any, **more: Any) -> torch.Tensor:
        made = empty(*shape, **more)
        return made.fill_(stale if not made.is_floating_point() else 1.0)

    monkeypatch.setattr(torch, "empty", filled)
    outputs = kernels().run(damaged, weights, rule, None, None)
    assert torch.equal(outputs[1:], expected[1:]) and not outputs[0].isfinite().any()


def test_kernels_that_a_device_runs_wrongly_are_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    where = torch.device(DEVICE)
    assert trusted(None, DTYPE, where, 48) is None
    assert trusted(kernels(), torch.float32, where, 48) is None
    assert trusted(kernels(), DTYPE, where, 48) is kernels() and not caplog.text
    wrong = replace(kernels(), run=lambda *given: kernels().run(*given) * 1.1)
    assert trusted(wrong, DTYPE, where, 48) is None and "off by 0.1" in caplog.text


def test_choices_that_the_kernels_do_not_implement_are_refused() -> None:
    weights = weights_of(8, range(8), 32, 16, True)
    assert kernels().takes(1, weights, ExpertRule(ROUTER, 2, "swiglu"))
    for other in (
        {"score": "sigmoid"},
        {"choice": "sinkhorn"},
        {"bias": True},
        {"balance_rate": 0.1},
        {"dtype": "fp64"},
    ):
        assert not kernels().takes(1, weights, ExpertRule(replace(ROUTER, **other), 2, "swiglu"))
    assert not kernels().takes(129, weights, ExpertRule(ROUTER, 2, "swiglu"))
    assert not kernels().takes(1, weights, ExpertRule(ROUTER, 2, "geglu"))


@pytest.mark.parametrize("shared", [False, True])
def test_an_engine_says_the_same(shared: bool) -> None:
    """One to three sequences at once."""
    more: dict[str, Any] = {"shared_ffn": 24, "shared_gate": True} if shared else {}
    model = replace(FAMILIES["qwen3"], experts=8, experts_chosen=2, expert_ffn=16, **more)
    where = torch.device(DEVICE)
    asked = [Request(prompt=prompt, tokens=2 + at, sampling=GREEDY) for at, prompt in enumerate(prompts(3))]
    taken: list[int] = []

    def run(x: torch.Tensor, *given: Any) -> torch.Tensor:
        taken.append(len(x))
        return kernels().run(x, *given)

    said = []
    for few in (None, replace(kernels(), run=run)):
        ops = replace(forward_only(choose(where, DTYPE)), few_rows=None, few_experts=few)
        ops = replace(ops, paged_attention=PLAIN_ATTENTION, spread=False)
        stage: Any = DecoderStage(model, units(model), ParameterFactory({}, DTYPE, where, ops), ALONE)
        initialise(stage, 5)
        with torch.no_grad():
            for weight in stage.parameters():
                if weight.dim() > 1:
                    weight.mul_(6.0)
        taken.clear()
        said.append([tokens(events) for events in answers(engine_of(stage.eval(), device=where), asked)])
    assert said[0] == said[1]
    assert {1, 2, 3} & set(taken), "no step took the kernels"
