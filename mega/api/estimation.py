"""Estimate the memory and step time of a run without starting it, as `mega memory-estimate` does. No device is
needed."""

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
    from mega.core.estimate.search import SearchResult
    from mega.core.estimate.steptime import StepTime


@dataclass(frozen=True)
class RunEstimate:
    """The estimated memory of a run and, if a device is given, the estimated time of a step."""

    run: RunConfig
    """The resolved run. After a search, it has the best layout."""
    world: int
    """Number of ranks."""
    memory: Memory
    """Memory of each pipeline stage, in bytes."""
    device: Hardware | None
    """The device for which the run was planned; None if no device is given."""
    found: SearchResult | None = None
    """The best layouts; None if there was no search."""
    start: tuple[str, ...] = ()
    """Command lines that start the run with the best layout; empty if there was no search."""
    missing: tuple[str, ...] = ()
    """Required flags that the user must add to the command lines in `start`; empty if there was no search."""

    @property
    def peak_gib(self) -> float:
        """Peak memory in GiB, the maximum over all ranks."""
        return self.memory.worst.peak / 2**30

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.memory.parameters

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory, including the allocator's slack and the communicators; None if no
        device is given."""
        device = self.device
        return None if device is None else self.memory.needed(device.communicator) <= device.memory

    @cached_property
    def step(self) -> StepTime | None:
        """Estimated time of a step and its components, with MFU and pipeline bubble; None if no device is given."""
        from mega.core.estimate.steptime import step_time

        return None if self.device is None else step_time(self.run, self.world, self.device)

    @property
    def seconds(self) -> float | None:
        """Estimated time of a step in seconds; None if no device is given."""
        return None if self.step is None else self.step.seconds


def estimate(
    run: Options, *, gpu: str | None = None, gpus: int | None = None, fit: str | None = None, **options: object
) -> RunEstimate:
    """Estimate the memory that the trainer allocates on `world` ranks and, if `gpu` is given, the time of a step.

    run: options from `mega.config`; keyword arguments such as `world=64` override them. gpu: a device such as "h100",
    or a file written by `mega bench --calibrate`. gpus: number of devices on which the fastest layout is searched for.
    fit: number and kind of devices for this search in one string, such as "8xh100".

    Errors: ValueError naming the option, its value and the rule.

    >>> from mega import config
    >>> found = estimate(config("tiny-gpt", vocab=512, micro_batch=1, steps=1, lr=1e-3, mock_data=True), world=2)
    >>> found.world, found.peak_gib < 1, found.seconds
    (2, True, None)
    """
    overridden = with_options(run, options)
    if fit is not None or gpus is not None:
        return searched(overridden, fit, gpus, gpu)
    from mega.core.estimate.hardware import hardware

    device = None if gpu is None else hardware(gpu)
    return estimated(*planned(overridden), device)


def estimated(run: RunConfig, world: int, device: Hardware | None) -> RunEstimate:
    """Return the estimate for a resolved run."""
    from mega.core.estimate.memory import memory
    from mega.core.estimate.operations import with_overlap

    if device is not None:
        run = with_overlap(run, device)
    return RunEstimate(run, world, memory(run, world), device)


def in_bf16(answer: RunEstimate) -> RunEstimate | None:
    """Return the estimate for the same run and layout in bf16; None if the run is not in fp32. It is shown for
    comparison, because the default dtype, fp32, is rarely intended on a GPU."""
    if answer.run.precision.dtype != "fp32":
        return None
    from mega.core.config.resolve import variant

    return estimated(variant(answer.run, {"dtype": "bf16"}), answer.world, answer.device)


def planned(options: Options) -> tuple[RunConfig, int]:
    """Return a pair: the run as its ranks would resolve it, and the number of ranks. Errors: ValueError as in a dry
    run."""
    # The save interval affects the estimate, so --save-interval is allowed without --save.
    save = options.checkpoint.save
    nowhere = save is None and options.checkpoint.save_interval is not None
    options = updated(options, {"dry_run": True, "save": "." if nowhere else save})
    world = ranks(world_from_env(), options.runtime.nproc, options.runtime.world)
    from mega.core.config.resolve import variant
    from mega.core.training.start.inputs import resolve_run

    return variant(resolve_run(options, world).run, {"save": save}), world


def searched(options: Options, fit: str | None, gpus: int | None, gpu: str | None) -> RunEstimate:
    """Search for the layout with the fastest predicted step among the layouts that fit into memory. Errors: ValueError
    naming the flag."""
    from mega.core.estimate.search import any_layout, cluster, command, search, without_layout
    from mega.core.estimate.show import launch_lines
    from mega.core.training.start.inputs import with_checkpoint_model

    count, device = cluster(fit, gpus, gpu)
    flag = f"--gpus {count}" if fit is None else f"--fit {fit}"
    for name in ("world", "nproc"):
        if (typed := value_of(options, name)) not in (None, count):
            raise ValueError(f"{flag_of(name)} {typed}: excludes {flag}, which plans {count} ranks; leave it out")
    options = without_layout(options)
    # Checking the run on one rank reports mistakes that are common to all layouts. For this check, `tp_overlap` is
    # disabled because one rank has no tensor parallelism, and `fp8` because its GEMM sizes differ from those in most
    # layouts.
    disabled = {"tp_overlap": False, **({"fp8": False, "fp8_scaling": "tensor"} if options.precision.fp8 else {})}
    smallest, _ = planned(updated(any_layout(options, 1), disabled))
    sized = updated(with_checkpoint_model(options, []), {"vocab": smallest.model.vocab})
    result = search(sized, count, device)
    if not result.candidates:
        raise ValueError(
            f"{flag}: no layout fits into {device.memory:.1f} GiB; the smallest of {result.tried} "
            f"needs {result.smallest:.1f} (valid: more devices, or a smaller model)"
        )
    best = result.candidates[0]
    start = launch_lines(command(best, options), count, device.node, best.run.parallel.tp)
    missing = _missing(updated(sized, best.options), count)
    return RunEstimate(best.run, count, best.memory, device, result, tuple(start), missing)


def _missing(options: Options, world: int) -> tuple[str, ...]:
    """Return the required flags of `pretrain` that are missing in `options`."""
    from mega.core.config.check import check

    weights = ("--load",) if options.model.lora_rank and options.checkpoint.load is None else ()
    try:
        check(updated(options, {"dry_run": False, "world": None}), world)
    except ValueError as error:
        lines = (line.partition(" is missing: ") for line in str(error).splitlines())
        return (*weights, *(flag for flag, missing, _ in lines if missing))
    return weights
