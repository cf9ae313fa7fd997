"""What a run reports: one row of numbers a step, a log line now and then, a bar on a terminal. Knows no ranks.

Rows go to a JSON-lines file, always; to TensorBoard, Weights & Biases and MLflow by flag. A run that resumes cuts off
the rows after the step that it resumes from, so the file has each step once. What happens between steps goes to a file
next to it, of which nothing is cut. A run that begins from nothing leaves both to the one before it, but not to ranks
that a launcher has started again before their first save.
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
from typing import TYPE_CHECKING, TextIO

from mega.core.activity import ACTIVITY
from mega.core.config.sections import LogConfig
from mega.core.files import whole_file
from mega.core.terminal import stderr_console
from mega.core.training.metrics.output import complain, print_line
from mega.core.training.metrics.trackers import Trackers, held_out_values, training_values

if TYPE_CHECKING:  # needs a package of an extra
    from rich.progress import Progress, TaskID
    from torch.utils.tensorboard import SummaryWriter

    from mega.core.training.metrics.exporter import Exporter

COLUMNS = 120
"""Of a line of the log on a terminal, at the most; where lines go to a file they have every field."""

ALWAYS = 100.0
"""The rank of a field that stays in the line, however long it is."""

EARLY = (1, 10)
"""Steps since the start that are logged wherever there is no bar, so that a run is seen to work before --log-interval
has passed."""

MOST_LOSS, LARGE = 700.0, 1e6
"""Above the one, a perplexity is infinite; from the other on, it is shown by four digits and an exponent."""

SLOW = 1.1
"""From so many times as long as others', the own work of the slowest rank is in the line."""

LEAST_TFLOPS = 0.01
"""Less is shown as nothing."""


