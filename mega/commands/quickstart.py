"""`mega quickstart`: run all steps from text to a small trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def run(
    out: Annotated[Path | None, typer.Option("--out", help="a new directory for all files [runs/quickstart]")] = None,
    steps: Annotated[int, typer.Option("--steps", help="training steps")] = 800,
    only: Annotated[
        Literal["corpus", "plot", "verdict"] | None,
        typer.Option("--only", help="run only this step, in the directory --out of an earlier call"),
    ] = None,
) -> int:
    """Train a small model and generate text with it, without a download or a GPU, in about three minutes on two cores.

    For each step, the equivalent command is printed.
    """
    from mega.core.quickstart.tour import play, tour

    if only is None:
        return tour(out, steps)
    if out is None:
        raise ValueError(f"--only {only}: needs --out, the directory of the tour")
    play(only, out)
    return 0
