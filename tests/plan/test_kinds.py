"""The schedules against their papers and Megatron's golden numbers, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega.core.plan import Compute, Exchange, Plan, Transfer, plan
from tests.plan.cases import computes, plans


def warm_up(made: Plan, rank: int) -> int:
    """Forwards before the first pair of forward and backward."""
    return len(list(takewhile(lambda act: act.kind == "F", computes(made, rank)))) - 1


def test_1f1b_phases_of_four_stages_and_eight_microbatches() -> None:
    made = plan("1f1b", 4, microbatches=8)
    for rank, (warm, steady, cool) in enumerate([(3, 5, 3), (2, 6, 2), (1, 7, 1), (0, 8, 0)]):
        assert "".join(act.kind for act in computes(made, rank)) == "F" * warm + "FB" * steady + "B" * cool


def test_interleaved_phases_of_four_stages_two_chunks_and_eight_microbatches() -> None:
    made = plan("interleaved", 4, 2, 8)
    assert [warm_up(made, rank) for rank in range(4)] == [10, 8, 6, 4]
    for rank in range(4):
        assert [act.chunk for act in computes(made, rank, "F")] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
        assert [act.chunk for act in computes(made, rank, "B")] == [1, 1, 1, 1, 0, 0, 0, 0] * 2


@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 3))
def test_interleaved_order_is_megatrons_where_stages_divide_microbatches(p: int, v: int, groups: int) -> None:
    m = p * groups
    made = plan("interleaved", p, v, m)
    for rank in range(p):
        for kind in "FB":
            for k, act in enumerate(computes(made, rank, kind)):
                chunk = k % (p * v) // p
                assert act.chunk == (chunk if kind == "F" else v - 1 - chunk)
                assert act.microbatch == k // (p * v) * p + k % p
        assert warm_up(made, rank) == min((p - rank - 1) * 2 + (v - 1) * p, m * v - 1)


def test_zero_bubble_is_the_handcrafted_schedule() -> None:
    made = plan("zb-h1", 3, microbatches=4)
    drawn = [" ".join(f"{act.kind}{act.microbatch}" for act in computes(made, rank)) for rank in range(3)]
    assert drawn == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_steady_1f1b_pairs_its_exchanges_as_megatron_does() -> None:
    acts = plan("1f1b", 4, microbatches=8).acts[1]
    at = acts.index(Compute("F", 3, 0))
    assert acts[at + 1] == Exchange((Transfer("F", 3, 0, peer=2),), (Transfer("B", 1, 0, peer=2),))
    assert acts[at + 2] == Compute("B", 1, 0)
    assert acts[at + 3] == Exchange((Transfer("B", 1, 0, peer=0),), (Transfer("F", 4, 0, peer=0),))


def test_a_gradient_leaves_before_the_weight_gradient_is_computed() -> None:
    acts = plan("zb-h1", 4, microbatches=8).acts[2]
    at = acts.index(Compute("B", 5, 0))
    following = acts[at + 1]
    assert isinstance(following, Exchange) and Transfer("B", 5, 0, peer=1) in following.sends


def test_the_last_rank_hands_its_cargo_to_the_next_chunk_of_rank_zero() -> None:
    made = plan("forward", 2, 2, 2)
    sends = [t for act in made.acts[1] if isinstance(act, Exchange) for t in act.sends]
    recvs = [t for act in made.acts[0] if isinstance(act, Exchange) for t in act.recvs]
    assert sends == [Transfer("F", 0, 0, peer=0), Transfer("F", 1, 0, peer=0)]
    assert recvs == [Transfer("F", 0, 1, peer=1), Transfer("F", 1, 1, peer=1)]


@given(plans())
def test_gradients_are_summed_in_one_order_in_any_schedule(made: Plan) -> None:
    for rank in range(made.stages):
        for chunk in range(made.chunks):
            for kind in "BW":
                order = [act.microbatch for act in computes(made, rank, kind) if act.chunk == chunk]
                assert order == sorted(order)


@given(plans())
def test_one_stage_exchanges_nothing_and_no_exchange_is_empty(made: Plan) -> None:
    exchanges = [act for acts in made.acts for act in acts if isinstance(act, Exchange)]
    assert all(act.sends or act.recvs for act in exchanges)
    assert bool(exchanges) == (made.stages > 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dualpipe", 2), "--schedule dualpipe: must be one of 1f1b, gpipe, interleaved, zb-h1, forward"),
        (("1f1b", 0), "--pp 0: must be 1 or more"),
        (("1f1b", 2, 1, 0), "microbatches 0: must be 1 or more"),
        (("forward", 2, 0), "--chunks 0: must be 1 or more"),
        (("1f1b", 2, 2), "--schedule 1f1b with --chunks 2: must be 1"),
        (("gpipe", 2, 2), "--schedule gpipe with --chunks 2: must be 1"),
        (("zb-h1", 2, 3), "--schedule zb-h1 with --chunks 3: must be 1"),
        (("interleaved", 4, 1), "--schedule interleaved with --chunks 1: needs 2 or more"),
    ],
)
def test_refusals_name_flag_value_and_rule(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        plan(*arguments)  # type: ignore[arg-type]


def test_plans_need_neither_torch_nor_numpy() -> None:
    code = "import sys, mega.core.plan; sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
