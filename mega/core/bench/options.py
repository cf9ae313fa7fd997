"""Option sections of `mega bench` and `mega preflight`. This module does not import torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import COUNT, SHARE, Range, VerbSection, like, option
from mega.core.config.sections import RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class BenchOptions(VerbSection):
    """Number of timed steps, and files for the results."""

    title: ClassVar[str] = "Measurement"

    repeats: int = option(7, "number of timed steps, whose median time is reported", within=COUNT)
    warmup: int = option(5, "number of warm-up steps before the timed steps", within=COUNT)
    json: str | None = option(None, "append one JSON line for each row to this file")
    against: str | None = option(None, "compare the rows with this file, written by an earlier --json")
    trace: str | None = option(
        None, "write a trace of one step, for Perfetto, to this file; with several rows, to one file per row"
    )
    calibrate: str | None = option(
        None, "measure this machine instead, and write a .toml file for memory-estimate --gpu"
    )
    overwrite: bool = option(False, "let --calibrate replace an existing file")


@dataclass(frozen=True, kw_only=True)
class ServingLoadOptions(VerbSection):
    """The requests of the row `serve`."""

    title: ClassVar[str] = "Row serve"

    url: str | None = option(None, "row serve: address of the running server to measure", metavar="HOST:PORT")
    rate: tuple[float, ...] = option(
        (),
        "row serve: one or more request rates, in requests per second; 0 sends all requests simultaneously",
        within=Range("from 0 (all at once) to 1e6", lambda value: 0 <= value < 1e6),
    )
    requests: int = option(64, "row serve: number of requests sent at each rate", within=COUNT)
    prompt_tokens: int = option(512, "row serve: number of tokens in each prompt", within=COUNT)
    new_tokens: int = option(128, "row serve: number of tokens in each answer", within=COUNT)
    draw: Path | None = option(None, "row serve: write a plot to a .svg file")


@dataclass(frozen=True, kw_only=True)
class PreflightOptions(VerbSection):
    """Ranks, measurements, and the threshold for reports."""

    title: ClassVar[str] = "Preflight"

    nproc: int | None = like(RuntimeConfig, "nproc")
    device: Literal["auto", "cpu", "cuda"] = like(RuntimeConfig, "device")
    backend: Literal["auto", "gloo", "nccl"] = like(RuntimeConfig, "backend")
    timeout_minutes: float = like(RuntimeConfig, "timeout_minutes")
    save: str | None = option(None, "directory on the disk to measure; one rank on each host measures it")
    megabytes: int = option(256, "size of the test file written to --save, in MB", within=COUNT)
    least: float = option(0.8, "report a figure that is below this fraction of the median", within=SHARE)
    json: bool = option(False, "print one line of JSON instead of a table")
