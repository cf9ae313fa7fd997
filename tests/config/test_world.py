"""Which rank this is, from torchrun's variables, from srun's, and alone."""

from __future__ import annotations

import pytest

from mega.core.config.world import World, is_first_rank, ranks, world_from_env

TORCHRUN = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, World(0, 1, 0, 1, "alone")),
        (TORCHRUN, World(5, 8, 1, 4, "torchrun")),
        (TORCHRUN | SRUN, World(5, 8, 1, 4, "torchrun")),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, World(5, 8, 1, 4, "slurm")),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, World(5, 8, 1, 3, "slurm")),
        (SRUN | {"SLURM_NTASKS_PER_NODE": "4"}, World(5, 8, 1, 4, "slurm")),
        ({"SLURM_NTASKS": "8"}, World(0, 1, 0, 1, "alone")),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, World(0, 1, 0, 1, "alone")),
    ],
)
def test_who_am_i(environ: dict[str, str], world: World) -> None:
    assert world_from_env(environ) == world


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "8"}, "rank 8: must be 0 to 7 in a world of 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4: must be 0 to 3"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE 'many': must be a whole number"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "SLURM_STEP_TASKS_PER_NODE '4.y2.': must list"),
    ],
)
def test_a_launcher_that_contradicts_itself(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world_from_env(environ)


def test_how_many_ranks() -> None:
    assert ranks(world_from_env({}), None) == 1
    assert ranks(world_from_env({}), 4) == 4
    assert ranks(world_from_env(TORCHRUN), None) == 8
    assert ranks(world_from_env(TORCHRUN), 4) == 8
    assert ranks(world_from_env({}), None, dry=128) == 128
    with pytest.raises(ValueError, match="--nproc 8: torchrun has started 4 ranks on this host already"):
        ranks(world_from_env(TORCHRUN), 8)


def test_who_speaks() -> None:
    assert is_first_rank({}) and is_first_rank(SRUN | {"SLURM_PROCID": "0"})
    assert not is_first_rank(TORCHRUN) and not is_first_rank(SRUN)
