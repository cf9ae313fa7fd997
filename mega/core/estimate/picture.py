"""Draws the bars of a memory estimate as a .svg or .png file. matplotlib is imported only for a .png."""

from __future__ import annotations

import textwrap
from pathlib import Path

from mega.core.estimate.hardware import GIB
from mega.core.estimate.memory import Memory
from mega.core.estimate.show import PARTS, equal_stages, gib, parts
from mega.core.files import whole_file


def draw(memory: Memory, title: str, path: Path) -> None:
    """Draw the memory of each stage as bars in a .svg or .png file, which is written atomically."""
    content = {".svg": _svg, ".png": _png}[path.suffix](memory, title)
    with whole_file(path) as out:
        out.write(content)


def _svg(memory: Memory, title: str) -> bytes:
    rows = list(equal_stages(memory))
    largest = max(stage.peak for stage in memory.stages)
    height = 70 + 30 * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/><text x="8" y="18">{title}</text>'
    ]
    for index, (heading, _, colour) in enumerate(PARTS):
        corner = 90 + 105 * index
        lines.append(f'<rect x="{corner}" y="28" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{corner + 16}" y="38">{heading}</text>')
    for row, (first, last, stage) in enumerate(rows):
        top, bar_start = 52 + 30 * row, 90.0
        name = f"stage {first}" if first == last else f"{first} to {last}"
        lines.append(f'<text x="8" y="{top + 15}">{name}</text>')
        for (heading, _, colour), size in zip(PARTS, parts(stage).values(), strict=True):
            bar_width = 800 * size / largest
            lines.append(
                f'<rect x="{bar_start:.1f}" y="{top}" width="{bar_width:.1f}" height="22" fill="{colour}">'
                f"<title>{heading}: {gib(size)} GiB</title></rect>"
            )
            bar_start += bar_width
        lines.append(f'<text x="{bar_start + 6:.1f}" y="{top + 15}">{gib(stage.peak)} GiB</text>')
    return "\n".join([*lines, "</svg>", ""]).encode()


def _png(memory: Memory, title: str) -> bytes:
    import io

    from matplotlib.figure import Figure

    rows = list(equal_stages(memory))
    figure = Figure(figsize=(11, 1.6 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    starts = [0.0] * len(rows)
    for heading, _, colour in PARTS:
        sizes = [parts(stage)[heading] / GIB for _, _, stage in rows]
        axes.barh(range(len(rows)), sizes, left=starts, color=colour, label=heading)
        starts = [before + size for before, size in zip(starts, sizes, strict=True)]
    axes.set_yticks(range(len(rows)), [f"stage {a}" if a == b else f"stages {a}-{b}" for a, b, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="GiB")
    figure.suptitle(textwrap.fill(title, 140), fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()
