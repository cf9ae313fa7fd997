"""Verdicts on saved steps: whether a run can be expected to train well after it resumes from a step.

A step is published when all its bytes are on the disk and all its values are finite. Bad weights are detected only
later, because a diverging run saves finite weights until the loss is NaN. The file `verdicts.json`, next to the steps,
therefore records one of these verdicts for each step:

    unproven    too few steps were taken since the save, or the step has no entry
    good        at least --good-after sound steps were taken since the save, or the run reached its last step
    suspect     the run diverged before the verdict was good; the reason is recorded

A step is sound if its update was applied and its loss is finite and below the limit in `training/saves/proving.py`.

A run resumes from the newest intact step that is not suspect. Unproven steps are accepted, so that a killed run loses
no progress. For every skipped step, the reason is reported. Retention never removes the newest good step.

An entry contains the hash of the step's manifest, so an entry for a step that was replaced later has no effect.
Verdicts are not stored in the steps' directories, because a published step does not change. If `verdicts.json` is
absent or damaged, every step is unproven.
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
    """The hash of the step's manifest at the time of the verdict."""
    status: Status = "unproven"
    """The verdict: unproven, good or suspect."""
    sound_steps: int = 0
    """Number of sound steps taken since the step was saved."""
    reason: str = ""
    """The reason why the step is suspect. Messages print the reason after "step N is passed over: "."""
    valid_loss: float | None = None
    """The validation loss at the step; None if the step was not validated. Retention keeps the step with the lowest
    validation loss."""


def encode(verdicts: Mapping[int, StepVerdict]) -> bytes:
    """Return the content of `verdicts.json` for these verdicts."""
    steps = {str(step): asdict(verdict) for step, verdict in sorted(verdicts.items())}
    text = json.dumps({"format": "mega verdicts", "format_version": FORMAT_VERSION, "steps": steps}, indent=1)
    return f"{text}\n".encode()


def decode(data: bytes, path: Path) -> dict[int, StepVerdict]:
    """Parse `verdicts.json` into step -> verdict. Fields that later versions add are ignored. Errors: CheckpointError
    naming the file."""
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
