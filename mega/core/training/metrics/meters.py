"""Report the progress of a run: one row of metrics per step, log lines, and a progress bar on a terminal. This module
does not depend on ranks.

Rows are always written to a JSON-lines file (file.py); flags also send them to TensorBoard, Weights & Biases and
MLflow. Events between steps are written to a second file, from which nothing is removed. A run that does not resume
renames the files of an earlier run, except after a restart by the same launcher before the first save.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mega.core.activity import ACTIVITY
from mega.core.config.metrics_owner import events_file, recorded_save
from mega.core.config.sections import LogConfig
from mega.core.processes.world import restart_count
from mega.core.terminal import stderr_console
from mega.core.training.metrics.file import MetricsFile
from mega.core.training.metrics.output import print_line, warn
from mega.core.training.metrics.trackers import Trackers, held_out_values, training_values

if TYPE_CHECKING:  # imports optional packages
    from rich.progress import Progress, TaskID
    from torch.utils.tensorboard import SummaryWriter

    from mega.core.training.metrics.exporter import Exporter

COLUMNS = 120
"""Maximum width of a log line on a terminal with a progress bar; lines printed elsewhere have all fields."""

ALWAYS = 100.0
"""The priority of a field that is never omitted from the log line."""

EARLY = (1, 10)
"""Steps after the start of the run that are always logged unless a bar is shown, so that users see progress before the
first --log-interval."""

MOST_LOSS, LARGE = 700.0, 1e6
"""The perplexity of a loss above MOST_LOSS is infinite; a perplexity of at least LARGE is printed with four digits and
an exponent."""

SLOW = 1.1
"""The log line contains the slowest rank if the rank's working time exceeds this multiple of the other ranks' time."""

LEAST_TFLOPS = 0.01
"""TFLOP/s below this value are not printed."""


class Meters:
    """Reports the steps and events of one run. Only rank 0 has this object.

    start: the step from which the run resumes. steps: index of the last step. flops_per_token: FLOPs of the model per
    token, forward and backward.
    devices: number of devices. replicas: number of data-parallel replicas. peak: peak TFLOP/s of one device, or None if
    unknown.
    save: --save of the run. settings: the options of the run. terms: names of the terms of the loss, if there are
    several. shown: names of additional metrics that the log line shows. fail: called with the error if the metrics file
    cannot be written, so that the run can save before it ends; if None, the error is raised. still_s: see `Exporter`.
    lines: function that prints a log line, used unless a bar is shown.
    """

    def __init__(
        self,
        options: LogConfig,
        *,
        start: int,
        steps: int,
        flops_per_token: float,
        devices: int,
        peak: float | None,
        replicas: int = 1,
        save: str | None = None,
        settings: Mapping[str, Mapping[str, object]] | None = None,
        terms: Sequence[str] = (),
        shown: Sequence[str] = (),
        fail: Callable[[OSError], None] | None = None,
        still_s: float = math.inf,
        lines: Callable[[str], None] = print_line,
    ):
        self.options, self.steps, self.devices = options, steps, devices
        self.flops_per_token, self.peak = flops_per_token, peak
        self.replicas, self._terms, self._shown = replicas, tuple(terms), tuple(shown)
        self._exporter = _exporter(options.metrics_port, steps, still_s)
        last = _last_step(Path(options.metrics)) if start and options.wandb else 0
        self._trackers = Trackers(options, start=start, last=last, settings=settings or {})
        resumes = bool(start) or _started_again(Path(options.metrics))
        lost_rows = _before(Path(options.metrics), start) if resumes else {}
        self._lines, self._rows = lines, MetricsFile(options.metrics, start, resumes, fail)
        self._events = _open_events(Path(options.metrics), resumes)
        self._board = _board(options.tensorboard_dir, start, resumes)
        # No bar if stdout or stderr is a file or a pipe, because control characters would mix with the log lines.
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self._bar = _bar(start, steps) if options.progress and terminal and lines is print_line else None
        self._start = start
        self._steps = self._tokens = 0
        self._seconds = 0.0
        """Seconds since the last log line, in which the run completed `_steps` steps with `_tokens` tokens."""
        self.slowest: tuple[int, float] | None = None
        """The rank with the longest working time, and the ratio of this time to that of the other ranks; None if
        unknown."""
        self._started, self._last = False, start
        self._began = max(ACTIVITY.began, lost_rows.get("last_at", 0.0))
        saves_to = None if save is None else recorded_save(options.metrics, save)
        begin = {**lost_rows, "at": round(self._began, 3), "launcher": _launcher(), "save": saves_to}
        self.event(start, "begin", **begin)

    def step(self, step: int, row: Mapping[str, float], tokens: int, memory: int) -> None:
        """Record the metrics of a step. Every `log_interval` steps, and at the last step, also print a log line. row:
        metrics by name, including "seconds", "loss" and "consumed" (samples). tokens: number of tokens in the global
        batch. memory: bytes used on this rank.
        """
        if not self._started:
            self._started = True
            self.event(step - 1, "started", seconds=max(0.0, time.time() - self._began - row["seconds"]))
        self._last = step
        self._steps += 1
        self._tokens += tokens
        self._seconds += row["seconds"]
        self._rows.write({"step": step, **row})
        if self._exporter is not None:
            self._exporter.step(step, row, self._figures(tokens, row["seconds"], memory))
            if self.slowest is not None:
                self._exporter.slowest(*self.slowest)
        if step % self.options.tensorboard_interval == 0:
            self._plot({name.replace("_", "-"): value for name, value in row.items()}, step)
            if self._trackers:
                sizes = {"tokens": tokens, "devices": self.devices, "replicas": self.replicas, "memory": memory}
                flops = self.flops_per_token
                values = training_values(row, **sizes, flops=flops, peak=self.peak, terms=self._terms)
                self._trackers.log(step, values)
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=step, description=f"loss {row['loss']:.4f}")
        if step % self.options.log_interval == 0 or step == self.steps:
            self.report(self._line(step, row, memory))
            self._rate(step, memory)
        elif self._bar is None and step - self._start in EARLY:
            self.report(self._line(step, row, memory))

    def _figures(self, tokens: int, seconds: float, memory: int) -> dict[str, float | None]:
        """Return the speed and memory of a step, per device."""
        rate, tflops = self._speed(tokens, seconds)
        speed = {"tokens_per_second_per_device": rate, "tflops_per_device": tflops, "memory_bytes": float(memory)}
        return {**speed, "mfu_ratio": tflops / self.peak if self.peak else None}

    def _rate(self, step: int, memory: int) -> None:
        """Write a row with the speed since the last row that has a speed, also to TensorBoard, and reset the counters
        of steps, tokens and seconds."""
        rate, tflops = self._speed(self._tokens, self._seconds)
        speed = {"tokens_per_second_per_device": rate, "tflops_per_device": tflops, "memory": memory}
        self._rows.write({"step": step, **speed})
        shares = {"mfu": tflops / self.peak} if self.peak else {}
        self._plot({name.replace("_", "-"): value for name, value in (speed | shares).items()}, step)
        self._steps, self._tokens, self._seconds = 0, 0, 0.0

    def _speed(self, tokens: int, seconds: float) -> tuple[float, float]:
        """Return the tokens per second and TFLOP/s, per device."""
        rate = tokens / max(seconds, 1e-9) / self.devices
        return rate, rate * self.flops_per_token / 1e12

    def _line(self, step: int, row: Mapping[str, float], memory: int) -> str:
        """Return the log line of a step."""
        each = self._seconds / self._steps
        (rate, tflops), unit = self._speed(self._tokens, self._seconds), "/device" if self.devices > 1 else ""
        eta = f"eta {_clock(int((self.steps - step) * each))}" if self._bar is None else ""  # the bar shows an ETA
        return fitting(
            [
                (ALWAYS, f"step {step:>{len(str(self.steps))}}/{self.steps}"),
                (3, f"samples {row['consumed']}"),
                (ALWAYS, f"loss {row['loss']:.6f}"),
                (7, _shown("lr {:.3e}", row.get("lr"))),
                (8, _shown("grad norm {:.3f}", row.get("grad_norm"))),
                (6, f"{1000 * each:.1f} ms/step"),
                (5, f"{rate:,.0f} tokens/s{unit}"),
                (1, f"{tflops:.2f} TFLOP/s{unit}" if tflops >= LEAST_TFLOPS else ""),
                (4, f"MFU {100 * tflops / self.peak:.1f}%" if self.peak else ""),
                (2, f"{memory / 2**30:.2f} GiB" if memory else ""),
                (9, f"skipped {row['skipped']}" if row.get("skipped") else ""),
                (6.2, "rank {} {:.2f}x".format(*self.slowest) if self.slowest and self.slowest[1] > SLOW else ""),
                *_extras(row),
                *((6.1, f"{name} {row[name]:.4f}") for name in (*self._terms, *self._shown)),
                (ALWAYS, eta),
            ],
            math.inf if self._bar is None else min(COLUMNS, self._bar[0].console.width),
        )

    def evaluation(self, step: int, split: str, measured: Mapping[str, float]) -> None:
        """Report and write the results of one evaluation. measured: results by name, including "loss", which is NaN if
        no token has a loss weight."""
        loss, metrics = measured["loss"], {name: value for name, value in measured.items() if name != "loss"}
        # Perplexity is that of the language-modelling term; a loss on labels has no perplexity.
        perplexity = {} if "class" in measured else {"perplexity": _perplexity(measured.get("lm", loss))}
        values = {"loss": loss, **perplexity, **metrics}
        row = {"step": step, **{f"{split}_{name}": value for name, value in values.items()}}
        # A finished run that is started again evaluates its last step again.
        if self._rows.replace(row) if step == self._start == self._last else self._rows.write(row):
            self._plot({f"{name} {split}": value for name, value in values.items()}, step)
            self._trackers.log(step, held_out_values(split, values))
        if self._exporter is not None:
            self._exporter.evaluation(split, measured)
        text = "".join(f" | {name} {value:{'.3f' if value < LARGE else '.4g'}}" for name, value in perplexity.items())
        text += "".join(f" | {name} {value:.6f}" for name, value in metrics.items())
        self.report(f"{split} at step {step} | loss {loss:.6f}{text}")

    def event(self, step: int, what: str, **details: object) -> None:
        """Append an event and its time to the events file, which a resumed run does not truncate. report/goodput.py
        sums the "seconds" of events."""
        details = {name: each for name, each in details.items() if each is not None}
        if self._events is not None:
            with contextlib.suppress(OSError), self._events.open("a", encoding="utf-8") as events:
                row = {"step": step, "event": what, "at": round(time.time(), 3), **details}
                events.write(json.dumps(row) + "\n")

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text that the model has generated."""
        self._rows.write({"step": step, name: text})

    def report(self, line: str) -> None:
        """Print a line on stdout, above the bar if there is one."""
        if self._bar is not None:
            self._bar[0].console.print(line, highlight=False, markup=False, emoji=False)
        else:
            self._lines(line)

    def close(self) -> None:
        self.event(self._last, "end")
        self._rows.close()
        self._trackers.close()
        if self._exporter is not None:
            self._exporter.close()
        if self._bar is not None:
            self._bar[0].stop()
        if self._board is not None:
            board, self._board = self._board, None
            self._plotting(board.close)

    def _plot(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars to TensorBoard, if TensorBoard is on."""
        for name, value in values.items():
            if self._board is not None and isinstance(value, int | float):
                self._plotting(partial(self._board.add_scalar, name, value, step))

    def _plotting(self, act: Callable[[], object]) -> None:
        """Call TensorBoard. After an error, turn TensorBoard off and continue, because the metrics file contains the
        same values."""
        try:
            act()
        except OSError as error:
            self._board = None
            problem = f"--tensorboard-dir {self.options.tensorboard_dir}: {error.strerror or error}"
            warn(f"{problem}; the run continues without it")


def fitting(fields: Sequence[tuple[float, str]], columns: float = COLUMNS) -> str:
    """Join (priority, text) fields into a line of at most `columns` characters; omit empty fields and, if necessary,
    the fields of the lowest priority.

    >>> fitting([(9, "step 1/10"), (1, "0.30 GiB"), (2, ""), (3, "eta 0:00:09")], columns=24)
    'step 1/10 | eta 0:00:09'
    """
    fitting_fields = [(priority, text) for priority, text in fields if text]
    while len(line := " | ".join(text for _, text in fitting_fields)) > columns and any(
        one[0] < ALWAYS for one in fitting_fields
    ):
        fitting_fields.remove(min(fitting_fields, key=lambda field: field[0]))
    return line


def _shown(template: str, value: float | None) -> str:
    """Format a number, or return "" for None."""
    return "" if value is None else template.format(value)


def _extras(row: Mapping[str, float]) -> list[tuple[float, str]]:
    """Return (priority, text) fields for metrics that only some runs report.

    >>> _extras({"loss": 2.0, "params_norm": 12.3456, "zeros": 0.25})
    [(6.4, 'params norm 12.346'), (6.2, 'zeros 25.0%')]
    """
    formats = {"loss_scale": (6.6, "loss scale {:g}"), "params_norm": (6.4, "params norm {:.3f}")}
    formats |= {"zeros": (6.2, "zeros {:.1%}"), "largest_share": (5.8, "largest expert {:.1%}")}
    if row.get("dropped_share"):
        formats |= {"dropped_share": (5.9, "dropped {:.1%}")}
    return [(rank, template.format(row[name])) for name, (rank, template) in formats.items() if name in row]


def _perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows."""
    return math.exp(loss) if not loss > MOST_LOSS else math.inf


def _clock(seconds: int) -> str:
    """Format seconds as h:mm:ss."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _before(path: Path, start: int) -> dict[str, float]:
    """Summarise the rows that a resume at step `start` discards: the number of steps, their duration in seconds, and
    the time of the last row."""
    if not path.is_file():
        return {}
    steps, seconds = 0, 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            if row["step"] > start and "lr" in row:
                steps, seconds = steps + 1, seconds + row["seconds"]
    return {"lost_steps": steps, "lost_seconds": round(seconds, 3), "last_at": round(path.stat().st_mtime, 3)}


def _launcher() -> str:
    """Return an identifier of the parent process, which may restart this process."""
    return f"{socket.gethostname()}:{os.getppid()}"


def _started_again(metrics: Path) -> bool:
    """Whether the existing events were written by earlier ranks of the same launcher."""
    if not restart_count():
        return False
    launcher = None
    with contextlib.suppress(OSError):
        for line in events_file(str(metrics)).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                launcher = event.get("launcher") if event["event"] == "begin" else launcher
    return launcher == _launcher()


def _open_events(metrics: Path, resumes: bool) -> Path | None:
    """Return the events file, after renaming that of an earlier run to `.previous`; None if metrics are written to a
    pipe or a device."""
    if metrics.exists() and not metrics.is_file():
        return None
    events = events_file(str(metrics))
    if not resumes and events.is_file():
        os.replace(events, events.with_suffix(events.suffix + ".previous"))
    return events


def _last_step(path: Path) -> int:
    """Return the last step in a metrics file; 0 if the file contains no step."""
    last = 0
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as rows:
        for line in rows:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                last = max(last, int(json.loads(line)["step"]))
    return last


def _board(directory: str | None, start: int, resumes: bool) -> SummaryWriter | None:
    """Return TensorBoard's writer. Values after step `start` are purged, as in the metrics file."""
    if directory is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            f"--tensorboard-dir {directory}: needs the package tensorboard (pip install tensorboard)"
        ) from None
    return SummaryWriter(directory, purge_step=start + 1 if resumes else None)


def _exporter(port: int | None, steps: int, still_s: float) -> Exporter | None:
    if port is None:
        return None
    from mega.core.training.metrics.exporter import Exporter

    return Exporter(port, steps=steps, still_s=still_s)


def _bar(start: int, steps: int) -> tuple[Progress, TaskID]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=stderr_console())
    progress.start()
    return progress, progress.add_task("starting", total=steps, completed=start)
