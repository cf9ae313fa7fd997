"""`mega lr-find`: sweep over learning rates before a run, plot the loss, and suggest a learning rate."""

from __future__ import annotations

from pathlib import Path

from mega.commands import finetune
from mega.core.config.resolve import metrics_file
from mega.core.config.run import Options
from mega.core.processes.world import is_first_rank

LOADS_MODEL = True


def run(options: Options) -> int:
    """Train for some steps with an increasing learning rate, and suggest the rate at which the loss falls fastest.

    Takes the flags of the planned run, for mega pretrain or mega finetune. The learning rate increases from --min-lr
    [1e-7] to --lr [1] over --steps [100]. No checkpoint is saved. The curve is written as an SVG next to --metrics
    [lr-find.jsonl].
    """
    from mega.core.report.lr_find import LEAST_POINTS, draw, has_risen, read, suggest, sweep

    planned = sweep(options)
    metrics, reports = Path(metrics_file(planned)), is_first_rank() and not options.runtime.dry_run
    before, diverged = _version(metrics), False
    if reports:
        rates = f"from {planned.schedule.min_lr:g} (--min-lr) to {planned.optimizer.lr:g} (--lr)"
        print(f"sweep: {rates}; no checkpoint is saved", flush=True)
    try:
        code = finetune.train(planned)
    except FloatingPointError:
        code, diverged = 1, True
    if not reports or code not in (0, 1) or _version(metrics) == before:
        return code
    points = read(metrics)
    # The exit code does not distinguish a sweep that diverged at a high rate from a failure, so the curve decides
    # whether the sweep succeeded.
    if code and not (has_risen(points) or (diverged and len(points) >= LEAST_POINTS)):
        return code
    suggestion, picture = suggest(points), metrics.with_suffix(".svg")
    draw(points, suggestion, picture)
    print(f"suggested: --lr {suggestion.rate:.1e}, where the loss falls fastest")
    above = "rates from there on do not hold"
    if suggestion.least == points[-1].lr:
        above = "the highest rate of the sweep; give a higher --lr to see where the loss rises"
    print(f"lowest loss at {suggestion.least:.1e}: {above}; {picture}")
    return 0


def _version(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is written again; None if the file does not exist."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None
