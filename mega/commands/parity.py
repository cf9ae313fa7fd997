"""`mega parity`: check that training from one seed produces the same model in every layout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mega.core.files import check_file
from mega.core.proof.options import ParityOptions

if TYPE_CHECKING:
    from mega.core.proof.rows import Row


def run(
    proof: ParityOptions,
) -> int:
    """Train one small model from one seed in many layouts, and compare losses and gradients with those of one rank.

    Uses up to 8 local ranks with gloo. The model has dropout and a vocabulary of 50257 tokens. The exit code is 1 if a
    layout exceeds the bounds.
    """
    if proof.json is not None:
        check_file("--json", proof.json)
    from mega.core.proof import rows
    from mega.core.proof.layouts import FAMILIES, SHORT, ParityLayout, every_case, models_of

    if proof.all and proof.layouts is not None:
        raise ValueError(f"--layouts {proof.layouts}: excludes --all")
    chosen_layouts = (
        SHORT if proof.layouts is None else [ParityLayout.parse(name.strip()) for name in proof.layouts.split(",")]
    )
    if proof.all:
        cases = [case for case in every_case() if case[0].startswith(proof.family or "")]
    else:
        default_models: tuple[str, ...] = FAMILIES if proof.layouts is None else ()
        models = (proof.family,) if proof.family else default_models
        cases = [(model, layout) for layout in chosen_layouts for model in models or models_of(layout)]
    # Rows of an earlier call are reused if they were measured at the same commit, so that an interrupted check resumes.
    commit = rows.code() if proof.json else ""
    required = {(model, layout.name, proof.dtype) for model, layout in cases}
    results = [row for row in rows.read_rows(proof.json, commit) if _key(row) in required] if proof.json else []
    done_keys = {_key(row) for row in results}
    remaining = [(model, layout) for model, layout in cases if (model, layout.name, proof.dtype) not in done_keys]
    for row in rows.prove(remaining, proof.dtype):
        results.append(rows.append(proof.json, row, commit) if proof.json else row)
        print(f"{len(results)}/{len(cases)}  {row.family} {row.layout}", file=sys.stderr)
    _print_table(results)
    return 0 if all(row.fine for row in results) else 1


def _key(row: Row) -> tuple[str, str, str]:
    return row.family, row.layout, row.dtype


def _print_table(rows: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from mega.core.proof.layouts import STEPS
    from mega.core.terminal import print_table

    table = Table(title=f"{rows[0].dtype}: difference from one rank", box=box.SIMPLE_HEAD)
    for name in ("model", "layout", "loss", *(f"step {step}" for step in STEPS)):
        table.add_column(name, no_wrap=True)
    table.add_column("worst gradient in", overflow="fold")
    table.add_column("")
    for row in rows:
        verdict = "[green]equal[/]" if row.fine else "[red]NOT EQUAL[/]"
        if row.problem is not None:
            table.add_row(row.family, row.layout, *[""] * (1 + len(STEPS)), escape(row.problem), verdict)
            continue
        tensor = row.tensors[row.gradients.index(max(row.gradients))]
        numbers = (f"{number:.1e}" for number in (row.loss or 0.0, *row.gradients))
        table.add_row(row.family, row.layout, *numbers, tensor, verdict)
    console = Console()
    print_table(console, table)
    failures = sum(not row.fine for row in rows)
    print(f"{len(rows) - failures} of {len(rows)} layouts are within the bounds")
