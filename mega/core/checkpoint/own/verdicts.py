"""Verdicts on saved steps, reached after they were saved: whether a run that resumes from a step can be expected to
train.

A step is published when every byte of it is on the disk and every number is finite. Bad weights are noticed only later,
because a run that is about to diverge saves finite weights until the loss is NaN. `verdicts.json`, next to the steps,
records for each step what the run observed after that step:

    unproven    too few steps were taken since then; every step without an entry is unproven too
    good        --good-after sound steps were taken since then, or the run reached its last step
    suspect     the run diverged before the step was good; the reason is recorded

A sound step is one that was applied with a finite loss below the limit in `training/saves/proving.py`.

A run resumes from the newest intact step that is not suspect. Unproven steps count, so that a killed run loses nothing.
A step is skipped only for a reason, which is reported. Retention never removes the newest good step.

An entry holds the hash of the step's manifest, so an entry for a step that was replaced later has no effect. The file
is next to the steps and not in them, because steps are sealed. If the file is absent or damaged, every step is
unproven.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mega.core.checkpoint.own.disk import parse_json
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.untrusted import Json

VERDICTS = "verdicts.json"
FORMAT_VERSION = 1

Status = Literal["unproven", "good", "suspect"]


@dataclass(frozen=True)
class StepVerdict:
    """The verdict on one step."""

    manifest: str
    """The hash of the manifest that the step had when the verdict was reached."""
    status: Status = "unproven"
    """unproven, good or suspect, as above."""
    sound_steps: int = 0
    """Number of sound steps taken since the step was saved."""
    reason: str = ""
    """Why the step is suspect, in words that follow "step N is passed over: "."""
    valid_loss: float | None = None
    """The validation loss at that step, if there was a validation; retention keeps the step with the lowest validation
    loss."""


def encode(verdicts: Mapping[int, StepVerdict]) -> bytes:
    """The content of the file for these verdicts."""
    steps = {str(step): asdict(verdict) for step, verdict in sorted(verdicts.items())}
    text = json.dumps({"format": "mega verdicts", "format_version": FORMAT_VERSION, "steps": steps}, indent=1)
    return f"{text}\n".encode()


def decode(data: bytes, path: Path) -> dict[int, StepVerdict]:
    """Step -> verdict. Fields that later versions add are ignored. Errors: CheckpointError naming the file."""
    fields = parse_json(data, path)
    try:
        match fields:
            case {"format_version": version, "steps": dict(steps)} if version == FORMAT_VERSION:
                return {int(step): _verdict(verdict) for step, verdict in steps.items()}
    except ValueError:
        pass
    raise CheckpointError(f"{path}: not a file of verdicts that this version reads")


def _verdict(fields: Json) -> StepVerdict:
    match fields:
        case {
            "manifest": str(manifest),
            "status": ("unproven" | "good" | "suspect") as status,
            "sound_steps": int(sound_steps),
            "reason": str(reason),
            **others,
        }:
            loss = others.get("valid_loss")
            if loss is None or isinstance(loss, int | float):
                return StepVerdict(manifest, status, sound_steps, reason, loss)
    raise ValueError(fields)
