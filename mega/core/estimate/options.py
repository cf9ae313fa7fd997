"""Option section of `mega memory-estimate`. This module does not import torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mega.core.config.option import COUNT, Range, VerbSection, option

MOST = 10**9
"""Maximum number of hours or seconds."""


def _to_most(least: float) -> Range:
    return Range(f"a number from {least:,} to {MOST:,}", lambda value: least <= value <= MOST)


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(VerbSection):
    """Options of an estimate: the devices to plan for, failures, and the output."""

    title: ClassVar[str] = "Estimate"

    json: bool = option(False, "print one JSON value, with sizes in bytes")
    gpu: str | None = option(
        None, "device to plan for: h200, h100, a100, ... or a TOML file; also predicts the step time"
    )
    fit: str | None = option(None, "find the fastest layout on these devices, such as 8x80GB or 8xh200")
    gpus: int | None = option(
        None,
        "find the fastest layout on this number of --gpu devices",
        metavar="COUNT",
        within=Range("a whole number from 1 to 9,999,999", lambda value: 1 <= value < 10**7),
    )
    mtbf: float | None = option(
        None, "mean time between failures of the whole machine, in hours", metavar="HOURS", within=_to_most(0.01)
    )
    save_seconds: float | None = option(
        None, "time of a save, during which training stops [30]", metavar="SECONDS", within=_to_most(0)
    )
    restart_seconds: float | None = option(
        None, "time from a failure to the next step [600]", metavar="SECONDS", within=_to_most(0)
    )
    megatron: bool = option(False, "also show Megatron-LM's own estimate")
    draw: Path | None = option(None, "write the memory bars to a .svg or .png file")
    draw_schedule: Path | None = option(None, "write the pipeline's timeline to a .svg or .png file; - prints it")
    serve: bool = option(
        False,
        "print the capacity that mega serve will report for the model on --tp x --pp ranks of --gpu, and the "
        "predicted speed of answers",
    )
    max_length: int | None = option(
        None, "with --serve: maximum number of tokens in prompt and answer together [the model's]", within=COUNT
    )
    prompt_tokens: int | None = option(None, "with --serve --gpu: tokens in each prompt [512]", within=COUNT)
    new_tokens: int | None = option(None, "with --serve --gpu: tokens in each answer [128]", within=COUNT)
    rate: float | None = option(
        None,
        "with --serve --gpu: also predict the speed for this number of requests per second, arriving at random times",
        within=Range("above 0, to 1e6", lambda value: 0 < value < 1e6),
    )
