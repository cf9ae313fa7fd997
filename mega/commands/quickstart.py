"""`mega quickstart`: the whole way once, small."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def run(
    out: Annotated[Path | None, typer.Option("--out", help="a new directory for everything [runs/quickstart]")] = None,
    steps: Annotated[int, typer.Option("--steps", help="training steps")] = 800,
    only: Annotated[
        Literal["corpus", "plot", "verdict"] | None,
        typer.Option("--only", help="one step, in the --out of an earlier tour"),
    ] = None,
) -> int:
    """From nothing to a trained model and its text: no download, no GPU, about three minutes on two cores.

    Every step is shown as the command that does it.
    """
    from mega.core.quickstart.tour import play, tour

    if only is None:
        return tour(out, steps)
    if out is None:
        raise ValueError(f"--only {only}: needs --out, the directory of the tour")
    play(only, out)
    return 0
