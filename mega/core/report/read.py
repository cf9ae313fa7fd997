"""What a report is made of: the rows of a run's metrics, what is known of its checkpoints, or an evaluation's JSON.

Rows that a kill has broken are counted, not shown. It knows the names of rows and no HTML.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from mega.core.report.goodput import EventRow, Goodput, StepRow, goodput
from mega.core.untrusted import read_limited

MOST_BYTES = 1 << 31
Series = list[tuple[float, float]]
"""Steps and values, in order; NaN where there was no number."""


class RunEvent(NamedTuple):
    """Something worth knowing that happened at a step, in words."""

    step: int
    text: str


@dataclass
class RunRecord:
    """series: name of a row's value -> curve. sets: names of the held-out sets. samples: text that the run has shown,
    with its step. config: run.toml of its newest checkpoint, or "". broken: lines that are not rows. goodput: of a run
    that kept what happened between its steps."""

    name: str
    series: dict[str, Series] = field(default_factory=dict)
    sets: list[str] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    samples: list[RunEvent] = field(default_factory=list)
    config: str = ""
    broken: int = 0
    goodput: Goodput | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """An evaluation's JSON, as `mega eval` writes it."""

    name: str
    content: Mapping[str, Any]


@dataclass(frozen=True)
class CorpusRecord:
    """The records of a corpus's steps, in order: each with a name, its settings and counts, as `mega corpus` writes
    them."""

    name: str
    steps: list[Mapping[str, Any]]


CORPUS_RECORD = ".corpus.json"
"""The name, or the end of the name, of what a step of `mega corpus` notes in or next to its output."""


def corpus_records(place: Path) -> list[Path]:
    """The records of a folder that a step wrote, of all such folders in one, or of a file. Numbers sort as numbers."""
    if not place.is_dir():
        one = place.with_name(f".{place.name}{CORPUS_RECORD}")
        return [one] if one.is_file() else []
    own = place / CORPUS_RECORD
    if own.is_file():
        return [own]
    found = [*place.glob(f"*/{CORPUS_RECORD}"), *place.glob(f".*{CORPUS_RECORD}")]
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in _PARTS.split(str(path))])


_PARTS = re.compile(r"(\d+)")


def _corpus(place: Path, records: list[Path]) -> CorpusRecord:
    steps = []
    for path in records:
        try:
            found = json.loads(read_limited(path, MOST_BYTES, str(path)))
            found["counts"]["measures"]["characters"] = found["counts"]["measures"].get("characters", {})
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: is not a record of a step of `mega corpus`") from None
        folder = path.parent.name if path.name == CORPUS_RECORD else path.name[1 : -len(CORPUS_RECORD)]
        steps.append(found | {"name": folder if folder.endswith(found["step"]) else f"{folder} ({found['step']})"})
    return CorpusRecord(place.resolve().name or str(place), steps)


def read(place: Path) -> RunRecord | EvaluationRecord | CorpusRecord:
    """A run's directory or file of metrics, an evaluation's JSON, or a corpus. Errors: ValueError naming the file."""
    if records := corpus_records(place):
        return _corpus(place, records)
    if place.is_dir():
        metrics = place / "metrics.jsonl"
        if not metrics.is_file():
            raise ValueError(
                f"{place}: holds no metrics.jsonl; give a run's directory, its --metrics, an --json of eval, a corpus"
            )
        return _run(metrics, place)
    if not place.is_file():
        raise ValueError(f"{place}: no such file or directory")
    text = read_limited(place, MOST_BYTES, str(place)).decode("utf-8", "replace")
    try:
        content = json.loads(text)
    except ValueError:
        return _run(place, place.parent)
    if isinstance(content, dict) and ("figures" in content or "results" in content):
        return EvaluationRecord(place.name, content)
    if isinstance(content, dict) and "step" in content:  # metrics of a single row
        return _run(place, place.parent)
    raise ValueError(f"{place}: is neither a run's metrics nor an evaluation's JSON")


