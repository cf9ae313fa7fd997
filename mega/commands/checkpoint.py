"""`mega checkpoint verify | show | diff | clean`: questions about saved checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega.core.files import check_source

app = typer.Typer(help="Verify, show, compare and clean up checkpoints.", no_args_is_help=True, add_completion=False)

Directory = Annotated[Path, typer.Argument(help="a run's directory, or one step-NNNNNNN in it")]


@app.command()
def verify(directory: Directory) -> None:
    """Hash every byte again and compare with what was saved."""
    check_source("DIRECTORY", directory)
    from mega.core.checkpoint.own import inspect

    inspect.verify(directory, typer.echo)


@app.command()
def show(
    directory: Directory,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    meta: Annotated[bool, typer.Option("--meta", help="print the plain state as JSON")] = False,
) -> None:
    """What a checkpoint holds."""
    if tensors and meta:
        raise ValueError("--tensors: --meta prints the plain state alone; give one of the two")
    check_source("DIRECTORY", directory)
    from mega.core.checkpoint.own.tables import show_checkpoint

    show_checkpoint(directory, tensors, meta)


@app.command()
def diff(
    first: Directory,
    second: Directory,
) -> None:
    """Tensors that differ between two checkpoints, whatever their layouts; exit 1 if any does."""
    for name, place in (("FIRST", first), ("SECOND", second)):
        check_source(name, place)
    from mega.core.checkpoint.own.tables import show_differences

    if show_differences(first, second):
        raise typer.Exit(1)


@app.command()
def clean(
    directory: Annotated[
        Path, typer.Argument(help="a run's directory, while no run saves into it; or where an export was to go")
    ],
    keep_last: Annotated[int | None, typer.Option(help="remove all but the newest so many checkpoints")] = None,
    keep_every: Annotated[int | None, typer.Option(help="but keep multiples of this many steps")] = None,
    keep_optimizer_last: Annotated[
        int | None, typer.Option(help="remove the optimizer's state of all but the newest so many")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
) -> None:
    """Remove what killed saves and exports left and, as far as the limits say, old checkpoints."""
    from mega.core.checkpoint.own import inspect

    inspect.clean(directory, keep_last, keep_every, keep_optimizer_last, dry_run, typer.echo)
