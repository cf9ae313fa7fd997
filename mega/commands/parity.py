"""`mega parity`: is one seed one model, however the work is shared out?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mega.core.config.sections import Family

if TYPE_CHECKING:
    from mega.core.training.layouts import Row


def run(
    layouts: Annotated[
        str | None, typer.Option("--layouts", help="only these, such as tp2pp2dp2sp,dp4-zero1,pp2-chunks2")
    ] = None,
    family: Annotated[Literal["gpt", "llama"] | None, typer.Option("--family", help="only this family")] = None,
    dtype: Annotated[Literal["fp64", "fp32"], typer.Option("--dtype", help="precision of the proof")] = "fp64",
    quick: Annotated[bool, typer.Option("--quick", help="one layout of each kind instead of all")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="print a line of JSON per layout")] = False,
) -> int:
    """Train one small model from one seed in many layouts and compare losses and gradients with one rank's.

    Up to 8 local ranks on gloo; dropout on, a vocabulary of 50257. Exit 1 where a layout is not within the bounds.
    """
    from mega.core.training.layouts import QUICK, Layout, every_layout, prove

    if layouts is not None:
        chosen = [Layout.parse(name.strip()) for name in layouts.split(",")]
    else:
        chosen = QUICK if quick else every_layout()
    families: list[Family] = [family] if family is not None else ["gpt", "llama"]
    rows = []
    for row in prove(families, chosen, dtype):
        rows.append(row)
        if json_lines:
            _print_json(row)
        else:
            print(f"{len(rows)}/{len(families) * len(chosen)}  {row.family} {row.layout}", file=sys.stderr)
    if not json_lines:
        _print_table(rows)
    return 0 if all(row.fine for row in rows) else 1


def _print_json(row: Row) -> None:
    import dataclasses
    import json

    print(json.dumps(dataclasses.asdict(row)), flush=True)


def _print_table(rows: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from mega.core.training.layouts import STEPS

    table = Table(title=f"{rows[0].dtype}: difference from one rank", box=box.SIMPLE_HEAD)
    for name in ("model", "layout", "loss", *(f"step {step}" for step in STEPS)):
        table.add_column(name, no_wrap=True)
    table.add_column("worst gradient in", overflow="fold")
    table.add_column("")
    for row in rows:
        verdict = "[green]equal[/]" if row.fine else "[red]NOT EQUAL[/]"
        if row.problem is not None:
            table.add_row(row.family, row.layout, *[""] * (1 + len(STEPS)), row.problem, verdict)
            continue
        where = row.tensors[row.gradients.index(max(row.gradients))]
        numbers = (f"{number:.1e}" for number in (row.loss or 0.0, *row.gradients))
        table.add_row(row.family, row.layout, *numbers, where, verdict)
    console = Console()
    console.print(table, width=console.width if console.is_terminal else 110)
    wrong = sum(not row.fine for row in rows)
    print(f"{len(rows) - wrong} of {len(rows)} layouts are within the bounds")
