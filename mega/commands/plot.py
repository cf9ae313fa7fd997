"""`mega plot`: plot metrics of runs in the terminal, as SVG or as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega.core.files import check_file, whole_file


def run(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="directories of runs, or metrics files")],
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="metric to plot, such as grad_norm [loss, valid_loss]")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="a .svg or .png file, instead of the terminal")] = None,
    smooth: Annotated[
        float, typer.Option("--smooth", help="weight of the previous values, below 1; 0 disables smoothing")
    ] = 0.0,
    log: Annotated[bool, typer.Option("--log", help="use a logarithmic y axis, in a file only")] = False,
) -> int:
    """Plot metrics of one run, or of several runs in one picture.

    The runs may still be training. Writing a .png requires the extra named track; a .svg and the terminal require no
    extra.
    """
    from mega.core.report.chart import Scale, svg
    from mega.core.report.plot import charts_of, png, smoothed, terminal

    if not 0 <= smooth < 1:
        raise ValueError(f"--smooth {smooth}: must be at least 0 and less than 1")
    if out is not None and Path(out).suffix not in (".svg", ".png"):
        raise ValueError(f"--out {out}: must end in .svg or .png")
    if out is not None:
        check_file("--out", out)
    if log and out is None:
        raise ValueError("--log: needs --out, a file")
    raw_charts = charts_of(runs, metrics or ())
    charts = {
        name: {run: smoothed(curve, smooth) for run, curve in curves.items()} for name, curves in raw_charts.items()
    }
    if out is None:
        from rich.console import Console

        console = Console()
        # The labels of the axis use 12 columns.
        width = max(20, min(console.width - 12, 100)) if console.is_terminal else 72
        for name, curves in charts.items():
            print(terminal(name, curves, width, colour=console.is_terminal and not console.no_color))
        return 0
    if out.endswith(".svg"):
        with whole_file(Path(out)) as file:
            file.write(svg(charts, Scale(log)).encode())
    else:
        png(charts, Path(out), log)
    print(out)
    return 0
