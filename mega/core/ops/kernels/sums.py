"""Gradients that lie as partial sums, added up and handed to their weights: one launch for all that an op has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mega.core.ops.autograd import deliver
from mega.core.ops.kernels.language import cdiv, jit, launch, tl

PARTS, COLUMNS, WARPS = 256, 16, 8
"""Partial sums that are read at once, and columns and warps of one program."""
MOST = 3
"""Weights of one launch."""


@jit
def _add_up(
    tables_at, first_at, second_at, third_at, first_table, second_table, third_table, parts, width,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    table = tl.where(which == 0, first_table, tl.where(which == 1, second_table, third_table))
    at = tables_at + table.to(tl.int64) * parts * width
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        total += tl.load(at + part[:, None] * width + column[None, :], (part < parts)[:, None] & real[None, :], 0.0)
    sums = tl.sum(total, 0)
    if which == 0:
        tl.store(first_at + column, tl.load(first_at + column, real, 0.0) + sums, real)
    elif which == 1:
        tl.store(second_at + column, tl.load(second_at + column, real, 0.0) + sums, real)
    else:
        tl.store(third_at + column, tl.load(third_at + column, real, 0.0) + sums, real)


def deliver_sums(weights: Sequence[Any], tables: torch.Tensor) -> list[torch.Tensor | None]:
    """`deliver(weight, table.sum(0))` of each weight, [width], and its table; tables: fp32 [weights, parts, width].

    A weight that is None has no gradient, and what its table holds does not count.
    """
    asked = [(number, weight) for number, weight in enumerate(weights) if weight is not None and weight.requires_grad]
    targets = [weight.open_main_grad() if hasattr(weight, "open_main_grad") else None for _, weight in asked]
    found: list[torch.Tensor | None] = [None] * len(weights)
    if any(target is None or target.dtype != torch.float32 for target in targets) or len(asked) > MOST:
        for number, weight in asked:
            found[number] = deliver(weight, tables[number].sum(0))
    elif asked:
        parts, width = tables.shape[1:]
        spare = MOST - len(asked)
        numbers = [number for number, _ in asked] + [0] * spare
        launch(
            _add_up, (cdiv(width, COLUMNS), len(asked)), tables, *targets, *targets[:1] * spare, *numbers, parts, width,
            PARTS=PARTS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        for _, weight in asked:
            weight.grad_ready()
    return found
