"""Prompts continued by several replicas of a model, again and again."""

from __future__ import annotations

import torch.distributed as dist

from mega.core.device import Device
from mega.core.inference.loading.load import load_stages, open_model
from mega.core.inference.relay import relay_of
from mega.core.inference.request import Sampling
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.pool import Pool
from mega.core.tasks.continuation import continue_prompts
from tests.inference.test_engine import expected_cases, stories

TOKENS = 5


def job(groups: Groups, rank: int) -> tuple[list[list[list[int]]], int]:
    """Answers to two batches of prompts, and how many process groups the second one has made."""
    mesh, device = Mesh(rank, tp=2, dp=2, groups=groups), Device.choose("cpu")
    (stage,) = load_stages(open_model(stories()), mesh, device)
    relay, found, made = relay_of(mesh), [], [0]
    prompts = [request.prompt for request, _ in expected_cases()]
    for _ in range(2):
        how = [Sampling(temperature=0.0)] * len(prompts)
        ends: frozenset[int] = frozenset()
        found.append(
            continue_prompts(
                *(stage, mesh, device, prompts, TOKENS, how),
                ends=ends,
                stop=lambda ids: len(ids) == TOKENS - 1,
                known=512,
                relay=relay,
            )
        )
        made.append(len(dist.distributed_c10d._world.pg_map))
    return found, made[2] - made[1]


def test_batches_share_their_process_groups(pool: Pool) -> None:
    expected = [ids[: TOKENS - 1] for _, ids in expected_cases()]  # first: a rank cannot skip
    ranks = pool.run(job, world=4)
    for found, made in ranks:
        assert made == 0
        assert [[ids[:2] for ids in batch] for batch in found] == [[ids[:2] for ids in expected]] * 2
