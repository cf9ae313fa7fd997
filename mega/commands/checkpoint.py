"""`mega checkpoint verify | show | diff | clean`: verify, show, compare and clean up checkpoints."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega.command_line.help import group
from mega.command_line.options import Command
from mega.core.files import check_source

if TYPE_CHECKING:
    from mega.core.checkpoint.own.store import Checkpoint
    from mega.core.untrusted import Json

app = group("Verify, show, compare and clean up checkpoints.")

Directory = Annotated[Path, typer.Argument(help="a run's directory, or one step-NNNNNNN in it")]


@app.command(cls=Command)
def verify(directory: Directory) -> None:
    """Hash every byte of the checkpoints, and compare the hashes with the saved hashes."""
    check_source("DIRECTORY", directory)
    from mega.core.checkpoint.own import inspect

    inspect.verify(directory, typer.echo)


@app.command(cls=Command)
def show(
    directory: Directory,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    meta: Annotated[bool, typer.Option("--meta", help="print the plain state as JSON")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Show the contents of a checkpoint."""
    if meta and (tensors or as_json):
        raise ValueError(
            f"--{'tensors' if tensors else 'json'}: --meta prints the plain state alone; give one of the two"
        )
    check_source("DIRECTORY", directory)
    from mega.core.checkpoint.own.tables import show_checkpoint

    show_checkpoint(directory, tensors, meta, _about, as_json=as_json)


def _about(checkpoint: Checkpoint) -> dict[str, Json]:
    """Return information about a checkpoint: the model, the base of adapters, the layout of the run that wrote the
    checkpoint, the date, and the losses at the checkpoint's step if the run's metrics still exist."""
    from mega.core.architecture import architecture
    from mega.core.architecture.words import parameter_words, shape_words
    from mega.core.checkpoint.own.base import named_base
    from mega.core.checkpoint.own.model import model_of
    from mega.core.untrusted import numbers_below

    table: dict[str, Json] = {}
    with suppress(ValueError):  # a checkpoint that contains only tensors has no model section
        model = model_of(checkpoint.meta, str(checkpoint.path))
        table["model"] = f"{shape_words(architecture(model))}; {parameter_words(model)}"
        if base := named_base(checkpoint):
            table["adapters of"] = base["path"]
    sizes = {name: size for name, size in numbers_below(checkpoint.meta, "layout").items() if size > 1}
    table["layout"] = " x ".join(f"{name} {size}" for name, size in sizes.items()) or "1 rank"
    table |= _losses(checkpoint)
    manifest = checkpoint.path / "manifest.json"
    if manifest.is_file():
        table["written"] = f"{datetime.fromtimestamp(manifest.stat().st_mtime).astimezone():%Y-%m-%d %H:%M:%S %Z}"
    return table


def _losses(checkpoint: Checkpoint) -> dict[str, Json]:
    """Return the training and validation loss at the checkpoint's step."""
    from mega.core.report.read import RunRecord, read

    try:
        record = read(checkpoint.path.parent)
    except (ValueError, OSError):
        return {}
    if not isinstance(record, RunRecord):
        return {}
    titles = {"loss": "loss", **{f"{name}_loss": f"{name} loss" for name in record.sets}}
    losses = {words: dict(record.series.get(name, [])).get(checkpoint.step) for name, words in titles.items()}
    return {words: round(value, 6) for words, value in losses.items() if value is not None}


@app.command(cls=Command)
def diff(
    first: Directory,
    second: Directory,
    weights: Annotated[bool, typer.Option("--weights", help="compare only the weights")] = False,
) -> None:
    """List the tensors that differ between two checkpoints, whose layouts may differ. The exit code is 1 if any tensor
    differs."""
    for name, path in (("FIRST", first), ("SECOND", second)):
        check_source(name, path)
    from mega.core.checkpoint.own.tables import show_differences

    if show_differences(first, second, weights=weights):
        raise typer.Exit(1)


@app.command(cls=Command)
def clean(
    directory: Annotated[
        Path, typer.Argument(help="a run's directory to which no process is saving, or the target of an export")
    ],
    keep_last: Annotated[int | None, typer.Option(help="keep only this many of the newest checkpoints")] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="also keep checkpoints at multiples of this many steps")
    ] = None,
    keep_optimizer_last: Annotated[
        int | None, typer.Option(help="keep optimizer state in only this many of the newest checkpoints")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what would be removed")] = False,
) -> None:
    """Remove files left by interrupted saves and exports, and old checkpoints that exceed the limits."""
    from mega.core.checkpoint.own import inspect

    inspect.clean(directory, keep_last, keep_every, keep_optimizer_last, dry_run, typer.echo)
