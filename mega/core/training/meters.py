"""What a run reports: one row of numbers a step, a log line now and then, a bar on a terminal. Knows no ranks.

Rows go to a JSON-lines file, always; to TensorBoard by flag. A run that resumes cuts off the rows after the step that
it resumes from, so the file has each step once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mega.core.config.sections import LogConfig
from mega.core.files import whole_file
from mega.core.training.output import complain, print_line


class Meters:
    """Where one run reports; made on rank 0 only.

    start: the step it resumes from. steps: of the whole run. flops_per_token: of the model, forward and backward.
    devices: how many share the work. peak: TFLOP/s of one device, or None where unknown. fail: is given the error where
    the file of metrics takes no more rows, so that the run can save before it ends; None raises it.
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
        fail: Callable[[OSError], None] | None = None,
    ):
        assert options.metrics is not None
        self.options, self.steps, self.devices = options, steps, devices
        self.flops_per_token, self.peak = flops_per_token, peak
        self._fail, self._rows = fail, _open_rows(Path(options.metrics), start)
        self._board = _board(options.tensorboard_dir, start)
        self._bar = _bar(start, steps) if options.progress and sys.stderr.isatty() else None
        self._steps = self._tokens = 0
        self._seconds = 0.0
        """Steps, tokens and seconds since the last line."""

    def step(self, step: int, row: Mapping[str, Any], tokens: int, memory: int) -> None:
        """Take one step's numbers; every `log_interval` steps, and at the last, report a line.

        row: what the step did, "seconds", "loss" and "consumed" samples among it. tokens: of its global batch. memory:
        bytes of this rank.
        """
        self._steps += 1
        self._tokens += tokens
        self._seconds += row["seconds"]
        self._write({"step": step, **row})
        if step % self.options.tensorboard_interval == 0:
            self._plot({name.replace("_", "-"): value for name, value in row.items()}, step)
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=step, description=f"loss {row['loss']:.4f}")
        if step % self.options.log_interval == 0 or step == self.steps:
            self.report(self._line(step, row, memory))

    def _line(self, step: int, row: Mapping[str, Any], memory: int) -> str:
        seconds, count = max(self._seconds, 1e-9), self._steps
        rate = self._tokens / seconds / self.devices
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        tflops = rate * self.flops_per_token / 1e12
        usage = f"{100 * tflops / self.peak:.1f}%" if self.peak else "n/a"
        self._write({"step": step, "tokens_per_second_per_device": rate, "tflops_per_device": tflops, "memory": memory})
        remaining = int((self.steps - step) * seconds / count)
        return (
            f"step {step:>{len(str(self.steps))}}/{self.steps} | samples {row['consumed']} | loss {row['loss']:.6f} | "
            f"lr {row['lr']:.3e} | grad norm {row['grad_norm']:.3f} | {1000 * seconds / count:.1f} ms/step | "
            f"{rate:,.0f} tokens/s/device | {tflops:.2f} TFLOP/s/device | MFU {usage} | "
            f"{memory / 2**30:.2f} GiB | skipped {row['skipped']}{_extras(row)} | eta {_clock(remaining)}"
        )

    def evaluation(self, step: int, split: str, measured: Mapping[str, float]) -> None:
        """Report and keep one validation. measured: by name, "loss" among it, NaN where no token counts."""
        loss, others = measured["loss"], {name: value for name, value in measured.items() if name != "loss"}
        # Of words, where the loss has other parts too; of labels there is none.
        of_words = {} if "class" in measured else {"perplexity": math.exp(min(measured.get("lm", loss), 20.0))}
        kept = {"loss": loss, **of_words, **others}
        self._write({"step": step, **{f"{split}_{name}": value for name, value in kept.items()}})
        self._plot({f"{name} {split}": value for name, value in measured.items()}, step)
        more = "".join(f" | {name} {value:.3f}" for name, value in of_words.items())
        more += "".join(f" | {name} {value:.6f}" for name, value in others.items())
        self.report(f"{split} at step {step} | loss {loss:.6f}{more}")

    def report(self, line: str) -> None:
        """One line on stdout, above the bar where there is one."""
        if self._bar is not None:
            self._bar[0].console.print(line, highlight=False, soft_wrap=True)
        else:
            print_line(line)

    def close(self) -> None:
        self._close_rows()
        if self._bar is not None:
            self._bar[0].stop()
        if self._board is not None:
            board, self._board = self._board, None
            self._plotting(board.close)

    def _write(self, row: Mapping[str, Any]) -> None:
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

    def _plot(self, values: Mapping[str, Any], step: int) -> None:
        """Scalars for TensorBoard, where it is asked for."""
        for name, value in values.items():
            if self._board is not None and isinstance(value, int | float):
                self._plotting(partial(self._board.add_scalar, name, value, step))

    def _plotting(self, act: Callable[[], Any]) -> None:
        """Without TensorBoard's files, whose numbers are in those of metrics too, a run continues."""
        try:
            act()
        except OSError as error:
            self._board = None
            problem = f"--tensorboard-dir {self.options.tensorboard_dir}: {error.strerror or error}"
            complain(f"{problem}; the run continues without it")


def _extras(row: Mapping[str, Any]) -> str:
    """What only some runs report.

    >>> _extras({"loss": 2.0, "params_norm": 12.3456, "zeros": 0.25})
    ' | params norm 12.346 | zeros 25.0%'
    """
    formats = {"loss_scale": "loss scale {:g}", "params_norm": "params norm {:.3f}", "zeros": "zeros {:.1%}"}
    return "".join(f" | {how.format(row[name])}" for name, how in formats.items() if name in row)


def _plain(value: Any) -> Any:
    """JSON knows neither nan nor inf, and the gradient norm of a skipped step is one of them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _clock(seconds: int) -> str:
    """Seconds as h:mm:ss."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _open_rows(path: Path, start: int) -> Any:
    """The metrics file, without rows after step `start`; a broken last row (of a kill) goes too.

    The file of a run that began again is kept as `.previous`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and start == 0:
        os.replace(path, path.with_suffix(path.suffix + ".previous"))
    elif path.is_file():
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if json.loads(line)["step"] <= start:
                    kept.append(line)
        with whole_file(path) as out:
            out.write("".join(f"{line}\n" for line in kept).encode())
    return path.open("a", encoding="utf-8")


def _board(directory: str | None, start: int) -> Any:
    """Rows after step `start` there are purged, as rows of metrics are."""
    if directory is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            f"--tensorboard-dir {directory}: needs the package tensorboard (pip install tensorboard)"
        ) from None
    return SummaryWriter(directory, purge_step=start + 1 if start else None)


def _bar(start: int, steps: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    progress.start()
    return progress, progress.add_task("starting", total=steps, completed=start)
