"""`mega memory-estimate`: estimate memory and speed of a run from its flags."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mega.api.estimation import RunEstimate, estimated, in_bf16, planned, searched
from mega.command_line.options import without
from mega.core.config.option import changed
from mega.core.config.run import Options, RunConfig, entries, flag_of, options_with, value_of
from mega.core.config.unread import unread
from mega.core.estimate.options import EstimateOptions
from mega.core.inference.options import MTP, NGRAM, DecodingLayout, EngineOptions, RetrievalOptions
from mega.core.terminal import print_whole

if TYPE_CHECKING:
    from mega.core.bench.simulated import ServingSpeed
    from mega.core.config.sections import ModelConfig
    from mega.core.estimate.duration import Interruptions
    from mega.core.estimate.hardware import Hardware
    from mega.core.inference.request import Limits

SERVED = {"serve", "json", "gpu", "max_length"}
"""Options that have an effect with --serve."""

LOAD = {"prompt_tokens", "new_tokens", "rate"}
"""Options of the load for which a server's speed is predicted, with --serve and --gpu."""


def run(
    options: Options,
    estimate: EstimateOptions,
    engine: Annotated[EngineOptions, without("prefill_chunk", "batch_invariant", "cuda_graph")],
    retrieval: Annotated[RetrievalOptions, without("retro", "probes")],
) -> int:
    """Estimate the memory and speed of a run without starting it.

    Takes the flags of mega pretrain. Memory is estimated for each pipeline stage on --world ranks, as the trainer
    allocates it. --fit and --gpus search for the fastest layout. No device is needed.
    """
    if estimate.serve:
        for name in changed(estimate):
            if name not in SERVED | LOAD:
                raise ValueError(f"{_typed(name, getattr(estimate, name))}: excludes --serve, which trains nothing")
            if name in LOAD and estimate.gpu is None:
                raise ValueError(f"{_typed(name, getattr(estimate, name))}: needs --gpu, whose speed is predicted")
        return _serving(options, estimate, engine, replace(retrieval, retro=options.data.retro))
    for section in (engine, retrieval, estimate):
        for name in changed(section):
            if section is not estimate or name in {"max_length"} | LOAD:
                raise ValueError(f"{_typed(name, getattr(section, name))}: needs --serve")
    return _training(options, estimate)


def _training(options: Options, estimate: EstimateOptions) -> int:
    """Estimate a training run. Errors: ValueError naming the flag."""
    from mega.core.estimate import show
    from mega.core.estimate.hardware import hardware

    draw, draw_schedule, count = estimate.draw, estimate.draw_schedule, estimate.gpus
    on_terminal = str(draw_schedule) == "-"
    if estimate.json and on_terminal:
        raise ValueError("--draw-schedule -: excludes --json; valid: a .svg or .png file")
    _check_pictures({"--draw": draw, "--draw-schedule": None if on_terminal else draw_schedule})
    stops = _stops(options, estimate)
    if estimate.fit is not None or count is not None:
        answer = searched(options, estimate.fit, count, estimate.gpu)
        if replaced := _typed_layout(options):
            print(f"the search replaces {replaced}", file=sys.stderr)
    else:
        answer = _estimate_typed(options, hardware(estimate.gpu) if estimate.gpu is not None else None)
    if draw is not None:
        from mega.core.estimate import picture

        picture.draw(answer.memory, show.layout(answer.run, answer.world), draw)
    if draw_schedule is not None:
        _draw_schedule(answer.run, answer.world, answer.device, draw_schedule)
    if estimate.json:
        import json

        print_whole(json.dumps(_document(answer, estimate.megatron, stops)) + "\n")
    else:
        _report(answer, estimate.megatron, stops)
    return 0


def _typed(name: str, value: object) -> str:
    """Return a flag with its value, as typed on a command line.

    >>> _typed("fit", "8xh200"), _typed("megatron", True)
    ('--fit 8xh200', '--megatron')
    """
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"


