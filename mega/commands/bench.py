"""`mega bench`: measure the speed of a run on this machine with random tokens."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any

import typer

from mega.command_line.options import without
from mega.core.bench.options import BenchOptions, ServingLoadOptions
from mega.core.config.compose import GivenOptions
from mega.core.config.option import changed
from mega.core.config.run import Options, RunConfig, entries, flag_of, options_with, updated
from mega.core.config.unread import unread
from mega.core.files import check_file
from mega.core.inference.options import EngineOptions
from mega.core.processes.world import is_first_rank, ranks, world_from_env

LOADS_MODEL = False


def run(
    options: Options,
    given: GivenOptions,
    bench: BenchOptions,
    serving: ServingLoadOptions,
    engine: Annotated[EngineOptions, without("cache_tokens", "batch_invariant", "cuda_graph")],
    rows: Annotated[
        list[str] | None,
        typer.Argument(help="w1, w2, w2-fp8, w3, t5 or serve [the run that the flags define]"),
    ] = None,
) -> int:
    """Measure the speed of training steps on random tokens, one row after another in one process group.

    Rows: w1 (GPT 345M), w2 (Llama-2 7B), w2-fp8 (w2 with --fp8), w3 (GPT 22B with tensor ranks), t5 (T5 220M). The
    number of ranks determines the batch and layout of a row; flags override both. The row serve measures throughput,
    time to first token and time between tokens for requests that arrive at random times. This row uses the model at
    --load, a model with random weights defined by flags, or a server at --url.
    """
    if rows == ["serve"]:
        return _serving(options, given, bench, serving, engine)
    if typed := [*changed(serving), *changed(engine)]:
        flag = "--" + typed[0].replace("_", "-")
        raise ValueError(f"{flag}: is of the row serve: mega bench serve {flag} ...")
    world = world_from_env()
    size = ranks(world, options.runtime.nproc, options.runtime.world)
    _check_outputs({"--json": bench.json, "--trace": bench.trace, "--calibrate": bench.calibrate}, bench.overwrite)
    if bench.calibrate is not None:
        _check_calibration(bench, bench.calibrate, given, rows or [])
        return _calibrate(options, bench.calibrate, bench.repeats, world.source == "alone" and size > 1, size)
    return _training(options, given, rows or [], bench)


def _check_calibration(bench: BenchOptions, out: str, given: GivenOptions, rows: list[str]) -> None:
    """Check the options of a calibration. Errors: ValueError naming options of a run, which a calibration excludes."""
    excluded = {"--json": bench.json, "--against": bench.against, "--trace": bench.trace, "--model": given.preset}
    typed = [f"{flag} {value}" for flag, value in excluded.items() if value is not None] + rows
    typed += [flag_of(name) for name in given.values if name not in options_with(bench="host")]
    if typed:
        raise ValueError(f"--calibrate {out}: measures this machine, not a run; leave out {', '.join(typed)}")


def _training(options: Options, given: GivenOptions, rows: list[str], bench: BenchOptions) -> int:
    """Measure rows of training steps. Errors: ValueError naming the row, flag or file."""
    world, repeats, warmup = world_from_env(), bench.repeats, bench.warmup
    size = ranks(world, options.runtime.nproc, options.runtime.world)
    from mega.core.bench.rows import read_rows, row

    if rows and given.preset is not None:
        raise ValueError(f"--model {given.preset}: excludes rows, which name their model; leave out one of them")
    # Rows are appended to --json. An existing file must contain rows, because appending rows would damage any other
    # file, such as a script. Only regular files are checked, not devices such as /dev/null.
    against, out = bench.against, bench.json
    for flag, file in (("--against", against), ("--json", out if out and os.path.isfile(out) else None)):
        if file is not None:
            read_rows(flag, file)
    runs = [(name, row(name, given.values, size)) for name in rows] or [("run", options)]
    resolved = [(name, _resolved(run, given, warmup + repeats, size)) for name, run in runs]
    if is_first_rank():
        _note_unused([run for _, run in runs], given)
    if options.runtime.dry_run:
        if is_first_rank():
            print("everything checked, nothing measured")
        return 0
    _announce(", ".join(name for name, _ in runs), size)
    from mega.core.bench import training

    job = partial(training.bench, repeats=repeats, warmup=warmup, out=out, against=against, trace=bench.trace)
    if world.source != "alone" or size == 1:
        return job(resolved)
    from mega.core.estimate.host import resource_warnings
    from mega.core.processes.launch import launch

    for line in dict.fromkeys(line for _, run in resolved for line in resource_warnings(run, size)):
        print(f"mega: {line}", file=sys.stderr)
    return launch(size, job, resolved)


def _announce(rows: str, size: int, *, dry: bool = False) -> None:
    """Print the first message before torch is imported, which takes many seconds on some disks."""
    if is_first_rank() and not dry:
        print(f"{rows}: {size} rank{'s are' if size > 1 else ' is'} starting", file=sys.stderr, flush=True)


def _note_unused(runs: Iterable[Options], given: GivenOptions) -> None:
    """Print on stderr the given options that do not affect the measurement."""
    unused = [flag_of(name) for name in given.values if name in options_with(bench="unused")]
    if unused:
        print(f"not used, random tokens are measured and nothing is kept: {', '.join(unused)}", file=sys.stderr)
    for line in dict.fromkeys(line for run in runs for line in unread(run, "read")):
        print(line, file=sys.stderr)


def _resolved(options: Options, given: GivenOptions, steps: int, size: int) -> RunConfig:
    """Return the run to measure. --reset-attention is set after the checks, because with this option the checks require
    a tokenizer, which random tokens do not have."""
    from mega.core.config.resolve import variant
    from mega.core.training.start.inputs import resolve_run

    resolved = resolve_run(_measurable(options, given, steps), size).run
    return variant(resolved, {"reset_attention": options.data.reset_attention})


def _measurable(options: Options, given: GivenOptions, steps: int) -> Options:
    """Return `options` with the run's data, files and length replaced with the minimum that a run needs."""
    from mega.core.bench.rows import LR

    values: dict[str, Any] = {name: entries()[name].default for name in options_with(bench="unused")}
    values |= {"mock_data": True, "steps": steps, "reset_attention": False}
    values |= {"lr": LR} if options.optimizer.lr is None else {}
    # With the default loss scale, most of the timed steps would overflow and skip the update.
    if "initial_loss_scale" not in given.values and options.precision.loss_scale is None:
        values["initial_loss_scale"] = 2.0**16
    return updated(options, values)


