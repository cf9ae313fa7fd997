"""Answers about checkpoints as tables in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mega.core.checkpoint import inspect
from mega.core.checkpoint.store import locate


def show_checkpoint(path: Path, tensors: bool, meta: bool) -> None:
    checkpoint = locate(path)
    console = Console()
    if meta:
        console.print_json(json.dumps(dict(checkpoint.meta)))
        return
    title = f"{checkpoint.path}: step {checkpoint.step}, {checkpoint.world} files, {checkpoint.bytes:,} bytes"
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
