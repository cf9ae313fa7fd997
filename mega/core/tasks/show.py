"""Print a score in Megatron-LM's format and as a table with confidence intervals, and show a progress bar."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mega.core.tasks.task import Done
from mega.core.terminal import print_table, stderr_console

LINE_SECONDS = 30.0
"""Seconds between two progress messages if stderr is not a terminal."""


class Bar:
    """Display of the number of scored examples: a bar on a terminal, otherwise occasional messages on stderr."""

    def __init__(self, what: str, total: int, begun: int, terminal: bool):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._what, self._total, self._said = what, total, time.monotonic()
        self._console, self._bar = stderr_console(), None
        if terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(what, total=total, completed=begun)

    def update(self, done: Done) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done.examples)
        elif time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            self._console.print(f"{self._what}: {done.examples} of {self._total}", highlight=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def line(result: Mapping[str, Any], headline: Sequence[str]) -> str:
    """Format a result as one line, like Megatron-LM.

    >>> figures = [{"name": "ppl", "value": 19.31}, {"name": "token ratio", "value": 1.1008449901248143}]
    >>> line({"task": "wikitext103", "figures": figures}, ["ppl", "token ratio"])
    ' validation results on WIKITEXT103 | ppl: 1.9310E+01 | token ratio: 1.1008449901248143 |'
    """
    values = {figure["name"]: figure["value"] for figure in result["figures"]}

    def number(name: str) -> str:
        value = values[name]
        return "none" if value is None else str(value) if name == "token ratio" else format(value, ".4E")

    entries = [f"{name}: {number(name)}" for name in headline]
    return f" validation results on {result['task'].upper()} | {' | '.join(entries)} |"


def show(result: Mapping[str, Any], headline: Sequence[str], kept: str) -> None:
    """Print a score and the path of the result file. If stdout is not a terminal, also print the score in Megatron-LM's
    format, which other programs parse."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        headline_text = line(result, headline)
        rule = "-" * len(headline_text)
        print(f"{rule}\n{headline_text}\n{rule}")
    title = Text(f"{result['task']} of {result['settings']['model']['path']}")
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("", "value", "95 % interval"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for figure in result["figures"]:
        ends = (figure["low"], figure["high"])
        interval = "" if None in ends else f"{_number(ends[0])} to {_number(ends[1])}"
        table.add_row(figure["name"], _number(figure["value"]), interval)
    print_table(console, table)
    rate = result["tokens_per_second"]
    settings = result["settings"]
    layout = " ".join(f"{name} {settings[name]}" for name in ("tp", "cp", "pp", "micro_batch", "seq_length", "dtype"))
    console.print(
        f"{result['tokens']:,} tokens computed"
        + ("" if rate is None else f", {rate:,.0f} a second")
        + f" on {result['ranks']} rank{'s' * (result['ranks'] != 1)} ({result['device']}); {layout}",
        markup=False,
        soft_wrap=not console.is_terminal,
    )
    print(f"kept in {kept}")


def _number(value: float | None) -> str:
    """Format the value of a figure. value: None if the figure's total weight is 0.

    >>> _number(3.14159265), _number(270330), _number(0.46123456), _number(None)
    ('3.1416', '270,330', '0.4612', 'none')
    """
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) or float(value).is_integer() else f"{value:,.4f}"
