"""`--profile FIRST:LAST`: run torch's profiler over some steps; write a trace for a browser and a table with the ten
longest operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch

from mega.core.files import whole_file

LINES = 10


class ProfiledOperation(Protocol):
    """The totals that torch reports for all calls of one operation, in microseconds."""

    key: str
    count: int
    self_device_time_total: float
    self_cpu_time_total: float


class StepProfiler:
    """The profiler of one rank.

    directory: the folder for trace and table. report: function that prints a message if this rank prints messages. The
    table is also written to a file.
    """

    def __init__(self, steps: range, rank: int, directory: Path, report: Callable[[str], None]):
        self._steps, self._rank, self._directory, self._report = steps, rank, directory, report
        self._running: torch.profiler.profile | None = None
        self._first = self._last = 0

    def before_step(self, step: int) -> None:
        """Start the profiler before its first step. On a GPU the trace may begin with queued work of earlier steps."""
        if step in self._steps and self._running is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._running, self._first = torch.profiler.profile(activities=kinds, acc_events=True), step
            self._running.start()

    def after_step(self, step: int) -> None:
        """Write the profile after the last profiled step. Called when the results of a step have been read."""
        self._last = step
        if step >= self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Stop the profiler and write the profile, even if the run ends early. Write errors are reported but not
        raised."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        first, last = self._first, max(self._first, self._last)
        trace = self._directory / f"profile-steps-{first}-{last}-rank-{self._rank}.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(trace))
            lines = summary(running.key_averages())
            with whole_file(trace.with_name(trace.name.replace(".json.gz", ".txt"))) as file:
                file.write("\n".join([*lines, ""]).encode())
        except (OSError, RuntimeError) as error:
            self._report(f"--profile: {trace} cannot be written: {error}")
            return
        self._report(f"profile of steps {first} to {last} of rank {self._rank}: {trace}")
        for line in lines:
            self._report(line)


def missed(steps: range, first: int, last: int) -> str:
    """Return a message if a run with steps `first` to `last` lacks some of the steps to profile; otherwise "".

    >>> missed(range(10, 13), 1, 20), missed(range(10, 13), 1, 11)
    ('', '--profile 10:12: the run has steps 1 to 11, so that steps 10 to 11 are profiled')
    >>> missed(range(10, 13), 1, 8)
    '--profile 10:12: the run has steps 1 to 8, so that none is profiled'
    """
    common = range(max(steps[0], first), min(steps[-1], last) + 1)
    if common == steps:
        return ""
    subject = f"steps {common[0]} to {common[-1]} are" if common else "none is"
    return f"--profile {steps[0]}:{steps[-1]}: the run has steps {first} to {last}, so that {subject} profiled"


def summary(events: Iterable[ProfiledOperation]) -> list[str]:
    """Return the table of operations with the longest self time, on the device if there is one. events: the result of
    `key_averages`."""
    rows = [(float(each.self_device_time_total), float(each.self_cpu_time_total), each) for each in events]
    on_device = any(device for device, _, _ in rows)
    times = sorted(((device if on_device else host, each) for device, host, each in rows), key=lambda row: -row[0])
    total = sum(time for time, _ in times) or 1.0
    return [
        f"  {100 * time / total:5.1f} %  {time / 1e3:10.2f} ms  {each.count:7d} x  {str(each.key)[:70]}"
        for time, each in times[:LINES]
    ]
