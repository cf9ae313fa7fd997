"""Generate tokens with an engine, and compute losses with a whole model. Ids in, ids out: this module does not depend
on a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mega.core.family import family
from mega.core.inference.request import SEEDS, Citation, Engine, Event, Request, Sampling


@torch.no_grad()
def logits(stage: Any, ids: torch.Tensor) -> torch.Tensor:
    """ids int64 [b, s] -> logits [b, s, vocab], without the vocabulary's padding."""
    prompt, model = family(stage.model).prompt, stage.architecture
    if prompt is None:
        kind = "with --retriever" if stage.model.retriever else f"of --family {model.family}"
        raise ValueError(f"--load: a model {kind} does not continue text")
    outputs: torch.Tensor = stage(prompt(ids), outputs=True).outputs
    return outputs[..., : model.input.vocab]


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
    """Yield up to `tokens` ids that follow `prompt`, from an engine without other requests. End after an id of
    `stop_ids`, which is yielded too. cite: receives the neighbours that the model reads. If the generator is closed
    early, its request is cancelled.

    When a text exceeds the model's positions, the model continues from the last part of the text, which at first fills
    half of the positions. Errors: RequestError for an empty prompt.
    """
    ids, longest, seed = list(prompt), engine.limits.longest, how.seed
    while tokens > 0:
        if len(ids) >= longest:
            ids = ids[-max(1, longest // 2) :]
        room = min(tokens, longest - len(ids))
        request = Request(prompt=tuple(ids), tokens=room, sampling=how, stop_ids=stop_ids, adapter=adapter)
        number = engine.add(request)
        try:
            while not engine.idle:
                for event in engine.step():
                    check_answered(event)
                    assert event.token is not None
                    if event.cited:
                        cite(event.cited)
                    ids.append(event.token)
                    yield event.token
                    if event.finish == "stop":
                        return
        except GeneratorExit:  # the caller has closed the generator
            engine.cancel(number)
            while not engine.idle:
                engine.step()
            raise
        tokens -= room
        # The same seed would repeat the draws of the previous part.
        seed = None if seed is None else seed + 1 if seed < SEEDS[1] else SEEDS[0]
        how = replace(how, seed=seed)


def check_answered(event: Event) -> None:
    """Check an event. Errors: ValueError if its request has failed."""
    if event.finish == "failed":
        raise ValueError(f"no answer: {event.message}")


def losses(stage: Any, ids: Sequence[int]) -> torch.Tensor:
    """-ln p of every id except the first, [len(ids) - 1], in nats.

    A long text is split into windows of the model's maximum length, so the first ids of a window have little context.
    """
    window, parts = stage.architecture.positions, [torch.zeros(0)]
    for start in range(0, len(ids) - 1, window):
        part = torch.tensor([ids[start : start + window + 1]], device=next(stage.parameters()).device)
        window_logits = logits(stage, part[:, :-1])
        parts.append(torch.nn.functional.cross_entropy(window_logits[0].float(), part[0, 1:], reduction="none").cpu())
    return torch.cat(parts)
