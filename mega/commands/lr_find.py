"""`mega lr-find`: a sweep over learning rates before a run, its picture, and a rate to train with."""

from __future__ import annotations

from pathlib import Path

from mega.commands import finetune
from mega.core.config.run import RunConfig
from mega.core.config.world import is_first_rank


def run(run: RunConfig) -> int:
    """Find a learning rate: train a few steps while it grows, and look where the loss falls fastest.

    Takes the flags of the run that is planned, of mega pretrain or mega finetune. The rate grows from --min-lr [1e-7]
    to --lr [1] over --steps [100]; nothing is saved. The curve is drawn next to --metrics [lr-find.jsonl], as an SVG.
    """
    from mega.core.training.lr_find import draw, read, suggest, sweep

    planned = sweep(run)
    assert planned.log.metrics is not None
    metrics = Path(planned.log.metrics)
    try:
        code = finetune.run(planned)
    except FloatingPointError:
        code = 1
    if run.runtime.dry_run or not is_first_rank():
        return code
    points = read(metrics) if metrics.exists() else []
    if code and len(points) < 3:
        return code
    found, picture = suggest(points), metrics.with_suffix(".svg")
    draw(points, found, picture)
    print(f"suggested: --lr {found.rate:.1e}, where the loss falls fastest")
    print(f"lowest loss at {found.least:.1e}: rates from there on do not hold; {picture}")
    return 0
