"""Break down how a run spent its time over all its processes: productive steps, repeated steps, saves, evaluations,
startup, the time between the end of a process and the start of the next process, and idle time.

The input is the rows of the metrics file and the events of the events file (training/metrics/meters.py): "begin" (a
process starts), "end", "started" (with the seconds until the first step), "save" and "evaluation" (with their seconds),
and events of guards, whose `to` is the step to which a rollback returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict


class StepRow(TypedDict, total=False):
    """The fields of a row of metrics that this module reads."""

    step: int
    skipped: int
    seconds: float | None


class EventRow(TypedDict, total=False):
    """The fields of an event. Each kind of event has some of these fields."""

    event: str
    step: int
    at: float
    seconds: float
    lost_steps: int
    lost_seconds: float
    last_at: float
    samples: list[int]
    to: int
    policy: str
    rank: int
    ratio: float
    save: str


@dataclass(frozen=True)
class Goodput:
    """A breakdown of how a run spent its time, in seconds."""

    total: float
    productive: float
    """Time of steps whose updates were applied and were not rolled back."""
    lost: float
    """Time of lost steps: steps that were skipped, rolled back, or repeated after a resume."""
    starts: float
    saves: float
    evaluations: float
    down: float
    """Time during which no process was running."""
    restarts: int
    """Number of restarts."""

    @property
    def idle(self) -> float:
        """Idle time, which is the total time minus all other times."""
        accounted = self.productive + self.lost + self.starts + self.saves + self.evaluations + self.down
        return max(0.0, self.total - accounted)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of a table: (name, text)."""
        yield "time since the begin", _duration(self.total)
        parts = {
            "productive": self.productive,
            "done again, or left out": self.lost,
            "starting": self.starts,
            "saving": self.saves,
            "evaluating": self.evaluations,
            "between processes": self.down,
            "idle": self.idle,
        }
        for name, seconds in parts.items():
            yield name, f"{100 * seconds / max(self.total, 1e-9):.1f} %, {_duration(seconds)}"
        yield "restarts", f"{self.restarts}"


def goodput(steps: Sequence[StepRow], events: Sequence[EventRow], written: float = 0.0) -> Goodput | None:
    """Compute the goodput of a run. steps, events: rows and events in the order in which they were written. written:
    time of the last row, at which the breakdown ends if the run has not ended. Return None if there are no events.

    >>> begin: EventRow = {"event": "begin", "step": 0, "at": 100.0}
    >>> again: EventRow = {"event": "begin", "step": 1, "at": 120.0, "lost_seconds": 4.0, "last_at": 112.0}
    >>> save, end = {"event": "save", "step": 1, "seconds": 1.0, "at": 108.0}, {"event": "end", "step": 2, "at": 126.0}
    >>> found = goodput([{"step": 1, "seconds": 5.0}, {"step": 2, "seconds": 5.0}], [begin, save, again, end])
    >>> found.total, found.productive, found.lost, found.down, found.idle, found.restarts
    (26.0, 10.0, 4.0, 8.0, 3.0, 1)
    """
    begins = [event for event in events if event["event"] == "begin"]
    if not begins:
        return None
    skipped, productive, left_out, undone = 0, 0.0, 0.0, _undone(events, [row.get("step", 0) for row in steps])
    for row in steps:
        was_skipped = row.get("skipped", 0) > skipped or row.get("step") in undone
        skipped = row.get("skipped", 0)
        seconds = row.get("seconds") or 0.0
        productive, left_out = (productive, left_out + seconds) if was_skipped else (productive + seconds, left_out)
    down, last = 0.0, begins[0]["at"]
    for event in events:
        if event["event"] == "begin":
            # A killed process writes no "end". The next "begin" contains the time of the killed process's last row.
            last = max(last, event.get("last_at", 0.0))
            down += max(0.0, event["at"] - last)
        last = max(last, event["at"])
    if events[-1]["event"] != "end":
        last = max(last, written)

    def spent(kind: str) -> float:
        return float(sum(event.get("seconds", 0.0) for event in events if event["event"] == kind))

    return Goodput(
        total=last - begins[0]["at"],
        productive=productive,
        lost=left_out + sum(event.get("lost_seconds", 0.0) for event in begins),
        starts=spent("started"),
        saves=spent("save"),
        evaluations=spent("evaluation"),
        down=down,
        restarts=len(begins) - 1,
    )


def _undone(events: Sequence[EventRow], steps: Sequence[int]) -> set[int]:
    """Return those of `steps` that rollbacks have undone and that were not repeated.

    >>> begin, back = {"event": "begin", "step": 0, "at": 0.0}, {"event": "nan", "step": 5, "to": 3, "at": 1.0}
    >>> _undone([begin, back], range(9)), _undone([begin, back, {**begin, "step": 4}], range(9))
    ({4, 5}, {4})
    """
    undone: set[int] = set()
    for event in events:
        if event["event"] == "begin":  # later steps are repeated
            undone = {step for step in undone if step <= event["step"]}
        elif "to" in event:
            undone |= {step for step in steps if event["to"] < step <= event["step"]}
    return undone


def _duration(seconds: float) -> str:
    """
    >>> _duration(7.25), _duration(754), _duration(12345)
    ('7.2 s', '12.6 min', '3.4 h')
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
