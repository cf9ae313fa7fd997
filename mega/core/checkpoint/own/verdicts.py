"""What became known of saved steps after they were saved: whether a run that resumes from one can be expected to train.

A step is published when every byte of it is on the disk and every number finite. Whether its weights are any good shows
later: a run that is about to blow up saves finite weights until the loss is NaN. `verdicts.json`, next to the steps,
holds for each what the run that went on from it has met:

    unproven    as yet too few steps have been taken since; also every step without an entry
    good        --good-after sound steps were taken since, or the run came to its last one
    suspect     the run blew up before it was good; with the reason

A sound step is one that was applied with a finite loss below the limit in `training/saves/proving.py`.

Which step is resumed from: the newest whole one that is not suspect. Unproven ones count, so that a run that is killed
loses nothing; there must be a reason to pass one over, and it is reported. Retention never removes the newest good one.

An entry holds the hash of the step's manifest, so one for a step that was replaced since means nothing. It stands next
to the steps and not in them, since these are sealed. Where the file is absent or damaged, every step is unproven.
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
    """What is known of one step. manifest: the hash of what was judged. sound_steps: steps taken well since.

    reason: of a suspect one, in words that follow "step N is passed over: ". valid_loss: of the validation at that
    step, where there was one; retention keeps the step that has the least.
    """

    manifest: str
    status: Status = "unproven"
    sound_steps: int = 0
    reason: str = ""
    valid_loss: float | None = None


def encode(verdicts: Mapping[int, StepVerdict]) -> bytes:
    """The file of some steps' verdicts."""
    steps = {str(step): asdict(verdict) for step, verdict in sorted(verdicts.items())}
    text = json.dumps({"format": "mega verdicts", "format_version": FORMAT_VERSION, "steps": steps}, indent=1)
    return f"{text}\n".encode()


def decode(data: bytes, path: Path) -> dict[int, StepVerdict]:
    """Step -> verdict. What a later version has added is left out. Errors: CheckpointError naming the file."""
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
