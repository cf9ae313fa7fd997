"""Show the progress of preprocessing on stderr: a bar if stderr is a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from mega.core.data.preprocessing.preprocess import Report
from mega.core.terminal import stderr_console

_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def shown(total: int) -> Iterator[Callable[[Report, int], None]]:
    """Context manager that provides the progress callback of `preprocess`. total: size of all input files in bytes."""
    begin = time.monotonic()
    if sys.stderr.isatty():
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %  {task.description}"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=stderr_console())
        task = bar.add_task("", total=total)

        def draw(report: Report, read: int) -> None:
            bar.start()  # the bar starts a thread, so the workers must be forked first
            bar.update(task, completed=read, description=_line(report, begin))

        try:
            yield draw
        finally:
            bar.stop()
        return

    last = begin

    def log(report: Report, read: int) -> None:
        nonlocal last
        current_time = time.monotonic()
        if current_time - last >= _SECONDS_BETWEEN_LINES:
            last = current_time
            seconds_left = (current_time - begin) * (total - read) / max(read, 1)
            print(
                f"{100 * read / max(total, 1):5.1f} %  {_line(report, begin)}  {seconds_left:,.0f} s left",
                file=sys.stderr,
            )

    yield log


def _line(report: Report, begin: float) -> str:
    seconds = max(time.monotonic() - begin, 1e-9)
    return (
        f"{report.documents:,} documents, {report.documents / seconds:,.0f}/s, "
        f"{report.bytes / seconds / 1e6:,.1f} MB/s, {report.tokens:,} tokens"
    )
