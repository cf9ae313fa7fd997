"""The guards of a run against faults on purpose: 100 numbers that are not finite, 50 spikes in 10,000 steps, 50 drifts
of one unit in the last place, 20 slow ranks.

    python tests/battery/guards.py [nan | spike | run | ulp | slow ...] [--out rows.jsonl]

One JSON line an item; those that are in the file are not played again. One pool of ranks serves all items.

nan    {batch, activation, gradient, weight, moment, tied} x layouts x NaN and infinity: in the same step on every rank,
       rank and tensor named, nothing published
spike  10,000 steps of made noise with 50 spikes, BLOOM's (norm x 4000, loss x 2.3) among them: found, false alarms
run    a small run with spikes of gradients and of labels: found, false alarms
ulp    one unit in the last place of a weight or moment: named by the audit within its interval
slow   one rank of four slower by 30 % of a step: named within 20 steps; and 1,000 steps in which none is
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from mega.core.processes.pool import Pool  # noqa: E402
from mega.core.training.policy import GuardMemory, limits  # noqa: E402
from tests.support.guarded import guarded, play, published  # noqa: E402

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"tp": 2, "pp": 2},
    {"pp": 2, "zero": 1},
    {"tp": 2, "zero": 1, "dtype": "bf16"},
]
WORDS = {
    "batch": "the batch's ",
    "activation": "the output of ",
    "gradient": "the own gradient of ",
    "weight": "",
    "moment": "moment",
    "tied": "copies of the gradient of ",
}
Play = Callable[[Pool, Any], dict[str, Any]]


def nans() -> Iterator[tuple[str, Any]]:
    """100 items: 96 of five kinds over the layouts, and four of tied copies, which a pipeline has."""
    dice = random.Random(7)
    kinds = [kind for kind in WORDS if kind != "tied"]
    for number in range(100):
        pipeline = [layout for layout in LAYOUTS if "pp" in layout]
        target = "tied" if number % 6 == 5 else kinds[number % 6]
        layout = dice.choice(pipeline) if target == "tied" else LAYOUTS[(number // 6) % len(LAYOUTS)]
        stages = 4 // layout.get("pp", 1)
        rank = dice.randrange(4) if target != "tied" else dice.randrange(4 - stages, 4)
        kind = ("nan", "inf")[dice.randrange(2)]
        yield f"nan {number}", (kind, target, layout, rank, 1 + dice.randrange(6), number)


def play_nan(pool: Pool, item: Any) -> dict[str, Any]:
    kind, target, layout, rank, step, seed = item
    with tempfile.TemporaryDirectory() as place:
        fault = f"{kind}:{target}@step={step},rank={rank},seed={seed}"
        options = guarded(Path(place), inject=(fault,), global_batch=8, save_interval=1, **layout)
        found = pool.run(play, options, 4, world=4)
        error, named = found[0]["error"], found[rank]["named"]
        saved = published(Path(place))
    same = len({each["error"] for each in found}) == 1 and {each["step"] for each in found} == {step}
    in_step = same and error.startswith(f"step {step}: ")
    who = _names(error, rank)
    what = WORDS[target] in error and (target == "activation" or named[0].removeprefix("grads/") in error)
    good = in_step and who and what and saved == list(range(1, step))
    return {
        "good": good,
        "fault": fault,
        "layout": layout,
        "error": error,
        "in step": in_step,
        "rank": who,
        "tensor": what,
    }


def _names(error: str, rank: int) -> bool:
    """Whether the rank is among those that the line names; others may be, of which one copy cannot tell."""
    return any(
        f"rank{plural} " in error and str(rank) in error.split(f"rank{plural} ", 1)[1][:24] for plural in ("", "s")
    )


def spikes() -> Iterator[tuple[str, Any]]:
    yield from ((f"spike series {seed}", seed) for seed in range(5))


def play_spikes(pool: Pool, seed: int) -> dict[str, Any]:
    """A falling loss with noise that is correlated and has tails, a norm with noise that is a factor. A third of the
    spikes are of the loss alone, a third of the norm alone."""
    dice, memory = np.random.default_rng(seed), GuardMemory()
    at = sorted(dice.choice(np.arange(100, 10_000, 60), 50, replace=False).tolist())
    sizes = {step: (dice.uniform(1.25, 2.5), math.exp(dice.uniform(1.8, 8.3))) for step in at}
    sizes |= {step: (sizes[step][0], 1.0) for step in at[::3]}
    sizes |= {step: (1.0, sizes[step][1]) for step in at[1::3]}
    sizes |= dict.fromkeys(at[::10], (2.3, 4000.0))
    slow, found = 0.0, []
    for step in range(1, 10_001):
        slow = 0.95 * slow + dice.normal(0, 0.006)
        loss = 1.9 + 6.0 * step**-0.25 + slow + 0.025 * dice.standard_t(8)
        norm = math.exp(-0.7 + 0.8 * math.exp(-step / 500) + 0.12 * dice.standard_t(8))
        if step in sizes:
            loss, norm = loss * sizes[step][0], norm * sizes[step][1]
        if limits(memory.losses, memory.norms, 10.0).exceeded(loss, norm):
            found.append(step)
        else:
            memory.add(loss, norm)
    right, false = len(set(found) & set(at)), len(set(found) - set(at))
    return {"good": right >= 48 and false <= 1, "found": right, "of": 50, "false": false, "steps": 10_000}


def runs() -> Iterator[tuple[str, Any]]:
    yield "spike run", 0


def play_run(pool: Pool, _: Any) -> dict[str, Any]:
    """Ten spikes of the gradient in 400 steps, of a factor between 20 and 4000; skipped."""
    dice, steps = random.Random(3), 400
    at = sorted(dice.sample(range(60, steps, 10), 10))
    faults = [
        f"spike:gradient@step={step},rank={dice.randrange(2)},x={math.exp(dice.uniform(3, 8.3)):.0f}" for step in at
    ]
    with tempfile.TemporaryDirectory() as place:
        options = guarded(
            Path(place), inject=tuple(faults), steps=steps, save_interval=steps, global_batch=4, on_spike="skip"
        )
        found = pool.run(play, options, 2, world=2)
    steps_found = [each["step"] for each in found[0]["left_out"]]
    right, false = len(set(steps_found) & set(at)), len(set(steps_found) - set(at))
    return {"good": right == 10 and not false, "found": right, "of": 10, "false": false, "steps": steps}


def ulps() -> Iterator[tuple[str, Any]]:
    """Of layouts whose copies stay apart: under ZeRO, the owner's weights are sent to all with every update."""
    dice = random.Random(11)
    layouts = [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"tp": 2}]
    for number in range(50):
        yield f"ulp {number}", (layouts[number % len(layouts)], dice.randrange(4), 2 + dice.randrange(5), number)


