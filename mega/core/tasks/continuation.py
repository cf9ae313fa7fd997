"""Prompts continued at any layout, data ranks sharing them: what lm-eval's generation tasks need.

Every new token is a forward pass over all that the model can see; nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mega.core.inference.score import TokenScorer
from mega.core.parallel.collectives import gather_json
from mega.core.tasks.rows import JudgedRow, batch_of

Stop = Callable[[list[int]], bool]


def continue_rows(
    scorer: TokenScorer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    stop: Stop,
    *,
    micro_batch: int,
    unit: int,
    temperature: float = 0.0,
    known: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Up to `tokens` ids that follow each prompt, the same on every rank; all ranks call it.

    stop: whether the ids that follow a prompt end there. temperature 0 takes the likeliest. known: ids are drawn below
    this. Errors: ValueError where context ranks share rows.
    """
    if scorer.mesh.cp.size > 1:
        raise ValueError(f"--cp {scorer.mesh.cp.size}: must be 1 where text is generated")
    dp = scorer.mesh.dp
    own = list(range(dp.index, len(prompts), dp.size))
    found: dict[int, list[int]] = {}
    for first in range(0, len(own), micro_batch):
        group = own[first : first + micro_batch]
        generator = torch.Generator().manual_seed(seed + first)
        rows = [list(prompts[number]) for number in group]
        made = _continue(scorer, rows, tokens, stop, unit, temperature, known, generator)
        found.update(zip(group, made, strict=True))
    parts: list[dict[str, Any]] = gather_json(
        {str(number): ids for number, ids in found.items()}, dp, scorer.device.torch
    )
    together = {int(number): ids for part in parts for number, ids in part.items()}
    return [together[number] for number in range(len(prompts))]


def _continue(
    scorer: TokenScorer,
    rows: list[list[int]],
    tokens: int,
    stop: Stop,
    unit: int,
    temperature: float,
    known: int | None,
    generator: torch.Generator,
) -> list[list[int]]:
    lengths, open_rows = [len(row) for row in rows], set(range(len(rows)))
    for _ in range(tokens):
        going = sorted(open_rows)
        if not going:
            break
        # The label after the last id is what is asked for; that it is 0 here changes nothing before it.
        batch = batch_of([JudgedRow([*rows[number], 0], len(rows[number])) for number in going], unit)
        logits = scorer.next_logits(batch)[:, :known].cpu()
        for number, chosen in zip(going, _choose(logits, temperature, generator), strict=True):
            rows[number].append(chosen)
            if stop(rows[number][lengths[number] :]):
                open_rows.discard(number)
    return [row[length:] for row, length in zip(rows, lengths, strict=True)]


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    if temperature <= 0:
        return [int(each) for each in logits.argmax(-1)]
    chances = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    return [int(each) for each in torch.multinomial(chances, 1, generator=generator)[:, 0]]
