"""The line about an exchange that some ranks have called, from dumps that torch's recorder wrote: rank 1 of three does
not call the fifth all-reduce of its group."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from mega.core.parallel.mesh import Groups
from mega.core.processes.flight import CalledExchange, missing, newest, own_exchanges
from mega.core.processes.pool import Pool
from mega.core.processes.position import Position

RECORDED = Path(__file__).parent.parent / "golden" / "flight"


def recorded() -> dict[int, tuple[CalledExchange, ...]]:
    dumps = {rank: json.loads((RECORDED / f"rank-{rank}.json").read_text()) for rank in range(3)}
    return {rank: tuple(newest(dump)) for rank, dump in dumps.items()}


def test_a_recorded_standstill_names_the_rank_that_did_not_call() -> None:
    called = "exchange 5 of group 1 (all_reduce of [5]) was called by ranks 0, 2"
    assert missing(recorded()) == f"{called}, and not by rank 1"
    answers = {rank: each for rank, each in recorded().items() if rank != 1}
    assert missing(answers, (1,)) == f"{called}; rank 1 does not say"
    assert missing({1: recorded()[1]}) == "", "nobody has called what is missing"


def test_an_answer_carries_the_exchanges() -> None:
    position = Position(exchanges=recorded()[0])
    assert Position.loads(position.dumps()) == position


def own(groups: Groups, rank: int) -> list[str]:
    """Job: one more exchange, and what this rank says of the newest ones."""
    dist.all_reduce(torch.ones(7))
    return [each.what for each in own_exchanges()]


def test_a_rank_knows_its_own(pool: Pool) -> None:
    for found in pool.run(own, world=2):
        assert "all_reduce of [7]" in found
