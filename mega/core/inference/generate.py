"""Text continued and text judged by a whole model on one device. Ids in, ids out: it knows no tokenizer.

Nothing is cached between tokens: every new token is a forward pass over what the model can see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mega.core.family import family
from mega.core.inference.request import Sampling
from mega.core.inference.sampling import choose


@torch.no_grad()
def logits(stage: Any, ids: torch.Tensor) -> torch.Tensor:
    """ids int64 [b, s] -> [b, s, vocab], without the vocabulary's padding."""
    prompt = family(stage.model).prompt
    if prompt is None:
        raise ValueError(f"--load: a model of --family {stage.model.family} does not continue text")
    found: torch.Tensor = stage(prompt(ids), outputs=True).outputs
    return found[..., : stage.model.vocab]


def generate(
    stage: Any,
    prompt: Sequence[int],
    tokens: int,
    how: Sampling,
    *,
    seed: int = 0,
    end: int | None = None,
    known: int | None = None,
) -> Iterator[int]:
    """Up to `tokens` ids that follow `prompt`, one by one; ends after the id `end`, which it yields too.

    known: ids are drawn below this: a model's vocabulary may be rounded up beyond its tokenizer's.
    Of a text longer than the model's positions, the model sees the end. Errors: ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("--prompt: must hold at least one token")
    window, device = _window(stage), _device(stage)
    generator = torch.Generator(device).manual_seed(seed)
    seen = list(prompt)
    for _ in range(tokens):
        ids = torch.tensor([seen[-window:]], device=device)
        seen.append(choose(logits(stage, ids)[0, -1, :known], how, generator))
        yield seen[-1]
        if seen[-1] == end:
            return


def losses(stage: Any, ids: Sequence[int]) -> torch.Tensor:
    """-ln p of every id but the first, [len(ids) - 1], in nats.

    A long text is cut into windows of the model's positions, so what a window begins with is judged from little.
    """
    window, parts = _window(stage), [torch.zeros(0)]
    for start in range(0, len(ids) - 1, window):
        part = torch.tensor([ids[start : start + window + 1]], device=_device(stage))
        found = logits(stage, part[:, :-1])
        parts.append(torch.nn.functional.cross_entropy(found[0].float(), part[0, 1:], reduction="none").cpu())
    return torch.cat(parts)


def _window(stage: Any) -> int:
    positions: int | None = stage.model.positions
    assert positions is not None
    return positions


def _device(stage: Any) -> torch.device:
    device: torch.device = next(stage.parameters()).device
    return device
