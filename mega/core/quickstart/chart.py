"""The loss of a run, drawn: in the terminal always, as a PNG where matplotlib is installed. Reads metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]
"""Steps and their losses, in order."""

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a Braille letter's dots, from top to bottom, left and right."""


def read_curve(metrics: Path) -> Curve:
    """Step and training loss of every row that has a loss."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def terminal(curve: Curve, level: float, width: int = 64, height: int = 14) -> str:
    """The curve in Braille dots, `width` x `height` letters, and a dotted line at `level`."""
    steps, losses = zip(*curve, strict=True)
    low, high = min(*losses, level), max(*losses, level)
    letters = [[0] * width for _ in range(height)]

    def dot(fraction: float, loss: float) -> None:
        x = round(fraction * (2 * width - 1))
        y = round((high - loss) / max(high - low, 1e-9) * (4 * height - 1))
        letters[y // 4][x // 2] |= DOTS[y % 4][x % 2]

    for column in range(0, 2 * width, 4):
        dot(column / (2 * width - 1), level)
    for step, loss in curve:
        dot((step - steps[0]) / max(steps[-1] - steps[0], 1), loss)
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    rows = [
        f"{labels.get(number, ''):>6} │{''.join(chr(0x2800 + bits) for bits in row)}"
        for number, row in enumerate(letters)
    ]
    axis = f"{'':>6} └{'─' * width}"
    return "\n".join([*rows, axis, f"{'':>8}{f'step {steps[0]}':<{width // 2}}{f'step {steps[-1]}':>{width // 2}}"])


def png(curve: Curve, level: float, path: Path) -> bool:
    """Draw into `path`; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curve, strict=True), linewidth=1, label="training loss")
    axes.axhline(level, linestyle=":", color="grey", label="unigram statistics")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    figure.savefig(path, dpi=150)
    return True
