"""Which rank this is, from torchrun's variables, from mpirun's, from srun's, from several of them, and alone."""

from __future__ import annotations

import pytest

from mega.core.processes.world import MEETING_FILE, World, check_address, is_first_rank, ranks, world_from_env

TORCHRUN = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
BATCH = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
"""Of a batch script, before any srun."""
NAMED = {"RANK": "5", "WORLD_SIZE": "8"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
MPICH = PMI | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
CRAY = PMI | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}


TORCH_WORLD = World(5, 8, 1, 4, "torchrun")


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
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, World(0, 1, 0, 1, "alone")),  # a shell of salloc
        (OPEN_MPI, World(5, 8, 1, 4, "mpirun")),
        (MPICH, World(5, 8, 1, 4, "mpirun")),
        (CRAY, World(5, 8, 1, 4, "mpirun")),
        (PMI, World(5, 8, 5, 8, "mpirun")),
        (PMI | SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, World(5, 8, 1, 4, "slurm")),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, World(0, 1, 0, 1, "alone")),
        (NAMED | OPEN_MPI, World(5, 8, 1, 4, "mpirun")),
        ({"WORLD_SIZE": "8"} | OPEN_MPI, World(5, 8, 1, 4, "mpirun")),
        (BATCH | OPEN_MPI, World(5, 8, 1, 4, "mpirun")),
        (BATCH, World(0, 1, 0, 1, "alone")),
        (BATCH | TORCHRUN, World(5, 8, 1, 4, "torchrun")),
        (BATCH | {"SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "4"}, World(0, 8, 0, 4, "slurm")),
        (SRUN | {"SLURM_NTASKS": "6", "SLURM_PROCID": "1"} | OPEN_MPI, World(5, 8, 1, 4, "mpirun")),
        (TORCHRUN | ELASTIC | SRUN | {"SLURM_PROCID": "3"}, World(5, 8, 1, 4, "torchrun")),
        (TORCHRUN | ELASTIC | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, TORCH_WORLD),
        (TORCHRUN | {MEETING_FILE: "x"} | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}, TORCH_WORLD),
        ({"WORLD_SIZE": "1", "RANK": "0"} | SRUN, World(0, 1, 0, 1, "torchrun")),
    ],
)
def test_who_am_i(environ: dict[str, str], world: World) -> None:
    assert world_from_env(environ) == world


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK 8: must be 0 to 7, with WORLD_SIZE 8"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK 5: must be 0 to 1, with WORLD_SIZE 2"),
        (TORCHRUN | {"RANK": ""}, "RANK '': must be a whole number"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE '': must be a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE 0: must be at least 1"),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE 999999999999999999: must be at least 1"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK 4: must be 0 to 3, with LOCAL_WORLD_SIZE 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE 9: must be 1 to 8, with WORLD_SIZE 8"),
        ({"WORLD_SIZE": "4"}, "RANK is not set, though WORLD_SIZE '4' is"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, though RANK '0' is"),
        ({"RANK": "0"} | OPEN_MPI, "WORLD_SIZE is not set, though RANK '0' is"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set, though PMI_RANK '0' is"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK '3': names a rank, but no variable says of how many"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_RANK 8: must be 0 to 7"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "OMPI_COMM_WORLD_LOCAL_RANK '-1': must be a whole number"),
        (
            NAMED | OPEN_MPI | {"RANK": "0"},
            "RANK 0 of WORLD_SIZE 8: contradicts OMPI_COMM_WORLD_RANK 5 of OMPI_COMM_WORLD_SIZE 8; unset",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"} | OPEN_MPI, "RANK 0 of WORLD_SIZE 1: contradicts OMPI_COMM_WORLD_RANK 5 of"),
        (NAMED | SRUN | {"SLURM_PROCID": "3"}, "RANK 5 of WORLD_SIZE 8: contradicts SLURM_PROCID 3 of SLURM_NTASKS 8"),
        (MPICH | OPEN_MPI | {"PMI_RANK": "4"}, "OMPI_COMM_WORLD_RANK 5 of .* contradicts PMI_RANK 4 of PMI_SIZE 8"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE 'many': must be a whole number"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "SLURM_STEP_TASKS_PER_NODE '4.y2.': must list"),
    ],
)
def test_a_launcher_that_contradicts_itself(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world_from_env(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "MASTER_ADDR is not set: must be the first rank's host, where 8 ranks meet; mpirun takes -x MASTER_ADDR="),
        ({"MASTER_ADDR": " ", "MASTER_PORT": "1"}, "MASTER_ADDR ' ': must be the first rank's host"),
        ({"MASTER_ADDR": "a"}, "MASTER_PORT is not set: must be a free port on the first rank's host"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT 'x': must be a whole number"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT 65536: must be 1 to 65535$"),
    ],
)
def test_where_ranks_meet(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_address(World(5, 8, 1, 4, "mpirun"), environ)
    check_address(World(5, 8, 1, 4, "mpirun"), {"MASTER_ADDR": "node003", "MASTER_PORT": "6000"})


def test_how_many_ranks() -> None:
    assert ranks(world_from_env({}), None) == 1
    assert ranks(world_from_env({}), 4) == 4
    assert ranks(world_from_env(TORCHRUN), None) == 8
    assert ranks(world_from_env(TORCHRUN), 4) == 8
    assert ranks(world_from_env({}), None, dry=128) == 128
    with pytest.raises(ValueError, match="--nproc 8: torchrun has started 4 ranks on this host already"):
        ranks(world_from_env(TORCHRUN), 8)


def test_a_batch_script_is_no_rank() -> None:
    world = world_from_env(BATCH)
    with pytest.raises(ValueError, match="SLURM_PROCID 0 of SLURM_NTASKS 8: this is the batch script itself"):
        ranks(world, None, environ=BATCH)
    assert ranks(world, 4, environ=BATCH) == 4 and ranks(world, None, dry=8, environ=BATCH) == 8
    assert ranks(world, None, environ=BATCH | {"SLURM_NTASKS": "1"}) == 1


def test_who_speaks() -> None:
    assert is_first_rank({}) and is_first_rank(SRUN | {"SLURM_PROCID": "0"})
    assert not any(map(is_first_rank, (TORCHRUN, SRUN, OPEN_MPI, MPICH)))