class Meters:
    """Where one run reports; made on rank 0 only.

    start: the step it resumes from. steps: of the whole run. flops_per_token: of the model, forward and backward.
    devices: how many share the work; replicas: of them, data-parallel ones. peak: TFLOP/s of one device, or None where
    unknown. settings: the run's options. terms: names of the losses that the loss is made of, where there are several.
    shown: other numbers of a step that its line has. fail: is given the error where the file of metrics takes no more
    rows, so that the run can save before it ends; None raises it. still_s: how long a step may take before
    `--metrics-port` says that the run stands still. lines: takes what is reported where there is no bar.
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
        before = _before(Path(options.metrics), start) if resumes else {}
        self._fail, self._lines = fail, lines
        self._rows: TextIO | None = _open_rows(Path(options.metrics), start, resumes)
        self._events = _open_events(Path(options.metrics), resumes)
        self._board = _board(options.tensorboard_dir, start, resumes)
        # Where lines go to a file, or through `tee`, a bar would take them or be mixed with them.
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self._bar = _bar(start, steps) if options.progress and terminal and lines is print_line else None
        self._start = start
        self._steps = self._tokens = 0
        self._seconds = 0.0
        """Steps, tokens and seconds since the last line."""
        self.slowest: tuple[int, float] | None = None
        """The rank whose own work takes longest, and how many times as long as others'; None: not known."""
        self._started, self._last = False, start
        self._began = max(ACTIVITY.began, before.get("last_at", 0.0))
        self.event(start, "begin", **{**before, "at": round(self._began, 3), "launcher": _launcher()})

    def step(self, step: int, row: Mapping[str, float], tokens: int, memory: int) -> None:
        """Take one step's numbers; every `log_interval` steps, and at the last, report a line.

        row: what the step did, "seconds", "loss" and "consumed" samples among it. tokens: of its global batch. memory:
        bytes of this rank.
        """
        if not self._started:
            self._started = True
            self.event(step - 1, "started", seconds=max(0.0, time.time() - self._began - row["seconds"]))
        self._last = step
        self._steps += 1
        self._tokens += tokens
        self._seconds += row["seconds"]
        self._write({"step": step, **row})
        if self._exporter is not None:
            self._exporter.step(step, row, self._figures(tokens, row["seconds"], memory))
            if self.slowest is not None:
                self._exporter.slowest(*self.slowest)
        if step % self.options.tensorboard_interval == 0:
            self._plot({name.replace("_", "-"): value for name, value in row.items()}, step)
            if self._trackers:
                sizes = {"tokens": tokens, "devices": self.devices, "replicas": self.replicas}
                values = training_values(row, **sizes, flops=self.flops_per_token, terms=self._terms)
                self._trackers.log(step, values)
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=step, description=f"loss {row['loss']:.4f}")
        if step % self.options.log_interval == 0 or step == self.steps:
            self.report(self._line(step, row, memory))
            self._rate(step, memory)
        elif self._bar is None and step - self._start in EARLY:
            self.report(self._line(step, row, memory))

    def _figures(self, tokens: int, seconds: float, memory: int) -> dict[str, float | None]:
        """A step's speed and memory, of one device."""
        rate, tflops = self._speed(tokens, seconds)
        speed = {"tokens_per_second_per_device": rate, "tflops_per_device": tflops, "memory_bytes": float(memory)}
        return {**speed, "mfu_ratio": tflops / self.peak if self.peak else None}

    def _rate(self, step: int, memory: int) -> None:
        """Keep the speed since the row of speed before; the next one begins here."""
        rate, tflops = self._speed(self._tokens, self._seconds)
        speed = {"tokens_per_second_per_device": rate, "tflops_per_device": tflops, "memory": memory}
        self._write({"step": step, **speed})
        self._steps, self._tokens, self._seconds = 0, 0, 0.0

    def _speed(self, tokens: int, seconds: float) -> tuple[float, float]:
        """Tokens a second, and TFLOP/s, of one device."""
        rate = tokens / max(seconds, 1e-9) / self.devices
        return rate, rate * self.flops_per_token / 1e12

    def _line(self, step: int, row: Mapping[str, float], memory: int) -> str:
        each = self._seconds / self._steps
        (rate, tflops), of = self._speed(self._tokens, self._seconds), "/device" if self.devices > 1 else ""
        eta = f"eta {_clock(int((self.steps - step) * each))}" if self._bar is None else ""  # which the bar shows
        return fitting(
            [
                (ALWAYS, f"step {step:>{len(str(self.steps))}}/{self.steps}"),
                (3, f"samples {row['consumed']}"),
                (ALWAYS, f"loss {row['loss']:.6f}"),
                (7, _shown("lr {:.3e}", row.get("lr"))),
                (8, _shown("grad norm {:.3f}", row.get("grad_norm"))),
                (6, f"{1000 * each:.1f} ms/step"),
                (5, f"{rate:,.0f} tokens/s{of}"),
                (1, f"{tflops:.2f} TFLOP/s{of}" if tflops >= LEAST_TFLOPS else ""),
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
        """Report and keep one validation. measured: by name, "loss" among it, NaN where no token counts."""
        loss, others = measured["loss"], {name: value for name, value in measured.items() if name != "loss"}
        # Of words, where the loss has other parts too; of labels there is none.
        of_words = {} if "class" in measured else {"perplexity": _perplexity(measured.get("lm", loss))}
        kept = {"loss": loss, **of_words, **others}
        self._write({"step": step, **{f"{split}_{name}": value for name, value in kept.items()}})
        self._plot({f"{name} {split}": value for name, value in measured.items()}, step)
        self._trackers.log(step, held_out_values(split, measured))
        if self._exporter is not None:
            self._exporter.evaluation(split, measured)
        more = "".join(f" | {name} {value:{'.3f' if value < LARGE else '.4g'}}" for name, value in of_words.items())
        more += "".join(f" | {name} {value:.6f}" for name, value in others.items())
        self.report(f"{split} at step {step} | loss {loss:.6f}{more}")

    def event(self, step: int, what: str, **details: object) -> None:
        """Keep what happened between or in steps, and when, in a file of its own, of which a resume cuts nothing.
        report/goodput.py adds up the seconds of those that have them."""
        details = {name: each for name, each in details.items() if each is not None}
        if self._events is not None:
            with contextlib.suppress(OSError), self._events.open("a", encoding="utf-8") as events:
                row = {"step": step, "event": what, "at": round(time.time(), 3), **details}
                events.write(json.dumps(row) + "\n")

    def text(self, step: int, name: str, text: str) -> None:
        """Keep a text that the model made."""
        self._write({"step": step, name: text})

    def report(self, line: str) -> None:
        """One line on stdout, above the bar where there is one."""
        if self._bar is not None:
            self._bar[0].console.print(line, highlight=False, markup=False, emoji=False)
        else:
            self._lines(line)

    def close(self) -> None:
        self.event(self._last, "end")
        self._close_rows()
        self._trackers.close()
        if self._exporter is not None:
            self._exporter.close()
        if self._bar is not None:
            self._bar[0].stop()
        if self._board is not None:
            board, self._board = self._board, None
            self._plotting(board.close)

    def _write(self, row: Mapping[str, float | str]) -> None:
        if self._rows is None:
            return
        try:
            self._rows.write(json.dumps({name: _plain(value) for name, value in row.items()}) + "\n")
            self._rows.flush()
        except OSError as error:
            lost = OSError(f"--metrics {self.options.metrics}: {error.strerror or error}")
            self._close_rows()
            if self._fail is None:
                raise lost from None
            self._fail(lost)

    def _close_rows(self) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            with contextlib.suppress(OSError):  # every row was flushed, or its error was reported
                rows.close()

    def _plot(self, values: Mapping[str, float], step: int) -> None:
        """Scalars for TensorBoard, where it is asked for."""
        for name, value in values.items():
            if self._board is not None and isinstance(value, int | float):
                self._plotting(partial(self._board.add_scalar, name, value, step))

    def _plotting(self, act: Callable[[], object]) -> None:
        """Without TensorBoard's files, whose numbers are in those of metrics too, a run continues."""
        try:
            act()
        except OSError as error:
            self._board = None
            problem = f"--tensorboard-dir {self.options.tensorboard_dir}: {error.strerror or error}"
            complain(f"{problem}; the run continues without it")


def fitting(fields: Sequence[tuple[float, str]], columns: float = COLUMNS) -> str:
    """The fields as one line of at most so many columns: those of the lowest rank are left out, and empty ones.

    >>> fitting([(9, "step 1/10"), (1, "0.30 GiB"), (2, ""), (3, "eta 0:00:09")], columns=24)
    'step 1/10 | eta 0:00:09'
    """
    kept = [(rank, text) for rank, text in fields if text]
    while len(line := " | ".join(text for _, text in kept)) > columns and any(rank < ALWAYS for rank, _ in kept):
        kept.remove(min(kept, key=lambda field: field[0]))
    return line


def _shown(how: str, value: float | None) -> str:
    """A number in words, and nothing of one that is not there."""
    return "" if value is None else how.format(value)


def _extras(row: Mapping[str, float]) -> list[tuple[float, str]]:
    """What only some runs report, most of them because they were asked to, with its rank.

    >>> _extras({"loss": 2.0, "params_norm": 12.3456, "zeros": 0.25})
    [(6.4, 'params norm 12.346'), (6.2, 'zeros 25.0%')]
    """
    formats = {"loss_scale": (6.6, "loss scale {:g}"), "params_norm": (6.4, "params norm {:.3f}")}
    formats |= {"zeros": (6.2, "zeros {:.1%}"), "largest_share": (5.8, "largest expert {:.1%}")}
    if row.get("dropped_share"):
        formats |= {"dropped_share": (5.9, "dropped {:.1%}")}
    return [(rank, how.format(row[name])) for name, (rank, how) in formats.items() if name in row]


def _perplexity(loss: float) -> float:
    """Infinite where a float is."""
    return math.exp(loss) if not loss > MOST_LOSS else math.inf


def _plain(value: float | str) -> float | str | None:
    """JSON knows neither nan nor inf, and the gradient norm of a skipped step is one of them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _clock(seconds: int) -> str:
    """Seconds as h:mm:ss."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _before(path: Path, start: int) -> dict[str, float]:
    """What a resume at step `start` loses of the rows that are there: steps, and their seconds; and when the last one
    was written."""
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
    """The process that has started this one, and may start it again."""
    return f"{socket.gethostname()}:{os.getppid()}"


def _started_again(metrics: Path) -> bool:
    """Whether the events are of ranks that the same launcher has started before these."""
    if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        return False
    launcher = None
    with contextlib.suppress(OSError):
        for line in events_file(str(metrics)).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                launcher = event.get("launcher") if event["event"] == "begin" else launcher
    return launcher == _launcher()


def events_file(metrics: str) -> Path:
    """Next to the file of metrics.

    >>> str(events_file("runs/a/metrics.jsonl"))
    'runs/a/metrics.events.jsonl'
    """
    return Path(metrics).with_suffix(f".events{Path(metrics).suffix}")


def _open_events(metrics: Path, resumes: bool) -> Path | None:
    """That of a run that began again is kept as `.previous`. None where metrics go to a pipe or a device."""
    if metrics.exists() and not metrics.is_file():
        return None
    events = events_file(str(metrics))
    if not resumes and events.is_file():
        os.replace(events, events.with_suffix(events.suffix + ".previous"))
    return events


def _open_rows(path: Path, start: int, resumes: bool) -> TextIO:
    """The metrics file, without rows after step `start`; a broken last row (of a kill) goes too.

    The file of a run that began again is kept as `.previous`. A link leads to the same file afterwards.
    """
    if path.is_file() or not path.exists():
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and not resumes:
        os.replace(path, path.with_suffix(path.suffix + ".previous"))
    elif path.is_file():
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if json.loads(line)["step"] <= start:
                    kept.append(line)
        with whole_file(path) as out:
            out.write("".join(f"{line}\n" for line in kept).encode())
    return path.open("a", encoding="utf-8")


def _last_step(path: Path) -> int:
    """The newest step of a file of metrics; 0 where it has none."""
    last = 0
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as rows:
        for line in rows:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                last = max(last, int(json.loads(line)["step"]))
    return last


def _board(directory: str | None, start: int, resumes: bool) -> SummaryWriter | None:
    """Rows after step `start` there are purged, as rows of metrics are."""
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
