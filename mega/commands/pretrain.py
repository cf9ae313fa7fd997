"""`mega pretrain`: check all options and files, then train on the ranks of the launcher or on --nproc local ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mega.api.training import resolved as resolved_run
from mega.core.config.run import Options, RunConfig, updated
from mega.core.processes.world import is_first_rank, note, ranks, supervised_ranks, world_from_env

if TYPE_CHECKING:
    from mega.core.training.start.inputs import ResolvedRun


def run(options: Options) -> int:
    """Train a model from scratch, or resume from a checkpoint.

    Run this command directly (with --nproc for several local ranks), or under torchrun, mpirun or srun. Flags may also
    be given in Megatron-LM's spelling. --model, --config and flags define the run: --config overrides --model, and
    flags override both.

    Exit codes: 0 at the end, or when --exit-interval or --exit-minutes ended the run; 1 for a failure, 2 for a mistake;
    130, 143, 138, 129 when Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP stopped it, after saving.
    """
    from mega.core.training.metrics.output import report_if_slow
    from mega.core.training.start.inputs import open_inputs

    world, runtime, supervision = world_from_env(), options.runtime, options.supervision
    supervised = bool(supervision.max_restarts or supervision.hosts) and runtime.world is None
    if supervised:
        size = supervised_ranks(world, runtime.nproc or 1, supervision.hosts)
    else:
        size = ranks(world, runtime.nproc, runtime.world)
    resolved = resolved_run(options, size, note)  # fast, because no heavy module has been imported yet
    if runtime.dry_run:
        if is_first_rank():
            from mega.core.training.start.dry_run import dry_run

            with report_if_slow("opening tokenizer and data"):
                inputs = open_inputs(resolved)
            dry_run(inputs, size)
        return 0
    if supervised or (world.source == "alone" and size > 1):
        with report_if_slow("opening tokenizer and data"):
            inputs = open_inputs(resolved)  # reports a mistake in a file once, before any rank starts
        _report_shortage(resolved.run, runtime.nproc or 1)
        if supervised:
            from mega.core.training.start.equal import alike

            return _supervise(options, resolved, alike(options, inputs), size)
        from mega.core.processes.launch import launch
        from mega.core.training.start.rank import pretrain

        return launch(size, pretrain, resolved)
    if world.source == "alone":
        _report_shortage(resolved.run, 1)
    from mega.core.training.start.rank import pretrain

    return pretrain(resolved)


def _report_shortage(run: RunConfig, local_ranks: int) -> None:
    """Report on stderr which resources of this host are too small, before memory is allocated."""
    from mega.core.estimate.host import resource_warnings

    for line in resource_warnings(run, local_ranks):
        print(f"mega: {line}", file=sys.stderr, flush=True)


def _supervise(options: Options, resolved: ResolvedRun, alike: Mapping[str, str], size: int) -> int:
    """Run this host's ranks, and restart them after a transient failure. alike: values that must be equal on all
    hosts."""
    from mega.core.checkpoint.own.store import store_at
    from mega.core.processes.hosts import supervise_hosts
    from mega.core.processes.restarts import Job, supervise
    from mega.core.training.start.rank import pretrain

    save, nproc, supervision = options.checkpoint.save, options.runtime.nproc or 1, options.supervision
    resumed = resolved
    if save is not None:  # a restart loads the run's checkpoint, including optimizer state, even with --no-load-optim
        resuming = updated(options, {"resume": "auto", "load_optim": True})
        resumed = resolved_run(resuming, size, note)

    newest = [max(store_at(save).steps(), default=0)] if save is not None else [0]

    def saved() -> int:
        with contextlib.suppress(OSError, ValueError):  # the store may be temporarily unreachable
            newest.extend(store_at(save).steps()[-1:] if save is not None else ())
        return newest[-1]

    args, copies = lambda resumes: (resumed if resumes else resolved,), bool(supervision.peer_copy_interval)
    job = Job(pretrain, args, saved, copies, alike)
    if supervision.hosts is None:
        return supervise(nproc, supervision.max_restarts, job)
    minutes = options.runtime.timeout_minutes
    return supervise_hosts(supervision.hosts, nproc, supervision.max_restarts, minutes, job)
