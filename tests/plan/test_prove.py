"""The proof accepts every plan that is made here and refuses every plan that is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from mega.core.plan import Act, Compute, Exchange, Plan, PlanError, Transfer, plan, prove
from mega.core.plan.exchange import with_exchanges
from mega.core.plan.play import play
from tests.plan.cases import plans

SMALL: list[tuple[str, int, int, int]] = [
    ("gpipe", 2, 1, 2),
    ("1f1b", 3, 1, 4),
    ("interleaved", 2, 2, 3),
    ("zb-h1", 3, 1, 4),
    ("forward", 2, 2, 2),
    ("interleaved", 1, 2, 2),
]


@settings(max_examples=200)
@given(plans())
def test_every_plan_is_proven(made: Plan) -> None:
    prove(made)


@pytest.mark.battery
@settings(max_examples=1000)
@given(plans())
def test_every_plan_is_proven_at_length(made: Plan) -> None:
    prove(made)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_a_plan_of_64_stages_and_512_microbatches_is_proven(kind: str) -> None:
    prove(plan(kind, 64, 1, 512))


def with_acts(made: Plan, rank: int, acts: Sequence[Act]) -> Plan:
    return replace(made, acts=(*made.acts[:rank], tuple(acts), *made.acts[rank + 1 :]))


@pytest.mark.parametrize("case", SMALL)
def test_leaving_out_any_act_is_refused(case: tuple[str, int, int, int]) -> None:
    made = plan(*case)
    for rank, acts in enumerate(made.acts):
        for i in range(len(acts)):
            with pytest.raises(PlanError):
                prove(with_acts(made, rank, acts[:i] + acts[i + 1 :]))


@pytest.mark.parametrize("case", SMALL)
def test_repeating_any_act_is_refused(case: tuple[str, int, int, int]) -> None:
    made = plan(*case)
    for rank, acts in enumerate(made.acts):
        for i in range(len(acts)):
            with pytest.raises(PlanError, match="twice"):
                prove(with_acts(made, rank, (*acts[: i + 1], *acts[i:])))


@pytest.mark.parametrize("case", SMALL)
def test_leaving_out_any_transfer_is_refused(case: tuple[str, int, int, int]) -> None:
    made = plan(*case)
    for rank, acts in enumerate(made.acts):
        for i, act in enumerate(acts):
            for fewer in _with_one_transfer_less(act) if isinstance(act, Exchange) else []:
                with pytest.raises(PlanError):
                    prove(with_acts(made, rank, (*acts[:i], fewer, *acts[i + 1 :])))


def _with_one_transfer_less(act: Exchange) -> list[Exchange]:
    return [
        *(Exchange(act.sends[:i] + act.sends[i + 1 :], act.recvs) for i in range(len(act.sends))),
        *(Exchange(act.sends, act.recvs[:i] + act.recvs[i + 1 :]) for i in range(len(act.recvs))),
    ]


@pytest.mark.parametrize("case", SMALL)
def test_computing_before_receiving_and_sending_before_computing_are_refused(
    case: tuple[str, int, int, int],
) -> None:
    made = plan(*case)
    for rank, acts in enumerate(made.acts):
        for i, (one, other) in enumerate(pairwise(acts)):
            if isinstance(one, Exchange) and any(_concern(transfer, other) for transfer in one.recvs):
                message = "has no"
            elif isinstance(other, Exchange) and any(_concern(transfer, one) for transfer in other.sends):
                message = "sends before it is made"
            else:
                continue
            with pytest.raises(PlanError, match=message):
                prove(with_acts(made, rank, (*acts[:i], other, one, *acts[i + 2 :])))


def _concern(transfer: Transfer, act: Act) -> bool:
    return act == Compute(transfer.kind, transfer.microbatch, transfer.chunk)


def swapped(made: Plan, rank: int, one: Act, other: Act) -> Plan:
    trade = {one: other, other: one}
    return with_acts(made, rank, [trade.get(act, act) for act in made.acts[rank]])


def test_a_weight_gradient_before_its_backward_is_refused() -> None:
    made = plan("zb-h1", 2, microbatches=3)
    with pytest.raises(PlanError, match="has not computed B before"):
        prove(swapped(made, 0, Compute("B", 1, 0), Compute("W", 1, 0)))


def test_a_backward_before_its_forward_is_refused() -> None:
    made = plan("1f1b", 1, microbatches=2)
    with pytest.raises(PlanError, match="has not computed F before"):
        prove(swapped(made, 0, Compute("F", 1, 0), Compute("B", 1, 0)))


def test_cargo_to_or_from_the_wrong_rank_is_refused() -> None:
    made = plan("forward", 3)
    first, second = made.acts[0], made.acts[1]
    astray = Exchange((Transfer("F", 0, 0, peer=2),))
    with pytest.raises(PlanError, match="sends to the wrong rank"):
        prove(with_acts(made, 0, (first[0], astray)))
    with pytest.raises(PlanError, match="receives from the wrong rank"):
        prove(with_acts(made, 1, (Exchange((), (Transfer("F", 0, 0, peer=2),)), *second[1:])))


def test_cargo_that_arrives_in_another_order_than_it_leaves_is_refused() -> None:
    made = plan("forward", 2, 1, 2)
    first, second = Transfer("F", 0, 0, peer=0), Transfer("F", 1, 0, peer=0)
    acts = (Exchange((), (second, first)), Compute("F", 0, 0), Compute("F", 1, 0))
    with pytest.raises(PlanError, match="leaves where"):
        prove(with_acts(made, 1, acts))


def test_a_deadlock_that_only_blocking_sends_show_is_refused() -> None:
    """Both ranks send first and receive after: well with buffers, for ever without."""
    made = plan("1f1b", 2, microbatches=3)
    apart = replace(made, acts=tuple(tuple(_sends_first(acts)) for acts in made.acts))
    play(apart, lambda act, stage: 1.0, 0.0, overlap=True)
    with pytest.raises(PlanError, match="deadlock"):
        prove(apart)


def _sends_first(acts: Sequence[Act]) -> list[Act]:
    out: list[Act] = []
    for act in acts:
        out += [Exchange(act.sends), Exchange((), act.recvs)] if isinstance(act, Exchange) else [act]
    return out


def test_orders_that_wait_for_each_other_are_refused() -> None:
    """Rank 0 wants the gradient of microbatch 0 before it has sent microbatch 1, which rank 1 wants first."""
    first = [Compute("F", 0, 0), Compute("B", 0, 0), Compute("F", 1, 0), Compute("B", 1, 0)]
    second = [Compute("F", 1, 0), Compute("B", 1, 0), Compute("F", 0, 0), Compute("B", 0, 0)]
    with pytest.raises(PlanError, match="circle"):
        with_exchanges([first, second], stages=2, chunks=1)


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="1 ranks have acts, there are 2 stages"):
        prove(replace(plan("1f1b", 2), acts=((),)))
