"""Memory and step time of a run before it is started, as `mega memory-estimate` prints them. No device is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mega.api.config import with_options
from mega.core.config.run import Options, RunConfig, flag_of, updated, value_of
from mega.core.processes.world import ranks, world_from_env

if TYPE_CHECKING:
    from mega.core.estimate.hardware import Hardware
    from mega.core.estimate.memory import Memory
    from mega.core.estimate.search import Found
    from mega.core.estimate.steptime import StepTime


@dataclass(frozen=True)
class RunEstimate:
    """What a run needs on each rank, and on a device how fast it is."""

    run: RunConfig
    """The resolved run; after a search with the layout that was found."""
    world: int
    """Ranks."""
    memory: Memory
    """Of every pipeline stage, in bytes."""
    device: Hardware | None
    """What was planned for; None where no `gpu` was given."""
    found: Found | None = None
    """Of a search: the best layouts."""
    start: tuple[str, ...] = ()
    """Of a search: command lines that start the run."""
    missing: tuple[str, ...] = ()
    """Of a search: flags that those lines lack, since they were not given."""

    @property
    def peak_gib(self) -> float:
        """The most that is allocated on any rank, in GiB."""
        return self.memory.worst.peak / 2**30

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.memory.parameters

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory, with the allocator's slack and the communicators; None without one."""
        device = self.device
        return None if device is None else self.memory.needed(device.communicator) <= device.memory

    @cached_property
    def step(self) -> StepTime | None:
        """How long a step takes: its seconds, MFU, bubble and other parts; None without a device."""
        from mega.core.estimate.steptime import step_time

        return None if self.device is None else step_time(self.run, self.world, self.device)

    @property
    def seconds(self) -> float | None:
        """Of a step; None without a device."""
        return None if self.step is None else self.step.seconds


def estimate(
    run: Options, *, gpu: str | None = None, gpus: int | None = None, fit: str | None = None, **options: object
) -> RunEstimate:
    """Estimate what a run needs: memory as the trainer allocates it, on `world` ranks, and with a `gpu` a step's time.

    run: of `mega.config`; keywords are above it, such as `world=64`. gpu: a device such as "h100", or a file that `mega
    bench --calibrate` has written. gpus: search the layout that is fastest on as many of them; fit: the same, as in
    "8xh100".

    Errors: ValueError naming the option, its value and the rule.

    >>> from mega import config
    >>> found = estimate(config("tiny-gpt", vocab=512, micro_batch=1, steps=1, lr=1e-3, mock_data=True), world=2)
    >>> found.world, found.peak_gib < 1, found.seconds
    (2, True, None)
    """
    chosen = with_options(run, options)
    if fit is not None or gpus is not None:
        return searched(chosen, fit, gpus, gpu)
    from mega.core.estimate.hardware import hardware

    device = None if gpu is None else hardware(gpu)
    return estimated(*planned(chosen), device)


def estimated(run: RunConfig, world: int, device: Hardware | None) -> RunEstimate:
    """Of a resolved run."""
    from mega.core.estimate.memory import memory

    return RunEstimate(run, world, memory(run, world), device)


def in_bf16(answer: RunEstimate) -> RunEstimate | None:
    """The same run and layout in bf16, where it is in fp32, which is the default and seldom meant on a GPU."""
    if answer.run.precision.dtype != "fp32":
        return None
    from mega.core.config.resolve import variant

    return estimated(variant(answer.run, {"dtype": "bf16"}), answer.world, answer.device)


def planned(options: Options) -> tuple[RunConfig, int]:
    """The run as its ranks would resolve it, and their number. Errors: ValueError, as of a dry run."""
    # How often a step waits for a save is part of the estimate; where to is not.
    place = options.checkpoint.save
    nowhere = place is None and options.checkpoint.save_interval is not None
    options = updated(options, {"dry_run": True, "save": "." if nowhere else place})
    world = ranks(world_from_env(), options.runtime.nproc, options.runtime.world)
    from mega.core.config.resolve import variant
    from mega.core.training.start.inputs import resolve_run

    return variant(resolve_run(options, world).run, {"save": place}), world


def searched(options: Options, fit: str | None, gpus: int | None, gpu: str | None) -> RunEstimate:
    """The layout that is predicted fastest of those that fit. Errors: ValueError naming the flag."""
    from mega.core.estimate.search import any_layout, cluster, command, search, without_layout
    from mega.core.estimate.show import launch_lines

    count, device = cluster(fit, gpus, gpu)
    asked = f"--gpus {count}" if fit is None else f"--fit {fit}"
    for name in ("world", "nproc"):
        if (typed := value_of(options, name)) not in (None, count):
            raise ValueError(f"{flag_of(name)} {typed}: excludes {asked}, which plans {count} ranks; leave it out")
    options = without_layout(options)
    # One rank has no tensor axis to overlap, and other sizes of fp8 GEMMs than most layouts; every other mistake that
    # all layouts share is reported here.
    one, _ = planned(updated(any_layout(options, 1), {"tp_overlap": False, "fp8": False}))
    sized = updated(options, {"vocab": one.model.vocab})
    found = search(sized, count, device)
    if not found.candidates:
        raise ValueError(
            f"{asked}: no layout fits into {device.memory:.1f} GiB; the smallest of {found.tried} "
            f"needs {found.smallest:.1f} (valid: more devices, or a smaller model)"
        )
    best = found.candidates[0]
    start = launch_lines(command(best, options), count, device.node, best.run.parallel.tp)
    missing = _missing(updated(sized, best.options), count)
    return RunEstimate(best.run, count, best.memory, device, found, tuple(start), missing)


def _missing(options: Options, world: int) -> tuple[str, ...]:
    """Flags without which `pretrain` refuses to start these options."""
    from mega.core.config.check import check

    try:
        check(updated(options, {"dry_run": False, "world": None}), world)
    except ValueError as error:
        lines = (line.partition(" is missing: ") for line in str(error).splitlines())
        return tuple(flag for flag, missing, _ in lines if missing)
    return ()
