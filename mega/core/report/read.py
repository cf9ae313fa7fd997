"""Read the data of a report: a run's metrics and the status of its checkpoints, or the JSON of an evaluation.

Rows that are incomplete because the run was killed are counted, but not shown. This module does not depend on HTML.
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
from mega.core.untrusted import Json, below, parse_json, read_limited

MOST_BYTES = 1 << 31
_MOST = 1 << 53
"""Largest number of a row or an event that is read; larger ones are damage."""
Series = list[tuple[float, float]]
"""A curve: (step, value) pairs in the order of steps, with NaN for a missing value."""


class RunEvent(NamedTuple):
    """An event at a step, as text."""

    step: int
    text: str


@dataclass
class RunRecord:
    """The data of a run's report."""

    name: str
    series: dict[str, Series] = field(default_factory=dict)
    """Metric -> curve."""
    sets: list[str] = field(default_factory=list)
    """Names of the validation sets."""
    events: list[RunEvent] = field(default_factory=list)
    samples: list[RunEvent] = field(default_factory=list)
    """Texts that the model generated, with the steps at which they were generated."""
    config: str = ""
    """Content of run.toml of the newest checkpoint, or ""."""
    broken: int = 0
    """Number of lines in the metrics file that are not valid rows."""
    goodput: Goodput | None = None
    """The breakdown of how the run spent its time; None if the run has no events file."""


@dataclass(frozen=True)
class EvaluationRecord:
    """The JSON of an evaluation, as written by `mega eval`."""

    name: str
    content: Mapping[str, Any]


@dataclass(frozen=True)
class CorpusRecord:
    """The records of the steps that prepared a corpus, in order, as written by `mega corpus`. Each record has a name,
    settings and counts."""

    name: str
    steps: list[Mapping[str, Any]]


CORPUS_RECORD = ".corpus.json"
"""Name, or suffix, of the record file that a step of `mega corpus` writes in its output folder or next to its output
file."""


def corpus_records(place: Path) -> list[Path]:
    """Return the paths of the records for an output folder, for all outputs inside a folder, or for an output file.
    Numbers in names are sorted by value."""
    if not place.is_dir():
        path_of_file = place.with_name(f".{place.name}{CORPUS_RECORD}")
        return [path_of_file] if path_of_file.is_file() else []
    path = place / CORPUS_RECORD
    if path.is_file():
        return [path]
    paths = [*place.glob(f"*/{CORPUS_RECORD}"), *place.glob(f".*{CORPUS_RECORD}")]
    return sorted(paths, key=lambda path: [int(part) if part.isdigit() else part for part in _PARTS.split(str(path))])


_PARTS = re.compile(r"(\d+)")


def _corpus(place: Path, records: list[Path]) -> CorpusRecord:
    steps = []
    for path in records:
        try:
            step_record = json.loads(read_limited(path, MOST_BYTES, str(path)))
            step_record["counts"]["measures"]["characters"] = step_record["counts"]["measures"].get("characters", {})
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: is not a record of a step of `mega corpus`") from None
        folder = path.parent.name if path.name == CORPUS_RECORD else path.name[1 : -len(CORPUS_RECORD)]
        steps.append(
            step_record
            | {"name": folder if folder.endswith(step_record["step"]) else f"{folder} ({step_record['step']})"}
        )
    return CorpusRecord(place.resolve().name or str(place), steps)


def read(place: Path) -> RunRecord | EvaluationRecord | CorpusRecord:
    """Read the data for a report. place: a run's directory or metrics file, an evaluation's JSON, or a corpus. Errors:
    ValueError naming the file."""
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
    if isinstance(content, dict) and "step" in content:  # a metrics file with a single row
        return _run(place, place.parent)
    raise ValueError(f"{place}: is neither a run's metrics nor an evaluation's JSON")


def _run(metrics: Path, directory: Path) -> RunRecord:
    record = RunRecord(directory.resolve().name or str(directory))
    rows = list(_rows(metrics, record))
    if not rows:
        if record.broken > 1:  # a single invalid line may be a first row that is still being written
            raise ValueError(f"{metrics}: is neither a run's metrics nor an evaluation's JSON")
        raise ValueError(f"{metrics}: holds no row of metrics; the run has not come to its first step")
    for row in rows:
        for name, value in row.items():
            if name == "step" or isinstance(value, bool):
                continue
            if isinstance(value, int | float) or value is None:
                number = math.nan if value is None else float(value)
                record.series.setdefault(name, []).append((row["step"], number))
            elif isinstance(value, str):
                record.samples.append(RunEvent(row["step"], f"{name}: {value}"))
    record.sets = list(dict.fromkeys(_held_out(rows)))
    run_events = list(_read_events(metrics))
    record.goodput = goodput([cast(StepRow, row) for row in rows if "lr" in row], run_events, metrics.stat().st_mtime)
    lines = [*_change_events(rows, run_events), *_guard_events(run_events), *_checkpoint_events(directory)]
    record.events = sorted(lines, key=lambda event: event.step)
    if metrics.with_suffix(".jsonl.previous").is_file():
        record.events.insert(
            0, RunEvent(0, f"the run was started over; the rows before are in {metrics.name}.previous")
        )
    steps = sorted(directory.glob("step-*/run.toml"))
    if steps:
        record.config = steps[-1].read_text(encoding="utf-8", errors="replace")
    return record