def play_ulp(pool: Pool, item: Any) -> dict[str, Any]:
    """A drift that updates have rounded away, so that the run ends with the bytes of one without it, is drawn again."""
    layout, rank, step, seed = item
    healed = 0
    while True:
        target = ("weight", "moment")[(seed + healed) % 2]
        fault = f"ulp:{target}@step={step},rank={rank},seed={seed + 1000 * healed}"
        found = _audited(pool, layout, (fault,))
        error, named = found[0]["error"], found[rank]["named"]
        if error or [each["digest"] for each in found] != _clean(pool, layout):
            break
        healed += 1
    within = error.startswith("step ") and int(error.split()[1].rstrip(":")) < step + 3
    what, who = bool(named) and named[0].partition("/")[2] in error, _names(error.partition("apart")[2], rank)
    verdict = {"good": within and what and who, "within": within, "rank": who, "tensor": what, "healed": healed}
    return {**verdict, "fault": fault, "layout": layout, "error": error[:300]}


def _audited(pool: Pool, layout: dict[str, Any], faults: tuple[str, ...]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        options = guarded(
            Path(place), inject=faults, global_batch=8, steps=9, save_interval=9, audit_interval=3, **layout
        )
        return pool.run(play, options, 4, world=4)


_CLEAN: dict[str, list[str]] = {}


def _clean(pool: Pool, layout: dict[str, Any]) -> list[str]:
    """Of each rank's weights and moments at the end of the same run without a fault."""
    key = json.dumps(layout)
    if key not in _CLEAN:
        _CLEAN[key] = [each["digest"] for each in _audited(pool, layout, ())]
    return _CLEAN[key]


def slows() -> Iterator[tuple[str, Any]]:
    yield from ((f"slow {number}", number) for number in range(20))
    yield "slow none", None


def play_slow(pool: Pool, number: int | None) -> dict[str, Any]:
    """A rank of 4 at work for 30 % more than a step's own work, from step 30 on; 1,000 steps without one."""
    dice, steps = random.Random(number), 1000 if number is None else 60
    rank, layout = dice.randrange(4), dice.choice([{}, {"zero": 1}, {"tp": 2}, {"pp": 2}])
    with tempfile.TemporaryDirectory() as place:
        faults = (
            () if number is None else (f"sleep@step=30,rank={rank},steps=30,seconds={_own(pool, layout) * 0.35:.4f}",)
        )
        options = guarded(Path(place), inject=faults, steps=steps, save_interval=steps, global_batch=8, **layout)
        found = pool.run(play, options, 4, world=4, timeout=1800.0)
    named = [line for line in found[0]["lines"] if " is slow: " in line]
    if number is None:
        return {"good": not named, "false": len(named), "steps": steps, "lines": named}
    first = named[0] if named else ""
    right = first.split(": ")[1].startswith(f"rank {rank} ") if first else False
    after = int(first.split()[1].rstrip(":")) - 30 if first else None
    good = right and after is not None and after <= 20
    return {"good": good, "rank": rank, "layout": layout, "after": after, "named": named}


def _own(pool: Pool, layout: dict[str, Any]) -> float:
    """Seconds of own work of a step in a layout, measured now: other work on this machine changes it."""
    with tempfile.TemporaryDirectory() as place:
        options = guarded(Path(place), steps=30, save_interval=30, global_batch=8, **layout)
        return float(max(each["own"] for each in pool.run(play, options, 4, world=4)))


ITEMS: dict[str, tuple[Callable[[], Iterator[tuple[str, Any]]], Play]] = {
    "nan": (nans, play_nan),
    "spike": (spikes, play_spikes),
    "run": (runs, play_run),
    "ulp": (ulps, play_ulp),
    "slow": (slows, play_slow),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=list(ITEMS), choices=[*ITEMS, []])
    parser.add_argument("--out", type=Path, default=Path("build/battery/guards.jsonl"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {row["item"]: row for row in rows}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    with Pool(4) as pool, arguments.out.open("a") as out:
        for kind in arguments.kinds:
            items, act = ITEMS[kind]
            for name, item in items():
                if name in done:
                    continue
                began = time.monotonic()
                row = {"item": name, "kind": kind, **act(pool, item)}
                done[name] = row | {"commit": commit.strip(), "seconds": round(time.monotonic() - began, 2)}
                out.write(json.dumps(done[name]) + "\n")
                out.flush()
            here = [row for row in done.values() if row["kind"] == kind]
            print(f"{kind}: {sum(row['good'] for row in here)} of {len(here)}")
    return int(any(not row["good"] for row in done.values()))


if __name__ == "__main__":
    sys.exit(main())
