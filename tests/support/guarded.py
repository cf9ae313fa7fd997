"""Runs of the trainer with faults on purpose, on the ranks of a pool: what each rank says, and what is published."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mega.core.checkpoint.own.store import CheckpointStore, SaveError
from mega.core.config.run import Options
from mega.core.device import Device
from mega.core.environment import INJECT
from mega.core.parallel.mesh import Groups
from mega.core.training.guards.inject import Injector
from mega.core.training.loop import Training
from mega.core.training.start.inputs import open_inputs, resolve_run
from mega.core.training.start.rank import start
from mega.core.training.state import TrainState
from tests.support.runs import small_options

RUN: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 61,
    "seq_length": 8,
    "lr": 1e-3,
    "dtype": "fp32",
    "mock_data": True,
    "eval_iters": 0,
    "progress": False,
    "steps": 6,
    "bucket_size": 2000,
}


def guarded(place: Path, **values: Any) -> Options:
    """A small run that saves every second step."""
    own = {"save": str(place / "run"), "metrics": str(place / "m.jsonl"), "save_interval": 2}
    return small_options("gpt", **{**RUN, **own, **values})


def play(
    groups: Groups,
    rank: int,
    options: Options,
    world: int,
    change: Callable[[Training], None] | None = None,
) -> dict[str, Any]:
    """Job: the run to its end. error: what ended it early. step: how far it had come. named: what was damaged on this
    rank. digest: of weights and moments. lines: of rank 0. own: seconds of its own work in the last step."""
    lines: list[str] = []
    os.environ[INJECT] = "1"
    with contextlib.ExitStack() as held:
        training = start(open_inputs(resolve_run(options, world)), rank, world, Device.choose("cpu"), groups, held)
        training.report = training.judge.report = lines.append
        if change is not None:
            change(training)
        error = ""
        try:
            training.play()
        except (FloatingPointError, SaveError) as fault:
            error = str(fault)
    state, damage = training.state, training.state.injector
    named = damage.named if isinstance(damage, Injector) else []
    return {
        "error": error,
        "step": state.progress.step,
        "named": named,
        "digest": digest(state),
        "lines": lines,
        "own": training.clock.seconds(),
        "left_out": [each.as_json() for each in state.guard.left_out],
    }


def digest(state: TrainState) -> str:
    """Of the bytes of weights, masters and moments of this rank."""
    found = hashlib.sha256()
    for flat in state.flats():
        found.update(flat.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def published(place: Path) -> list[int]:
    """The steps that were saved."""
    return CheckpointStore(place / "run").steps() if (place / "run").is_dir() else []