def _serving(options: Options, estimate: EstimateOptions, engine: EngineOptions, retrieval: RetrievalOptions) -> int:
    """Print the capacity that `mega serve` would report at startup, for a device or for this machine's CPU; for a
    device also the predicted speed."""
    from mega.core.architecture import architecture
    from mega.core.architecture.words import size_words
    from mega.core.device import DTYPES, Device
    from mega.core.estimate.hardware import hardware
    from mega.core.inference.capacity import GIB, expected
    from mega.core.inference.start import guesses_itself
    from mega.core.retro.retrieve import device_bytes

    tp, pp, gpu, fp8_weights = options.parallel.tp, options.parallel.pp, estimate.gpu, engine.fp8_weights
    model = _served_model(options, engine, retrieval)
    if gpu is None:
        kind, room, device = "cpu", Device.choose("cpu").room(), None
    else:
        # Each rank has a tensor-parallel group, a group of all ranks, and links to the adjacent stages.
        device, groups = hardware(gpu), (tp > 1) + (tp * pp > 1) + 2 * (pp > 1)
        kind, room = "cuda", int((device.memory - groups * device.communicator) * GIB)
    size = DTYPES[options.precision.dtype].itemsize
    capacity_of = partial(
        expected,
        requests=engine.max_requests,
        cache_tokens=engine.cache_tokens,
        fp8_weights=fp8_weights,
        guesses=guesses_itself(engine),
        draft=_draft_model(engine, architecture(model).input.vocab),
    )
    capacity = capacity_of(model, size, room, kind, tp=tp, pp=pp, retriever=device_bytes(retrieval, kind))
    speed = None if device is None else _speed(options, estimate, engine, model, device, capacity.limits)
    if estimate.json:
        import dataclasses
        import json

        timed = {} if speed is None else {"speed": speed.fields()}
        document = {**dataclasses.asdict(capacity), "lines": capacity.lines(estimate.max_length), **timed}
        print_whole(json.dumps(document) + "\n")
    else:
        ranks = f"{tp * pp} {gpu or 'cpu'} rank{'s' * (tp * pp > 1)}"
        precision = options.precision.dtype + ", weights in fp8" * fp8_weights
        print(f"{size_words(architecture(model))}, {precision} on {ranks}")
        print("\n".join([*capacity.lines(estimate.max_length), *([] if speed is None else speed.lines())]))
        if model.retriever and retrieval.retro is None:
            print("not counted: the embedder and the vectors; give --retro and --embedder")
    return 0


