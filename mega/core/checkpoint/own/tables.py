"""Answers about checkpoints as tables in the terminal, and how far a long job has come."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from mega.core.checkpoint.own import inspect
from mega.core.checkpoint.own.store import locate


@contextlib.contextmanager
def progress_bar(what: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, called with bytes done and bytes in all; nothing where stderr is not a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )
    if not bar.console.is_terminal:
        yield lambda done, total: None
        return
    with bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_checkpoint(path: Path, tensors: bool, meta: bool) -> None:
    checkpoint = locate(path)
    console = Console()
    if meta:
        console.print_json(json.dumps(dict(checkpoint.meta)))
        return
    held = f"{checkpoint.world} files, {checkpoint.bytes:,} bytes"
    title = f"{checkpoint.path}: step {checkpoint.step}, {held}, {inspect.verdict_of(checkpoint)}"
    if tensors:
        table = Table("tensor", "shape", "dtype", title=title)
        for key, (shape, dtype) in checkpoint.tensors.items():
            table.add_row(key, " x ".join(map(str, shape)) or "scalar", str(dtype).removeprefix("torch."))
    else:
        table = Table("kind", "tensors", "elements", "dtype", title=title)
        for kind in inspect.kinds(checkpoint):
            table.add_row(kind.name, str(kind.tensors), f"{kind.elements:,}", ", ".join(kind.dtypes))
        for name in checkpoint.attachments:
            table.add_row(name, "", "", "attachment")
    console.print(table)


def show_differences(first: Path, second: Path) -> bool:
    """Print them as they are found; whether there was any."""
    found = False
    for difference in inspect.diff(locate(first), locate(second)):
        found = True
        largest = "" if difference.largest is None else f", largest |a - b| {difference.largest:.3g}"
        print(f"{difference.key}: {difference.text}{largest}")
    if not found:
        print("no tensor differs")
    return found