def _check_outputs(paths: Mapping[str, str | None], overwrite: bool) -> None:
    """Check the output files. Errors: ValueError if a file cannot be written, or would be replaced without
    --overwrite."""
    for flag, path in paths.items():
        if path is not None:
            check_file(flag, path)
    calibration = paths["--calibrate"]
    if overwrite and calibration is None:
        raise ValueError("--overwrite: is of --calibrate, which is not given")
    if calibration is not None and os.path.isfile(calibration) and not overwrite:
        raise ValueError(f"--calibrate {calibration}: exists; name another file, or give --overwrite to replace it")


def _calibrate(options: Options, out: str, repeats: int, start: bool, size: int) -> int:
    if not out.endswith(".toml"):
        raise ValueError(f"--calibrate {out}: must end in .toml, as a file for memory-estimate --gpu does")
    from mega.core.bench.calibrate import calibrate

    runtime = options.runtime
    arguments = (out, runtime.device, runtime.backend, runtime.timeout_minutes, repeats)
    if not start:
        return calibrate(*arguments)
    from mega.core.processes.launch import launch

    return launch(size, calibrate, *arguments)


def _serving(
    options: Options, given: GivenOptions, bench: BenchOptions, serving: ServingLoadOptions, engine: EngineOptions
) -> int:
    """Measure the row `serve`. Errors: ValueError naming a flag that this row excludes."""
    for name in ("against", "trace", "calibrate"):
        if (value := getattr(bench, name)) is not None:
            raise ValueError(f"--{name} {value}: excludes the row serve")
    picture, url, load = serving.draw, serving.url, given.values.get("load")
    if picture is not None and picture.suffix != ".svg":
        raise ValueError(f"--draw {picture}: must end in .svg")
    outputs = {"--json": bench.json, "--draw": None if picture is None else str(picture), "--calibrate": None}
    _check_outputs(outputs, False)
    if options.precision.fp8:
        raise ValueError("--fp8: trains in 8 bits; row serve: --fp8-weights keeps the weights in 8 bits")
    from mega.core.config.check import check_ranges

    _check_model(options, given, url)
    check_ranges(options)
    engine.check_speculation()
    size = options.parallel.tp * options.parallel.pp
    # Printed before the import of torch below, which takes many seconds on some disks.
    if url is None and size > 1:
        _announce("serve", size, dry=options.runtime.dry_run)
    from mega.core.bench.serving import ServingBench, bench_engine, bench_url
    from mega.core.config.resolve import model_alone

    plan = ServingBench(
        serving=serving,
        load=None if load is None else str(load),
        model=None if load is not None or url is not None else model_alone(options),
        engine=dataclasses.replace(engine, cuda_graph=options.runtime.cuda_graph),
        tp=options.parallel.tp,
        pp=options.parallel.pp,
        dtype=options.precision.dtype if "dtype" in given.values else None,
        device=options.runtime.device,
        backend=options.runtime.backend,
        out=bench.json,
    )
    if options.runtime.dry_run:
        print("everything checked, nothing measured")
        return 0
    if url is not None:
        return bench_url(plan)
    from mega.core.processes.launch import run_ranks

    return run_ranks(size, bench_engine, plan)


def _check_model(options: Options, given: GivenOptions, url: str | None) -> None:
    """Check the flags that define a model, and print the unused flags on stderr. Errors: ValueError if flags define a
    model although --load or --url is given."""
    sizes, has_model = [*vars(options.model), "seq_length"], url is not None or given.values.get("load") is not None
    if has_model and (typed := _model_flags(given, sizes)):
        raise ValueError(f"{typed[0]}: excludes {'--load' if url is None else f'--url {url}'}, which has its own model")
    read = {"dry_run", *(() if has_model else sizes)}
    if url is None:
        read |= {"load", "tp", "pp", "dtype", "device", "backend", "cuda_graph"}
    if is_first_rank() and (unused := [flag_of(name) for name in given.values if name not in read]):
        print(f"not used, nothing is trained: {', '.join(unused)}", file=sys.stderr)


def _model_flags(given: GivenOptions, sizes: Iterable[str]) -> list[str]:
    """Return the given flags that define a model."""
    return ["--model"] * (given.preset is not None) + [flag_of(name) for name in sizes if name in given.values]
