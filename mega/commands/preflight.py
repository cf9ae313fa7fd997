"""`mega preflight`: check before a run that all hosts have the same software and are fast."""

from __future__ import annotations

from mega.core.bench.options import PreflightOptions


def run(preflight: PreflightOptions) -> int:
    """Measure every rank and every pair of hosts, and report slow ranks, slow links and different versions.

    Start this command in the same way as the run: with --nproc on one host, or once per rank under torchrun, mpirun or
    srun. Exit codes: 0 if all hosts pass; 1 if one does not; 2 for a mistake.
    """
    from mega.core.files import check_folder
    from mega.core.processes.launch import launch
    from mega.core.processes.world import ranks, world_from_env

    world = world_from_env()
    size = ranks(world, preflight.nproc)
    if preflight.save is not None:
        check_folder("--save", preflight.save, preflight.save)
    from mega.core.bench.preflight import preflight as measure

    if world.source == "alone" and size > 1:
        return launch(size, measure, preflight)
    return measure(preflight)
