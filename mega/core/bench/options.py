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

    repeats: int = option(7, "timed steps; the result is their median", within=COUNT)
    warmup: int = option(5, "steps before the timed ones", within=COUNT)
    json: str | None = option(None, "file that gets one JSON line for each row")
    against: str | None = option(None, "such a file from an earlier time, to compare with")
    trace: str | None = option(None, "file for the trace of one step, for Perfetto; with several rows, one file each")
    calibrate: str | None = option(
        None, "measure this machine instead, and write a .toml that memory-estimate --gpu reads"
    )
    overwrite: bool = option(False, "let --calibrate replace an existing file")


@dataclass(frozen=True, kw_only=True)
class ServingLoadOptions(VerbSection):
    """The requests of the row `serve`."""

    title: ClassVar[str] = "Row serve"

    url: str | None = option(None, "row serve: address of a running server", metavar="HOST:PORT")
    rate: tuple[float, ...] = option(
        (),
        "row serve: requests per second, one or more rates; 0: all at once",
        within=Range("from 0 (all at once) to 1e6", lambda value: 0 <= value < 1e6),
    )
    requests: int = option(64, "row serve: requests at each rate", within=COUNT)
    prompt_tokens: int = option(512, "row serve: tokens of a prompt", within=COUNT)
    new_tokens: int = option(128, "row serve: tokens of an answer", within=COUNT)
    draw: Path | None = option(None, "row serve: write a plot to a .svg file")


@dataclass(frozen=True, kw_only=True)
class PreflightOptions(VerbSection):
    """Ranks, measurements, and the threshold for reports."""

    title: ClassVar[str] = "Preflight"

    nproc: int | None = like(RuntimeConfig, "nproc")
    device: Literal["auto", "cpu", "cuda"] = like(RuntimeConfig, "device")
    backend: Literal["auto", "gloo", "nccl"] = like(RuntimeConfig, "backend")
    timeout_minutes: float = like(RuntimeConfig, "timeout_minutes")
    save: str | None = option(None, "folder whose disk is measured, by one rank of each host")
    megabytes: int = option(256, "size of the file that is written there, in MB", within=COUNT)
    least: float = option(0.8, "share of the median below which a figure is reported as off", within=SHARE)
    json: bool = option(False, "print one line of JSON instead of a table")
