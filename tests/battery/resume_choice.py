"""Which checkpoint a run starts from, where ranks see different ones, and where the run before blew up.

views N      10 runs of two ranks, of which one sees a step that is missing, unreadable, of another run, or cut: both
             start from the same step, bit for bit, or both end with the same error
blow-ups N   5 runs that train well, and then with a rate, a precision or a scale at which they blow up: no step that
             was published holds a number that is not finite, and with a sane rate the run resumes from a good one and
             trains
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.compose import compose
from mega.core.device import Device
from mega.core.parallel.mesh import Groups
from mega.core.processes.pool import Pool
from mega.core.training.saves import saver
from mega.core.training.start.inputs import open_inputs, resolve_run
from mega.core.training.start.rank import start
from tests.battery.data_ledger import Item, run
from tests.support.views import KINDS, damage
from tests.training.test_views import LAYOUTS, RUN, WAYS, begin, from_steps

STEPS = (4, 8)


@cache
def pool() -> Pool:
    return Pool(2)


@cache
def sources(layout: str) -> Path:
    """A run of a layout, one of another seed, and what the ranks hold at each step of the first (sums.json)."""
    root = Path(tempfile.mkdtemp(prefix="mega-views-"))
    for name, seed in (("run", 1), ("other", 2)):
        flags = {**RUN, **LAYOUTS[layout], "steps": 8, "seed": seed, "save": str(root / name)}
        assert [each[0] for each in pool().run(begin, flags, None, "", (), world=2)] == ["", ""]
    places = {step: str(root / "run" / "any") for step in STEPS}
    flags = {**RUN, **LAYOUTS[layout], "steps": 1, "metrics": str(root / "metrics.jsonl")}
    sums = pool().run(from_steps, flags, places, world=2)
    (root / "sums.json").write_text(json.dumps([[each[step] for each in sums] for step in STEPS]))
    return root


# -- views


def views(number: int) -> dict[str, Any]:
    rng, ends = random.Random(f"views {number}"), Counter[str]()
    for _ in range(10):
        with tempfile.TemporaryDirectory(prefix="mega-view-") as folder:
            ends[view(Path(folder), rng)] += 1
    assert not ends["different steps"], ends
    return {"runs": 10, "different steps": 0, **ends}


def view(folder: Path, rng: random.Random) -> str:
    """One run; how it began."""
    layout, way, kind = rng.choice(sorted(LAYOUTS)), rng.choice(sorted(WAYS)), rng.choice(KINDS)
    root, place, seen = sources(layout), folder / "run", folder / "view"
    for target in (place, seen):
        shutil.copytree(root / "run", target)
    file = Path()
    for step in (8, 4) if rng.random() < 0.2 else (8,):
        file = damage(kind, CheckpointStore(seen), step, CheckpointStore(root / "other"), rng)
    files = {"unreadable": (str(file), ""), "unread": ("", str(file))}.get(kind, ())
    flags = {**RUN, **LAYOUTS[layout], **WAYS[way], ("save" if way == "resume" else "load"): str(place)}
    flags["metrics"] = str(folder / "metrics.jsonl")
    if way == "load" and rng.random() < 0.5:
        flags["save"] = str(place)
    found = pool().run(begin, flags, rng.randrange(2), str(seen), files, False, world=2)
    errors = [error for error, *_ in found]
    if any(errors):
        assert errors[0] == errors[1] and errors[0], errors
        return "refused"
    held = [read for *_, read in found]
    sums = json.loads((root / "sums.json").read_text())
    return f"from step {STEPS[sums.index(held)]}" if held in sums else "different steps"


# -- blow-ups


def train(groups: Groups, rank: int, flags: dict[str, Any]) -> tuple[str, str, list[str], int]:
    """Job: a run on two ranks: (error, printed, tensors that were published and are not finite, saves looked at)."""
    printed, broken, looked = io.StringIO(), list[str](), 0
    retain = saver.retain

    def look(store: CheckpointStore, *limits: Any, **more: Any) -> Any:
        nonlocal looked
        broken.extend(not_finite(store, store.steps()[-1]))
        looked += 1
        return retain(store, *limits, **more)

    error = ""
    with (
        contextlib.ExitStack() as held,
        contextlib.redirect_stdout(printed),
        mock.patch.object(saver, "retain", look),
    ):
        try:
            inputs = open_inputs(resolve_run(compose(flags=flags), 2))
            start(inputs, rank, 2, Device.choose("cpu"), groups, held).play()
        except Exception as fault:
            error = f"{type(fault).__name__}: {fault}"
    return error, printed.getvalue(), broken, looked


def not_finite(store: CheckpointStore, step: int) -> list[str]:
    """The tensors of a step that hold a number that is not finite."""
    checkpoint, found = store.open(step), []
    for key, (shape, dtype) in checkpoint.tensors.items():
        tensor = torch.zeros(shape, dtype=dtype)
        checkpoint.read([Piece(key, shape, (0,) * len(shape), tensor)])
        if not bool(torch.isfinite(tensor).all()):
            found.append(f"step {step}: {key}")
    return found


def blow_ups(number: int) -> dict[str, Any]:
    rng, seen = random.Random(f"blow-ups {number}"), Counter[str]()
    while seen["runs"] < 5:
        with tempfile.TemporaryDirectory(prefix="mega-blow-up-") as folder:
            blow_up(Path(folder) / "run", rng, seen)
        assert seen["none"] < 50, "rates that are not too high"
    return {"not finite": 0, "resumed from a good step": seen["runs"], **seen}


def blow_up(place: Path, rng: random.Random, seen: Counter[str]) -> None:
    """Train well, blow up, resume; count what happened."""
    layout = LAYOUTS[rng.choice(sorted(LAYOUTS))]
    sane = {**RUN, **layout, "save": str(place), "resume": "auto", "override_schedule": True, "lr": 1e-3}
    sane |= {"dtype": rng.choice(["fp32", "bf16", "fp16"]), "initial_loss_scale": 2.0**10}
    sane |= {"save_interval": rng.randint(1, 3), "good_after": rng.randint(1, 4), "keep_last": rng.randint(1, 3)}
    sane |= {"async_save": rng.random() < 0.3}
    wild = {"lr": 10.0 ** rng.choice([2, 3, 4, 6, 10, 20, 30, 38, 39, 60]), "clip_grad": rng.choice([0.0, 1.0])}
    if sane["dtype"] == "fp16" and rng.random() < 0.3:
        wild = {"loss_scale": 1e30}
    well = rng.randint(4, 9)
    ends = []
    for flags in (sane | {"steps": well}, sane | wild | {"steps": well + rng.randint(2, 30)}):
        ends.append(pool().run(train, flags, world=2))
        assert not ends[-1][0][2], ends[-1][0][2]
    assert not ends[0][0][0], ends[0]
    store = CheckpointStore(place)
    suspect = [step for step, verdict in store.verdicts().items() if verdict.status == "suspect"]
    died = bool(ends[1][0][0])
    if not (died or suspect):
        seen["none"] += 1
        return
    assert store.find() is not None and well in store.steps(), "the last good step was evicted"
    last = max(store.steps()[-1], well) + 4
    resumed = pool().run(train, sane | {"steps": last + 4}, world=2)
    error, printed, broken, _ = resumed[0]
    assert not error and not broken, (error, broken)
    assert f"at step {well}\n" in printed, printed
    losses = [json.loads(line).get("loss") for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert max(loss for loss in losses if loss is not None) < 2 * math.log(64), "what it resumed from was no good"
    seen["runs"] += 1
    seen["died"] += died
    seen["went on above the limit"] += not died
    seen["refused saves"] += "is not saved" in ends[1][0][0]
    seen["saves looked at"] += sum(end[0][3] for end in (*ends, resumed))


def items() -> list[Item]:
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    found += [(f"views {number}", partial(views, number)) for number in range(1, 11)]
    found += [(f"blow-ups {number}", partial(blow_ups, number)) for number in range(1, 11)]
    return found


if __name__ == "__main__":
    run("resume_choice", items())