def _rows(metrics: Path, found: RunRecord) -> Iterable[dict[str, Any]]:
    for line in read_limited(metrics, MOST_BYTES, str(metrics)).decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        values = row if isinstance(row, dict) else {}
        values = {name: value for name, value in values.items() if _is_row_value(name, value)}
        if isinstance(values.get("step"), int):
            yield values
        elif line.strip():
            found.broken += 1


def _read_events(metrics: Path) -> Iterable[EventRow]:
    """Yield the events of a run from the events file next to the metrics file. `training/metrics/meters.py` writes this
    file."""
    path = metrics.with_suffix(f".events{metrics.suffix}")
    if not path.is_file():
        return
    for line in read_limited(path, MOST_BYTES, str(path)).decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("event"), str):
                event = {name: value for name, value in row.items() if _is_event_value(name, value)}
                if {"step", "at"} <= event.keys():
                    yield cast(EventRow, event)


def _is_row_value(name: str, value: object) -> bool:
    """Whether a field of a row of metrics has the type that this module expects. A damaged file may contain any
    value."""
    if isinstance(value, int):
        return abs(value) <= _MOST
    if name in ("skipped", "batch"):
        return False
    return isinstance(value, float | None) or (isinstance(value, str) and name not in ("loss", "loss_scale", "seconds"))


def _is_event_value(name: str, value: object) -> bool:
    """Whether a field of an event has the type that this module expects. A damaged file may contain any value."""
    if name in ("event", "policy", "save"):
        return isinstance(value, str)
    if name == "samples":
        return isinstance(value, list) and len(value) == 2 and all(isinstance(each, int) for each in value)
    kinds = int if name in ("step", "to", "rank", "lost_steps") else int | float
    return isinstance(value, kinds) and abs(value) <= _MOST


def _guard_events(happened: list[EventRow]) -> Iterable[RunEvent]:
    """Yield report events for guards and resumes."""
    for row in happened:
        if row["event"] in ("nan", "spike"):
            first, end = row.get("samples", (0, 0))
            back = f", back at step {row['to']}" if "to" in row else ""
            consequence = f": samples {first:,} to {end - 1:,} are left out{back}"
            consequence = {"warn": "", "stop": ": the run ends"}.get(row.get("policy", ""), consequence)
            problem = "numbers are not finite" if row["event"] == "nan" else "a spike"
            yield RunEvent(row["step"], f"{problem}{consequence}")
        elif row["event"] == "slow rank":
            yield RunEvent(row["step"], f"rank {row.get('rank')} is slow: {row.get('ratio')} times as long as others")
        elif row["event"] == "begin" and row["step"]:
            again = f"; {row['lost_steps']} steps were done again" if row.get("lost_steps") else ""
            yield RunEvent(row["step"], f"resumed{again}")


def _held_out(rows: list[dict[str, object]]) -> Iterable[str]:
    """Yield the name of the validation set for each row with validation results. The first metric in a validation row
    is the loss on the validation set; names of other losses in the row may also end in `_loss`."""
    for row in rows:
        first = next((name for name in row if name != "step"), "")
        if "loss" not in row and first.endswith("_loss"):
            yield first.removesuffix("_loss")


def _change_events(rows: list[dict[str, Any]], happened: list[EventRow]) -> Iterable[RunEvent]:
    """Yield report events for changes between consecutive rows, except steps that guards have reported."""
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


def _checkpoint_events(directory: Path) -> Iterable[RunEvent]:
    """Yield report events for saved checkpoints, with their verdicts."""
    content: Json = None
    with contextlib.suppress(OSError, ValueError):
        content = parse_json((directory / "verdicts.json").read_bytes(), "verdicts.json")
    for path in sorted(directory.glob("step-*")):
        number = path.name.removeprefix("step-")
        if path.is_dir() and number.isdecimal():
            verdict = below(content, "steps", str(int(number)))
            reason = f": {verdict['reason']}" if verdict.get("reason") else ""
            status = f"; {verdict['status']}{reason}" if "status" in verdict else ""
            yield RunEvent(int(number), f"saved{status}")