def _run(metrics: Path, directory: Path) -> RunRecord:
    found = RunRecord(directory.resolve().name or str(directory))
    rows = list(_rows(metrics, found))
    if not rows:
        if found.broken > 1:  # one may be a first row that is being written
            raise ValueError(f"{metrics}: is neither a run's metrics nor an evaluation's JSON")
        raise ValueError(f"{metrics}: holds no row of metrics; the run has not come to its first step")
    for row in rows:
        for name, value in row.items():
            if name == "step" or isinstance(value, bool):
                continue
            if isinstance(value, int | float) or value is None:
                number = math.nan if value is None else float(value)
                found.series.setdefault(name, []).append((row["step"], number))
            elif isinstance(value, str):
                found.samples.append(RunEvent(row["step"], f"{name}: {value}"))
    found.sets = list(dict.fromkeys(_held_out(rows)))
    happened = list(_happened(metrics))
    found.goodput = goodput([cast(StepRow, row) for row in rows if "lr" in row], happened, metrics.stat().st_mtime)
    lines = [*_changes(rows, happened), *_guarded(happened), *_saved(directory)]
    found.events = sorted(lines, key=lambda event: event.step)
    if metrics.with_suffix(".jsonl.previous").is_file():
        found.events.insert(0, RunEvent(0, f"the run was started over; the rows before are in {metrics.name}.previous"))
    steps = sorted(directory.glob("step-*/run.toml"))
    if steps:
        found.config = steps[-1].read_text(encoding="utf-8", errors="replace")
    return found


def _rows(metrics: Path, found: RunRecord) -> Iterable[dict[str, Any]]:
    for line in read_limited(metrics, MOST_BYTES, str(metrics)).decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row
        elif line.strip():
            found.broken += 1


def _happened(metrics: Path) -> Iterable[EventRow]:
    """The events that a run has kept next to its metrics, as training/metrics/meters.py names their file."""
    path = metrics.with_suffix(f".events{metrics.suffix}")
    if not path.is_file():
        return
    for line in read_limited(path, MOST_BYTES, str(path)).decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("at"), int | float) and {"step", "event"} <= row.keys():
                yield cast(EventRow, row)


def _guarded(happened: list[EventRow]) -> Iterable[RunEvent]:
    """What guards found."""
    for row in happened:
        if row["event"] in ("nan", "spike"):
            first, end = row.get("samples", (0, 0))
            back = f", back at step {row['to']}" if "to" in row else ""
            done = f": samples {first:,} to {end - 1:,} are left out{back}"
            done = {"warn": "", "stop": ": the run ends"}.get(row.get("policy", ""), done)
            what = "numbers are not finite" if row["event"] == "nan" else "a spike"
            yield RunEvent(row["step"], f"{what}{done}")
        elif row["event"] == "slow rank":
            yield RunEvent(row["step"], f"rank {row.get('rank')} is slow: {row.get('ratio')} times as long as others")
        elif row["event"] == "begin" and row["step"]:
            again = f"; {row['lost_steps']} steps were done again" if row.get("lost_steps") else ""
            yield RunEvent(row["step"], f"resumed{again}")


def _held_out(rows: list[dict[str, object]]) -> Iterable[str]:
    """The sets that rows are of. Such a row begins with the set's loss; other losses of it may end in `_loss` too."""
    for row in rows:
        first = next((name for name in row if name != "step"), "")
        if "loss" not in row and first.endswith("_loss"):
            yield first.removesuffix("_loss")


def _changes(rows: list[dict[str, Any]], happened: list[EventRow]) -> Iterable[RunEvent]:
    """What rows say by differing from the row before, but for what guards have said of the same step."""
    last: dict[str, Any] = {}
    guarded = {row["step"] for row in happened if row["event"] in ("nan", "spike")}
    for row in rows:
        step = row["step"]
        if "loss" in row and row["loss"] is None:
            yield RunEvent(step, "the loss is not finite")
        if "skipped" in row and row["skipped"] > last.get("skipped", 0) and step not in guarded:
            yield RunEvent(step, "the update was skipped: gradients are not finite")
        if "batch" in row and row["batch"] != last.get("batch", row["batch"]):
            yield RunEvent(step, f"the global batch goes from {last['batch']} to {row['batch']}")
        if row.get("loss_scale") is not None and row["loss_scale"] != last.get("loss_scale", row["loss_scale"]):
            yield RunEvent(step, f"the loss scale goes from {last['loss_scale']:g} to {row['loss_scale']:g}")
        last.update({name: value for name, value in row.items() if value is not None})


def _saved(directory: Path) -> Iterable[RunEvent]:
    """Checkpoints that are there, and what became known of them."""
    try:
        verdicts = json.loads((directory / "verdicts.json").read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        verdicts = {}
    for path in sorted(directory.glob("step-*")):
        number = path.name.removeprefix("step-")
        if path.is_dir() and number.isdecimal():
            said = verdicts.get(str(int(number)), {}) if isinstance(verdicts, dict) else {}
            reason = f": {said['reason']}" if said.get("reason") else ""
            status = f"; {said['status']}{reason}" if "status" in said else ""
            yield RunEvent(int(number), f"saved{status}")