def _speed(
    options: Options,
    estimate: EstimateOptions,
    engine: EngineOptions,
    model: ModelConfig,
    device: Hardware,
    limits: Limits,
) -> ServingSpeed | None:
    """Predict the speed of a server; None for a model with a retriever. Errors: ValueError if a request does not
    fit."""
    from mega.core.bench.load import Load
    from mega.core.bench.simulated import RATE_REQUESTS, speed
    from mega.core.estimate.serving import ServingTimes

    if model.retriever:
        if typed := sorted(LOAD.intersection(changed(estimate))):
            raise ValueError(f"{_typed(typed[0], getattr(estimate, typed[0]))}: excludes --retriever")
        return None
    # The default lengths are shortened to fit into a small model.
    longest = min(limits.longest, limits.cache)
    new = estimate.new_tokens or min(128, max(longest // 4, 1))
    prompt = estimate.prompt_tokens or max(min(512, longest - new), 1)
    served = ServingTimes(
        model, options.precision.dtype, device, options.parallel.tp, options.parallel.pp, engine.fp8_weights
    )
    return speed(served, limits, Load(estimate.rate or 0.0, RATE_REQUESTS, prompt, new))


def _served_model(options: Options, engine: EngineOptions, retrieval: RetrievalOptions) -> ModelConfig:
    """Return the model of a server. Errors: ValueError naming a flag that does not fit the model, or whose memory is
    not estimated."""
    from mega.core.config.check import check_ranges
    from mega.core.config.resolve import model_alone
    from mega.core.inference.retrieval import check_decoding
    from mega.core.inference.start import check_layout
    from mega.core.training.start.inputs import with_checkpoint_model

    options = with_checkpoint_model(options, [])
    check_ranges(options)
    model, tp, pp = model_alone(options), options.parallel.tp, options.parallel.pp
    engine.check_speculation()
    check_layout(model, tp, pp, engine, retrieves=model.retriever)
    if model.retriever:
        check_decoding(engine, DecodingLayout(tp=tp, pp=pp), ())
    elif retrieval.retro is not None:
        raise ValueError(f"--retro {retrieval.retro}: needs --retriever, a model that reads neighbours")
    return model


def _draft_model(engine: EngineOptions, vocab: int) -> ModelConfig | None:
    """Return the draft model of --speculate DIR; None if --speculate names no directory. vocab: number of ids of the
    served model. Errors: ValueError, for example if the vocabularies differ."""
    if engine.speculate in (None, NGRAM, MTP):
        return None
    from mega.core.inference.loading.load import open_model
    from mega.core.inference.start import check_draft

    draft = open_model(str(engine.speculate))
    check_draft(draft, str(engine.speculate), vocab, vocab)
    return draft.model


def _stops(options: Options, estimate: EstimateOptions) -> Interruptions:
    """Return the assumed times of saves, failures and restarts, from flags or defaults. Errors: ValueError naming a
    flag without effect."""
    from mega.core.estimate.duration import Interruptions

    mtbf, save, restart = estimate.mtbf, estimate.save_seconds, estimate.restart_seconds
    device = (estimate.gpu, estimate.fit, estimate.gpus) != (None, None, None)
    timed = device and (options.batch.steps, options.batch.samples) != (None, None)
    if mtbf is not None and not timed:
        raise ValueError(f"--mtbf {mtbf:g}: needs a device (--gpu or --fit), and --steps or --samples to train")
    if restart is not None and mtbf is None:
        raise ValueError(f"--restart-seconds {restart:g}: needs --mtbf, without which nothing fails")
    if save is not None and not (timed and (mtbf, options.checkpoint.save_interval) != (None, None)):
        raise ValueError(
            f"--save-seconds {save:g}: needs --mtbf or --save-interval, a device (--gpu or --fit), "
            "and --steps or --samples to train"
        )
    typed_values = {"mtbf_hours": mtbf, "save_seconds": save, "restart_seconds": restart}
    return Interruptions(**{name: value for name, value in typed_values.items() if value is not None})


def _check_pictures(asked: Mapping[str, Path | None]) -> None:
    """Check, before any computation, that each picture can be written and no two pictures have the same path. Errors:
    ValueError."""
    from importlib.util import find_spec

    flag_of_path: dict[Path, str] = {}
    for flag, path in asked.items():
        if path is None:
            continue
        if path.suffix not in (".svg", ".png"):
            raise ValueError(f"{flag} {path}: must end in .svg or .png")
        if path.suffix == ".png" and find_spec("matplotlib") is None:
            raise ValueError(f"{flag} {path}: a .png needs matplotlib, which is missing; use .svg")
        if path.is_dir():
            raise ValueError(f"{flag} {path}: is a directory; valid: a .svg or .png file")
        if not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no directory {path.parent}; make it first")
        if other := flag_of_path.get(path.resolve()):
            raise ValueError(f"{flag} {path}: is the file of {other}, which it would replace; valid: another one")
        flag_of_path[path.resolve()] = flag


def _estimate_typed(options: Options, device: Hardware | None) -> RunEstimate:
    """Return the estimate for the layout given by flags. Options without effect are reported on stderr."""
    answer = estimated(*planned(options), device)
    for line in unread(options, "read"):
        print(line, file=sys.stderr)
    return answer


def _typed_layout(options: Options) -> str:
    """Return the flags in `options` that a search would replace."""
    layout = {name: value_of(options, name) for name in options_with(layout=True)}
    changed = {flag_of(name): value for name, value in layout.items() if value != entries()[name].default}
    return ", ".join(flag if value is True else f"{flag} {value}" for flag, value in changed.items())


def _document(answer: RunEstimate, megatron: bool, stops: Interruptions) -> dict[str, object]:
    """Return the values that `_report` prints, for JSON."""
    from dataclasses import asdict

    from mega.core.estimate import show
    from mega.core.estimate.duration import training
    from mega.core.estimate.megatron import report

    run, world, device = answer.run, answer.world, answer.device
    document: dict[str, object] = {**show.as_json(run, world, answer.memory, device)}
    if answer.found is not None:
        document |= show.choice_as_json(answer.found, answer.start, answer.missing)
    if (other := in_bf16(answer)) is not None:
        document["bf16"] = {"peak": other.memory.worst.peak, "seconds": other.seconds}
    if megatron:
        megatron_estimate = report(run, world)
        document["megatron"] = {
            name: getattr(megatron_estimate, name) for name in ("parameters", "shard", "others", "in_flight")
        }
        document["megatron_mb"] = {
            name: getattr(megatron_estimate, name) for name in ("weights", "activations", "total", "layer")
        }
    if device is not None:
        duration = training(run, world, device, stops)
        if duration is not None:
            document["training"] = {**asdict(duration), **asdict(stops), "async_save": run.checkpoint.async_save}
    return document


def _report(answer: RunEstimate, megatron: bool, stops: Interruptions) -> None:
    from rich.console import Console

    from mega.core.estimate import show
    from mega.core.estimate.duration import training
    from mega.core.terminal import print_table

    console = Console(highlight=False, soft_wrap=True)
    report = partial(console.print, soft_wrap=not console.is_terminal)  # sentences, which a terminal wraps
    run, world, device = answer.run, answer.world, answer.device
    if answer.found is not None and device is not None:
        print_table(console, show.layouts_table(answer.found))
        report(show.explain_choice(answer.found, device))
    report(show.layout(run, world))
    print_table(console, show.table(answer.memory))
    for bar in show.bars(answer.memory):
        console.print(bar)
    for line in show.notes(run, world, answer.memory, device, megatron):
        report(line)
    if (other := in_bf16(answer)) is not None:
        seconds, seconds_in_bf16 = answer.seconds, other.seconds
        times = None if seconds is None or seconds_in_bf16 is None else (seconds, seconds_in_bf16)
        report(show.precision(run, answer.memory, other.memory, times))
    if device is not None:
        duration = training(run, world, device, stops)
        if duration is not None:
            report(show.training_note(duration, stops, run.checkpoint.save_interval is not None))
    for line in answer.start:
        console.print(line, markup=False)
    if answer.missing:
        report(f"still to be given there: {', '.join(answer.missing)}")


def _draw_schedule(run: RunConfig, world: int, device: Hardware | None, path: Path) -> None:
    """Draw the pipeline's timeline with the estimated times on `device`. Without a device, all operations take the same
    time."""
    from mega.core.config.resolve import microbatches
    from mega.core.estimate.steptime import plan_costs
    from mega.core.plan import plan, simulate
    from mega.core.plan.draw import draw, draw_text

    parallel = run.parallel
    costs = None if device is None else plan_costs(run, world, device)
    playing = simulate(plan(parallel.schedule, parallel.pp, parallel.chunks, microbatches(run, world)), costs)
    if str(path) == "-":
        print(draw_text(playing))
    else:
        draw(playing, path)
