"""Draws a simulated plan as text, SVG or PNG, with one line per rank and time increasing to the right.

Only PNG needs matplotlib, which is imported on demand. This module draws a `Simulation` and does not depend on
schedules.
"""

from __future__ import annotations

from pathlib import Path

from mega.core.files import whole_file

from .play import Interval
from .simulate import Simulation

_COLOURS = {"F": "#4c78a8", "B": "#59a14f", "W": "#f2b447"}
_MEANINGS = {"F": "forward", "B": "backward", "W": "weight gradient"}
_CHUNKS = "abcdefghijklmnopqrstuvwxyz"


def draw_text(simulation: Simulation, width: int = 100) -> str:
    """Draw the simulation as one line of at most `width` characters per rank, followed by a summary line.

    A cell shows the kind of compute step and the microbatch ("F3"; "F3b" for the second chunk), or only the kind if the
    label does not fit. `.` means that the rank waits.

    >>> from mega.core.plan import plan, simulate
    >>> print(draw_text(simulate(plan("1f1b", stages=2, microbatches=2)), 60))
    rank 0  F0 F1 ......B0    ...B1
    rank 1  ...F0 B0    F1 B1    ......
    1f1b: 2 stages, 1 chunks, 2 microbatches; length 9, bubble 33.3%, live microbatches 1 to 2
    """
    margin = len(f"rank {simulation.plan.stages - 1}  ")
    scale = _scale(simulation, max(1, width - margin))
    rows = [
        (f"rank {rank}".ljust(margin) + _line(simulation, rank, scale)).rstrip()
        for rank in range(simulation.plan.stages)
    ]
    return "\n".join([*rows, _figures(simulation)])


def draw(simulation: Simulation, path: Path) -> None:
    """Write the picture to `path` (.svg, or .png with matplotlib), atomically."""
    content = {".svg": _svg, ".png": _png}[path.suffix](simulation)
    with whole_file(path) as file:
        file.write(content)


def _scale(simulation: Simulation, room: int) -> float:
    """Return the number of characters per unit of time for a line of at most `room` characters. If the line is too
    short for labels, the shortest compute step has as many whole characters as fit or, if not even one fits, a fraction
    of a character."""
    spans = [span for row in simulation.rows for span in row]
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    labelled = max(len(_label(simulation, span)) for span in spans) + 1
    fitting = room / (simulation.makespan or 1.0)
    whole = min(labelled, int(fitting * shortest))
    return whole / shortest if whole else fitting


def _line(simulation: Simulation, rank: int, scale: float) -> str:
    cells = ["."] * round(simulation.makespan * scale)
    for span in simulation.rows[rank]:
        first, end = round(span.start * scale), round(span.end * scale)
        label = _label(simulation, span)
        label = label if len(label) < end - first else span.act.kind
        cells[first:end] = label.ljust(end - first)[: end - first]
    return "".join(cells)


def _label(simulation: Simulation, span: Interval) -> str:
    chunk = _CHUNKS[span.act.chunk % len(_CHUNKS)] if simulation.plan.chunks > 1 else ""
    return f"{span.act.kind}{span.act.microbatch}{chunk}"


def _figures(simulation: Simulation) -> str:
    plan = simulation.plan
    live = sorted(set(simulation.live))
    live_range = str(live[0]) if len(live) == 1 else f"{live[0]} to {live[-1]}"
    return (
        f"{plan.kind}: {plan.stages} stages, {plan.chunks} chunks, {plan.microbatches} microbatches; "
        f"length {simulation.makespan:g}, bubble {simulation.bubble:.1%}, live microbatches {live_range}"
    )


_ROW, _TOP, _LEFT, _PICTURE = 28, 34, 64, 1400
"""Sizes in pixels: height of a rank's row, margins above and to the left of the rows, width of the time axis."""


def _svg(simulation: Simulation) -> bytes:
    scale = _PICTURE / (simulation.makespan or 1.0)
    height = _TOP + _ROW * simulation.plan.stages + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _PICTURE + 10}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="20">{_figures(simulation)}</text>',
    ]
    for rank, row in enumerate(simulation.rows):
        top = _TOP + _ROW * rank
        lines.append(f'<text x="8" y="{top + 17}">rank {rank}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{top}" width="{_PICTURE}" height="{_ROW - 4}" fill="#eeeeee"/>')
        for span in row:
            x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
            label = _label(simulation, span)
            lines.append(
                f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 4}" '
                f'fill="{_COLOURS[span.act.kind]}" fill-opacity="{_opacity(span, simulation):.2f}" '
                f'stroke="white"><title>{label}: {span.start:g} to {span.end:g}</title></rect>'
            )
            if width > 7 * len(label):  # a character is about 7 pixels wide
                lines.append(f'<text x="{x + width / 2:.2f}" y="{top + 16}" text-anchor="middle">{label}</text>')
    return "\n".join([*lines, "</svg>", ""]).encode()


def _png(simulation: Simulation) -> bytes:
    import io

    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    plan = simulation.plan
    figure = Figure(figsize=(14, 1.2 + 0.3 * plan.stages), layout="constrained")
    axes = figure.subplots()
    for rank, row in enumerate(simulation.rows):
        bars = [(span.start, span.end - span.start) for span in row]
        colours = [(_COLOURS[span.act.kind], _opacity(span, simulation)) for span in row]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.5)
        for span in row:
            label = _label(simulation, span)
            # A character takes about 1/200 of the width of the picture.
            if span.end - span.start > 0.005 * len(label) * simulation.makespan:
                middle = (span.start + span.end) / 2
                axes.text(middle, rank, label, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, simulation.makespan), ylim=(plan.stages - 0.5, -0.5), xlabel="time")
    axes.set_yticks(range(plan.stages), [f"rank {rank}" for rank in range(plan.stages)])
    axes.set_facecolor("#eeeeee")
    axes.set_title(_figures(simulation), fontsize=9)
    kinds = sorted({span.act.kind for row in simulation.rows for span in row}, key="FBW".index)
    figure.legend(handles=[Patch(color=_COLOURS[k], label=_MEANINGS[k]) for k in kinds], loc="outside right upper")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()


def _opacity(span: Interval, simulation: Simulation) -> float:
    """Return the colour of a compute step, which is paler for later chunks."""
    return 1.0 - 0.6 * span.act.chunk / simulation.plan.chunks
