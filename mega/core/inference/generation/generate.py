"""Text continued by an engine, and text judged by a whole model. Ids in, ids out: it knows no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mega.core.family import family
from mega.core.inference.request import SEEDS, Citation, Engine, Event, Request, Sampling


@torch.no_grad()
def logits(stage: Any, ids: torch.Tensor) -> torch.Tensor:
    """ids int64 [b, s] -> [b, s, vocab], without the vocabulary's padding."""
    prompt, model = family(stage.model).prompt, stage.architecture
    if prompt is None:
        kind = "with --retriever" if stage.model.retriever else f"of --family {model.family}"
        raise ValueError(f"--load: a model {kind} does not continue text")
    found: torch.Tensor = stage(prompt(ids), outputs=True).outputs
    return found[..., : model.input.vocab]


def generate(
    engine: Engine,
    prompt: Sequence[int],
    tokens: int,
    how: Sampling,
    *,
    stop_ids: frozenset[int] = frozenset(),
    adapter: str | None = None,
    cite: Callable[[Sequence[Citation]], None] = lambda cited: None,
) -> Generator[int, None, None]:
    """Up to `tokens` ids that follow `prompt`, one by one, from an engine that has nothing else to do; ends after an id
    of `stop_ids`, which it yields too. cite: is given what the model reads of a database.
    Closed before its end, it leaves the engine free.

    Where a text outgrows the model's positions, the model sees its last ones: half of them to begin with. Errors:
    RequestError for an empty prompt.
    """
    seen, longest, seed = list(prompt), engine.limits.longest, how.seed
    while tokens > 0:
        if len(seen) >= longest:
            seen = seen[-max(1, longest // 2) :]
        more = min(tokens, longest - len(seen))
        request = Request(prompt=tuple(seen), tokens=more, sampling=how, stop_ids=stop_ids, adapter=adapter)
        number = engine.add(request)
        try:
            while not engine.idle:
                for event in engine.step():
                    check_answered(event)
                    assert event.token is not None
                    if event.cited:
                        cite(event.cited)
                    seen.append(event.token)
                    yield event.token
                    if event.finish == "stop":
                        return
        except GeneratorExit:  # closed by the caller, who wants no more of it
            engine.cancel(number)
            while not engine.idle:
                engine.step()
            raise
        tokens -= more
        seed = None if seed is None else seed + 1 if seed < SEEDS[1] else SEEDS[0]  # other draws than before
        how = replace(how, seed=seed)


def check_answered(event: Event) -> None:
    """Errors: ValueError where a request failed."""
    if event.finish == "failed":
        raise ValueError(f"no answer: {event.message}")


def losses(stage: Any, ids: Sequence[int]) -> torch.Tensor:
    """-ln p of every id but the first, [len(ids) - 1], in nats.

    A long text is cut into windows of the model's positions, so what a window begins with is judged from little.
    """
    window, parts = stage.architecture.positions, [torch.zeros(0)]
    for start in range(0, len(ids) - 1, window):
        part = torch.tensor([ids[start : start + window + 1]], device=next(stage.parameters()).device)
        found = logits(stage, part[:, :-1])
        parts.append(torch.nn.functional.cross_entropy(found[0].float(), part[0, 1:], reduction="none").cpu())
    return torch.cat(parts)
