"""`mega pretrain`: check everything, then train, on as many ranks as the launcher or --nproc gives."""

from __future__ import annotations

import sys

from mega.core.config.run import RunConfig
from mega.core.config.world import is_first_rank, ranks, world_from_env


def run(run: RunConfig) -> int:
    """Train a model from scratch, or resume from a checkpoint.

    Alone with --nproc, under torchrun, mpirun or a bare srun. Every flag also answers to its Megatron-LM
    spelling; --model, then --config, then flags define the run, each above the one before.

    Exit codes: 0 at the end, or where --exit-interval or --exit-minutes ended it; 1 for a failure, 2 for a mistake;
    130, 143, 138, 129 where Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP stopped it, after saving.
    """
    from mega.core.training.inputs import open_inputs, resolve_run

    world = world_from_env()
    size = ranks(world, run.runtime.nproc, run.runtime.world)
    resolved = resolve_run(run, size)  # in a moment, before anything heavy is imported
    if run.runtime.dry_run:
        if is_first_rank():
            from mega.core.training.dry_run import dry_run

            dry_run(open_inputs(resolved), size)
        return 0
    if world.source == "alone" and size > 1:
        open_inputs(resolved)  # a mistake in a file is reported once, before any rank starts
        from mega.core.estimate.host import crowded

        for line in crowded(resolved.run, size):
            print(f"mega: {line}", file=sys.stderr)
        from mega.core.parallel.launch import launch
        from mega.core.training.start import pretrain

        return launch(size, pretrain, resolved)
    from mega.core.training.start import pretrain

    return pretrain(resolved)
