"""The change test of schedules: one that the project does not know is one file, is proven, and trains one model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.toml import unfit
from mega.core.parallel.mesh import Groups
from mega.core.plan import Costs, plan, prove, simulate
from mega.core.plan.draw import draw_text
from mega.core.processes.pool import Pool
from mega.core.proof.layouts import LR
from mega.core.proof.parity import compare, snapshots, within
from tests.support import toy_schedule
from tests.support.runs import small_run
from tests.support.toy_schedule import NAME


def known(groups: Groups, rank: int, yes: bool) -> None:
    """Job of one rank: the schedule is registered in its process, or is no longer."""
    (toy_schedule.register if yes else toy_schedule.unregister)()


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    assert unfit("parallel", "schedule", NAME) is not None
    toy_schedule.register()
    yield
    toy_schedule.unregister()


@pytest.mark.parametrize("stages", range(1, 6))
def test_it_is_proven_and_simulated(stages: int) -> None:
    for microbatches in range(1, 9):
        prove(plan(NAME, stages, 1, microbatches))
    made = simulate(plan(NAME, stages, 1, 8), Costs(1, 1, 0))
    assert made.bubble == pytest.approx((stages - 1) / (stages + 1)) and set(made.live) == {2}


def test_it_is_drawn() -> None:
    assert draw_text(simulate(plan(NAME, 2, 1, 4), Costs(1, 1, 0))).splitlines() == [
        "rank 0  F0 F1 ......B0 B1 F2 F3 ......B2 B3",
        "rank 1  ...F0 F1 B0 B1 ......F2 F3 B2 B3 ...",
        f"{NAME}: 2 stages, 1 chunks, 4 microbatches; length 12, bubble 33.3%, live microbatches 2",
    ]


def test_it_is_a_choice_and_held_to_the_rules() -> None:
    flags = {"micro_batch": 1, "steps": 4, "lr": 1e-3, "mock_data": True, "vocab": 100, "schedule": NAME, "pp": 2}
    assert unfit("parallel", "schedule", NAME) is None
    options = compose("tiny-gpt", flags=flags)
    check(options, 2)
    assert resolve(options, 2).parallel.schedule == NAME
    with pytest.raises(ValueError, match=r"^--chunks 2: needs --schedule interleaved"):
        check(compose("tiny-gpt", flags={**flags, "layers": 4, "chunks": 2}), 2)
    with pytest.raises(ValueError, match=rf"^--schedule {NAME} with --chunks 2: must be 1 \(several need"):
        plan(NAME, 2, 2, 4)


def test_training_is_one_ranks(pool: Pool) -> None:
    size = {"layers": 2, "global_batch": 5, "lr": LR["fp64"]}
    expected = snapshots(pool, small_run(**size), 1, (1, 3))
    pool.run(known, True)
    try:
        found = snapshots(pool, small_run(world=2, pp=2, schedule=NAME, **size), 2, (1, 3))
    finally:
        pool.run(known, False)
    for difference in compare("fp64", (1, 3), expected, found):
        assert within("fp64", difference), difference
