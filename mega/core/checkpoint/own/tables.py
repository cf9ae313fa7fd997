"""Print tables about checkpoints in the terminal, and show the progress bar of a long conversion."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
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
from mega.core.checkpoint.own.store import Checkpoint, locate
from mega.core.terminal import print_table, print_whole, stderr_console
from mega.core.untrusted import Json


@contextlib.contextmanager
def progress_bar(on: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, and yield a function to be called with the number of bytes processed and the total
    number of bytes. Nothing is shown if stderr is not a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=on or stderr_console(),
        transient=True,
    )
    if not bar.console.is_terminal:
        yield lambda done, total: None
        return
    with bar:
        task = bar.add_task("reshard")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_checkpoint(
    path: Path, tensors: bool, meta: bool, about: Callable[[Checkpoint], dict[str, Json]], *, as_json: bool = False
) -> None:
    """Print the contents of a checkpoint. about: function of a higher-level package that returns additional values to
    print first. If stdout is not a terminal, names are printed in full and lines are not wrapped."""
    checkpoint = locate(path)
    console = Console()
    if meta:
        console.print_json(json.dumps(dict(checkpoint.meta)))
        return
    if as_json:
        print_whole(json.dumps(_summary(checkpoint, tensors, about(checkpoint)), indent=2) + "\n")
        return
    contents = f"{checkpoint.world} files, {checkpoint.bytes:,} bytes"
    print(f"{checkpoint.path}: step {checkpoint.step}, {contents}")
    print(f"verdict on the training: {inspect.verdict_of(checkpoint)}")
    print(f"bytes: not checked; `mega checkpoint verify {shlex.quote(str(path))}` checks them")
    for name, value in about(checkpoint).items():
        print(f"{name}: {f'{value:.6f}' if isinstance(value, float) else value}")
    head: tuple[str, ...] = ("tensor", "shape", "dtype") if tensors else ("kind", "tensors", "elements", "dtype")
    rows = list(_tensor_rows(checkpoint) if tensors else _kind_rows(checkpoint))
    if not console.is_terminal:
        _print_plainly([head, *rows])
        return
    table = Table()
    for name in head:
        table.add_column(name, overflow="fold", no_wrap=name not in head[:1])
    for row in rows:
        table.add_row(*row)
    print_table(console, table)


def _summary(checkpoint: Checkpoint, tensors: bool, about: dict[str, Json]) -> dict[str, Json]:
    """Return the printed values as one JSON object."""
    summary: dict[str, Json] = {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "files": checkpoint.world,
        "bytes": checkpoint.bytes,
        "verdict": inspect.verdict_of(checkpoint),
        **{name.replace(" ", "_"): value for name, value in about.items()},
        "kinds": [{**vars(kind), "dtypes": list(kind.dtypes)} for kind in inspect.kinds(checkpoint)],
        "attachments": list(checkpoint.attachments),
    }
    if tensors:
        summary["tensors"] = {
            key: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            for key, (shape, dtype) in sorted(checkpoint.tensors.items(), key=lambda item: _place(item[0]))
        }
    return summary


def _tensor_rows(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    for key, (shape, dtype) in sorted(checkpoint.tensors.items(), key=lambda item: _place(item[0])):
        yield key, " x ".join(map(str, shape)) or "scalar", str(dtype).removeprefix("torch.")


def _place(key: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return a sort key for tensors that puts weights first and orders blocks by index."""
    return not key.startswith("weights/"), [
        (int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")
    ]


def _kind_rows(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    for kind in inspect.kinds(checkpoint):
        yield kind.name, str(kind.tensors), f"{kind.elements:,}", ", ".join(kind.dtypes)
    for name in checkpoint.attachments:
        yield name, "", "", "attachment"


def _print_plainly(rows: Sequence[tuple[str, ...]]) -> None:
    """Print left-aligned columns, separated by two spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_differences(first: Path, second: Path, *, weights: bool = False) -> bool:
    """Print the tensors that differ between two checkpoints and a summary. Return whether any tensor differs. weights:
    whether to compare only weights."""
    first_checkpoint, second_checkpoint = locate(first), locate(second)
    differences = list[inspect.Difference]()
    for difference in inspect.diff(first_checkpoint, second_checkpoint, "weights/" if weights else ""):
        differences.append(difference)
        largest = "" if difference.largest is None else f", largest |a - b| {difference.largest:.3g}"
        print(f"{difference.key}: {difference.text}{largest}")
    compared = sum(
        not weights or key.startswith("weights/") for key in {*first_checkpoint.tensors, *second_checkpoint.tensors}
    )
    if not differences:
        print(f"no tensor differs, of {compared:,}")
        return False
    worst = max(differences, key=lambda each: each.largest or 0.0)
    suffix = "" if worst.largest is None else f"; largest |a - b| {worst.largest:.3g}, in {worst.key}"
    print(f"{len(differences):,} of {compared:,} tensors differ{suffix}")
    return True
