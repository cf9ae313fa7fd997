"""Sums tables of partial gradients and adds the sums to the weights' main_grads, in one launch for all weights of an
op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mega.core.ops.autograd import deliver
from mega.core.ops.kernels.language import cdiv, jit, launch, tl

PARTS, COLUMNS, WARPS = 256, 16, 8
"""Number of partial sums read per step, columns per program, and warps per program."""
MOST = 3
"""Maximum number of weights in one launch."""


@jit
def _add_up(
    tables_at, first_at, second_at, third_at, first_table, second_table, third_table, parts, width,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    table = tl.where(target == 0, first_table, tl.where(target == 1, second_table, third_table))
    offset = tables_at + table.to(tl.int64) * parts * width
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        total += tl.load(offset + part[:, None] * width + column[None, :], (part < parts)[:, None] & mask[None, :], 0.0)
    sums = tl.sum(total, 0)
    if target == 0:
        tl.store(first_at + column, tl.load(first_at + column, mask, 0.0) + sums, mask)
    elif target == 1:
        tl.store(second_at + column, tl.load(second_at + column, mask, 0.0) + sums, mask)
    else:
        tl.store(third_at + column, tl.load(third_at + column, mask, 0.0) + sums, mask)


def deliver_sums(weights: Sequence[Any], tables: torch.Tensor) -> list[torch.Tensor | None]:
    """Compute `deliver(weight, table.sum(0))` for each weight [width] and its table. tables: fp32 [weights, parts,
    width]. If a weight is None, its table is ignored.
    """
    trained = [(number, weight) for number, weight in enumerate(weights) if weight is not None and weight.requires_grad]
    targets = [weight.open_main_grad() if hasattr(weight, "open_main_grad") else None for _, weight in trained]
    gradients: list[torch.Tensor | None] = [None] * len(weights)
    if any(target is None or target.dtype != torch.float32 for target in targets) or len(trained) > MOST:
        for number, weight in trained:
            gradients[number] = deliver(weight, tables[number].sum(0))
    elif trained:
        parts, width = tables.shape[1:]
        spare = MOST - len(trained)
        numbers = [number for number, _ in trained] + [0] * spare
        launch(
            _add_up, (cdiv(width, COLUMNS), len(trained)), tables, *targets, *targets[:1] * spare, *numbers, parts,
            width, PARTS=PARTS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        for _, weight in trained:
            weight.grad_ready()
    return gradients
