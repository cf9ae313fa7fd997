"""Routing against numbers of Megatron core 0.19's own functions, and capacity against a loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mega.core.architecture.layer import ExpertGroups, Router
from mega.core.ops import routing
from mega.core.parallel.experts import permute, pick, plan_rows, unpermute

CORE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "core_router.json").read_text())
LOGITS = torch.tensor(CORE["logits"])
TOKENS, EXPERTS = LOGITS.shape


def router(**values: Any) -> Router:
    plain: dict[str, Any] = {"score": "softmax", "normalize": True, "scale": 1.0, "choice": "largest", "groups": None}
    plain |= {"bias": False, "balance_rate": None, "quantile_ema": 0.0, "dtype": None, "jitter": 0.0, "losses": ()}
    return Router(**{**plain, **values})


def named(**args: Any) -> tuple[Router, int, torch.Tensor | None]:
    """Core's arguments as a router, the number of chosen experts, and the bias for the choice."""
    chosen, values = args.pop("topk"), dict[str, Any]()
    bias, groups = args.pop("expert_bias", None), args.pop("num_groups", None)
    if groups is not None:
        kept = args.pop("group_topk")
        values["groups"] = ExpertGroups(groups, kept, chosen // kept)
    values["normalize"] = not args.pop("use_pre_softmax", False)
    values["score"] = args.pop("score_function", "softmax").replace("sqrts", "sqrt-s")
    values["scale"] = args.pop("scaling_factor", 1.0)
    assert not args
    return router(**values), chosen, None if bias is None else torch.tensor(bias)


@pytest.mark.parametrize("rule", CORE["routing"])
def test_probabilities_and_choice(rule: str) -> None:
    expected = CORE["routing"][rule]
    value, chosen, bias = named(**expected["args"])
    found = routing.route(LOGITS, value, chosen, bias)
    probabilities = torch.zeros_like(LOGITS).scatter(1, found.chosen, found.probabilities)
    two_ulp = 2 * torch.finfo(torch.float32).eps  # a CPU's vector instructions round exp in their own way
    torch.testing.assert_close(probabilities, torch.tensor(expected["probs"]), rtol=two_ulp, atol=1e-7)
    chosen_map = torch.zeros_like(LOGITS).scatter(1, found.chosen, 1.0)
    assert torch.equal(chosen_map, torch.tensor(expected["map"]).float())


@pytest.mark.parametrize("rule", CORE["aux_loss"])
def test_balance_losses_and_their_gradient(rule: str) -> None:
    score, _, top = rule.rpartition("_top")
    expected, chosen = CORE["aux_loss"][rule], int(top)
    logits = LOGITS.clone().requires_grad_()
    own = routing.load_scores(logits, score.replace("sqrts", "sqrt-s"))
    rows = torch.zeros(TOKENS, dtype=torch.int64)
    counts = routing.choice_counts(own, chosen, rows, 1)
    assert counts[0].tolist() == expected["tokens_per_expert"]
    loss = 0.01 * routing.imbalance(counts[0], own.sum(0), chosen, TOKENS)
    assert float(loss.detach()) == pytest.approx(expected["aux_loss_coeff_0.01"], rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], torch.tensor(expected["grad_of_aux_row0"]), rtol=1e-4, atol=1e-9)
    # "6x2": tokens of [6, 2] in Megatron's order, so the second sequence is every other one.
    rows = torch.arange(TOKENS) % 2
    sums = torch.zeros(2, EXPERTS).index_add(0, rows, own.detach())
    each = routing.imbalance(routing.choice_counts(own.detach(), chosen, rows, 2), sums, chosen, TOKENS / 2)
    assert 0.01 * float(each) / 2 == pytest.approx(expected["seq_aux_loss_coeff_0.01_6x2"], rel=1e-6)


def test_the_z_loss_and_its_gradient() -> None:
    logits, expected = LOGITS.clone().requires_grad_(), CORE["z_loss_1e-3"]
    loss = 1e-3 * routing.z_total(logits) / TOKENS
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["value"], rel=1e-6) and logits.grad is not None
    torch.testing.assert_close(logits.grad[0], torch.tensor(expected["grad_row0"]), rtol=1e-5, atol=1e-10)


def test_sinkhorn() -> None:
    matrix = routing.sinkhorn(LOGITS)
    torch.testing.assert_close(matrix, torch.tensor(CORE["sinkhorn"]["matrix"]), rtol=1e-5, atol=1e-7)
    balanced = router(choice="sinkhorn")
    for chosen in (1, 2):
        found = routing.route(LOGITS, balanced, chosen, matrix=matrix)
        expected = torch.tensor(CORE["sinkhorn"][f"top{chosen}"]).view(TOKENS, chosen)
        assert torch.equal(found.chosen, expected)
        own = LOGITS.sigmoid() if chosen == 1 else LOGITS.softmax(1)
        torch.testing.assert_close(found.probabilities, own.gather(1, expected))


