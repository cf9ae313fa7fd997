"""Length, bubble and live microbatches: exact formulas where they are known, an oracle where they are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega.core.plan import Compute, Costs, Plan, lower_bound, plan, simulate
from tests.plan.cases import SPLIT, WHOLE, computes, plans

costs = st.floats(0.1, 4.0)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 24), costs, costs, st.booleans())
def test_bubble_of_gpipe_and_1f1b(kind: str, p: int, m: int, forward: float, backward: float, overlap: bool) -> None:
    """For any ratio of forward and backward, and even under blocking sends."""
    result = simulate(plan(kind, p, 1, m), Costs(forward, backward, 0), overlap)
    assert result.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)


@given(st.integers(1, 8), st.integers(2, 4), st.integers(0, 20), costs, costs)
def test_bubble_of_interleaved(p: int, v: int, more: int, forward: float, backward: float) -> None:
    """For any ratio of forward and backward, and any m >= p: groups need not divide."""
    m = p + more
    result = simulate(plan("interleaved", p, v, m), Costs(forward, backward, 0))
    assert result.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-9)


@given(st.integers(1, 8), st.integers(0, 20), st.booleans())
def test_bubble_of_zero_bubble(p: int, more: int, overlap: bool) -> None:
    m = p + more
    result = simulate(plan("zb-h1", p, 1, m), SPLIT, overlap)
    assert result.bubble == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-9)


@given(plans())
def test_blocking_exchanges_cost_nothing_where_all_acts_are_equal(made: Plan) -> None:
    equal = SPLIT if made.kind == "zb-h1" else WHOLE
    assert simulate(made, equal, overlap=False).makespan == simulate(made, equal).makespan


@given(plans())
def test_live_microbatches_are_as_promised(made: Plan) -> None:
    p, v, m = made.stages, made.chunks, made.microbatches
    for rank, live in enumerate(simulate(made).live):
        group = -(-m // max(1, m // p))
        promised = {
            "gpipe": m,
            "1f1b": min(p - rank, m),
            "zb-h1": min(p, m),
            "interleaved": min(2 * (p - rank - 1) + (v - 1) * group + 1, v * m),
            "forward": 1,
        }[made.kind]
        assert live == promised


def longest_path(made: Plan, costs: Costs) -> float:
    """The length by relaxation: every compute after its predecessor on its rank and after its cargo."""
    p, last = made.stages, made.stages * made.chunks - 1
    orders = [computes(made, rank) for rank in range(p)]
    ends: dict[tuple[str, int, int], float] = {}
    done = [0] * p
    while any(done[rank] < len(orders[rank]) for rank in range(p)):
        for rank in range(p):
            if done[rank] == len(orders[rank]):
                continue
            act = orders[rank][done[rank]]
            stage = act.chunk * p + rank
            cargo = {"F": stage - 1, "B": stage + 1, "W": -1}[act.kind]
            key = (act.kind, act.microbatch, cargo)
            if 0 <= cargo <= last and key not in ends:
                continue
            previous = orders[rank][done[rank] - 1] if done[rank] else None
            before = ends[previous.kind, previous.microbatch, previous.chunk * p + rank] if previous else 0.0
            start = max(before, ends.get(key, 0.0))
            ends[act.kind, act.microbatch, stage] = start + costs.of(act, stage, made.kind == "zb-h1")
            done[rank] += 1
    return max(ends.values())


@given(plans(stages=5, microbatches=12), st.data())
def test_length_for_uneven_stages(made: Plan, data: st.DataObject) -> None:
    pieces = made.stages * made.chunks
    per_stage = st.lists(costs, min_size=pieces, max_size=pieces)
    uneven = Costs(data.draw(per_stage), data.draw(per_stage), data.draw(per_stage))
    result = simulate(made, uneven)
    assert result.makespan == pytest.approx(longest_path(made, uneven))
    assert result.makespan >= lower_bound(made, uneven) * (1 - 1e-12)
    assert simulate(made, uneven, overlap=False).makespan >= result.makespan * (1 - 1e-12)
    assert result.bubble == pytest.approx(1 - sum(result.busy) / made.stages / result.makespan)


@given(plans(), costs)
def test_the_lower_bound_holds_with_slow_transfers(made: Plan, transfer: float) -> None:
    slow = Costs(1, 1, 1, transfer)
    assert simulate(made, slow).makespan >= lower_bound(made, slow) * (1 - 1e-12)


@given(plans())
def test_equal_stages_and_enough_microbatches_reach_the_lower_bound(made: Plan) -> None:
    if made.microbatches >= made.stages:
        assert simulate(made).makespan == pytest.approx(lower_bound(made))


def test_transfers_take_their_time() -> None:
    """Two stages, one microbatch: F, cargo, F, B (2), cargo, B (2)."""
    result = simulate(plan("1f1b", 2), Costs(1, 1, 1, transfer=0.25))
    assert result.makespan == 1 + 0.25 + 1 + 2 + 0.25 + 2
    assert [(span.act, span.start, span.end) for span in result.rows[1]] == [
        (Compute("F", 0, 0), 1.25, 2.25),
        (Compute("B", 0, 0), 2.25, 4.25),
    ]


@pytest.mark.parametrize(("overlap", "second_forward"), [(True, 1.0), (False, 1.25)])
def test_a_transfer_starts_when_both_sides_are_there(overlap: bool, second_forward: float) -> None:
    """F1 leaves rank 0 at 2 and finds its receiver, busy with F0 and B0, at 4.25."""
    result = simulate(plan("1f1b", 2, 1, 2), Costs(1, 1, 1, transfer=0.25), overlap)
    assert [span.start for span in result.rows[0]] == [0, second_forward, 4.5, 7.75]
    assert [span.start for span in result.rows[1]] == [1.25, 2.25, 4.5, 5.5]
    assert result.makespan == 9.75


def test_splitting_the_backward_shortens_the_step() -> None:
    whole, split = simulate(plan("1f1b", 4, 1, 8)), simulate(plan("zb-h1", 4, 1, 8))
    assert sum(whole.busy) == sum(split.busy)
    assert (whole.makespan, split.makespan) == (33, 27)
    assert max(split.live) == max(whole.live)