def test_quantile_balancing() -> None:
    expected = CORE["quantile_balancing"]
    beta = routing.quantile(LOGITS, torch.zeros(EXPERTS), 2)
    torch.testing.assert_close(beta, torch.tensor(expected["quantile"]))


def test_sinkhorn_ends_and_is_finite() -> None:
    large = torch.tensor([[100.0, 0.0], [200.0, 100.0], [0.0, -300.0]])
    assert routing.sinkhorn(large).isfinite().all()
    assert not routing.sinkhorn(torch.full((3, 2), torch.nan)).isfinite().any()


@pytest.mark.parametrize(("tokens", "count", "factor", "expected"), CORE["capacity"])
def test_capacity(tokens: int, count: int, factor: float, expected: int) -> None:
    assert routing.capacity(tokens, 1, count, factor) == expected


DROPPING = CORE["dropping_softmax_post_top2"]


@pytest.mark.parametrize("case", [name for name in DROPPING if name.endswith("_nopad")])
def test_dropping(case: str) -> None:
    """Padding adds rows of probability 0, so it changes no sum; core's first tokens are ours, where it defines them."""
    policy, factor, _ = case.split("_")
    found = routing.route(LOGITS, router(), 2)
    limit = routing.capacity(TOKENS, 2, EXPERTS, float(factor))
    kept = routing.kept_choices(found.chosen, found.probabilities, torch.arange(TOKENS), limit, policy)
    chosen_map = torch.zeros(TOKENS, EXPERTS).scatter(1, found.chosen, kept.float())
    sums = (found.probabilities * kept).sum(1)
    assert chosen_map.sum(0).le(limit).all()
    expected = torch.tensor(DROPPING[case]["map"]).float()
    if policy == "probs":
        assert torch.equal(chosen_map, expected)
        torch.testing.assert_close(sums, torch.tensor(DROPPING[case]["row_sums"]), rtol=0, atol=1e-6)
    else:
        assert torch.equal(chosen_map.sum(0), expected.sum(0))
        for expert in range(EXPERTS):  # the lowest numbers of those that chose it
            asked = (found.chosen == expert).any(1).nonzero().flatten().tolist()
            assert chosen_map[:, expert].nonzero().flatten().tolist() == asked[:limit]


def test_permutation() -> None:
    found = routing.route(LOGITS, router(), 2)
    plan = plan_rows(found.chosen, None, range(EXPERTS), EXPERTS)
    assert plan.token.tolist() == CORE["permute"]["sorted_token_ids"]
    probabilities = pick(found.probabilities, plan)
    torch.testing.assert_close(probabilities, torch.tensor(CORE["permute"]["permuted_probs"]))
    x = torch.randn(TOKENS, 5)
    y = unpermute(permute(x, plan) * probabilities[:, None], plan)
    torch.testing.assert_close(y, x * found.probabilities.sum(1, keepdim=True))


@pytest.mark.parametrize("limit", [None, 5])
def test_moving_rows_is_its_own_gradient(limit: int | None) -> None:
    """Of experts 2 to 5, whatever was dropped: rows of no token are zeros, and choices without a row add nothing."""
    found = routing.route(LOGITS, router(), 2)
    kept = routing.kept_choices(found.chosen, found.probabilities, torch.arange(TOKENS), 3, "probs")
    plan = plan_rows(found.chosen, kept, range(2, 6), EXPERTS, limit)
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, 5, generator=draw, dtype=torch.float64) for n in (TOKENS, len(plan.token)))
    assert (permute(x, plan) * y).sum() == pytest.approx(float((x * unpermute(y, plan)).sum()))
    rows = 4 * limit if limit else int((kept & (found.chosen >= 2) & (found.chosen < 6)).sum())
    assert int(plan.counts.sum()) == len(plan.token) == rows


class NumbersWritten(TorchDispatchMode):
    """Counts `tensor[i] = number`, which on a device copies a tensor of the host."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten.copy_.default and args[1].ndim == 0
        return func(*args, **(kwargs or {}))


def test_rows_are_planned_without_numbers_of_the_host() -> None:
    """A graph of the device cannot record such a copy, and a step would wait for it."""
    with NumbersWritten() as seen:
        x, weights = torch.randn(TOKENS, 8, requires_grad=True), torch.rand(TOKENS, 2)
        plan = plan_rows(routing.route(LOGITS, router(), 2).chosen, None, range(EXPERTS), EXPERTS)
        unpermute(permute(x, plan) * pick(weights, plan)[:, None], plan).sum().backward()
        assert not seen.found
        x.detach()[0, 0] = 1  # such a number is seen
    assert seen.found == 1
