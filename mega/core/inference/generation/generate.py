"""Generate tokens with an engine, and compute losses with a whole model. This module does not depend on a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mega.core.family import family
from mega.core.inference.request import SEEDS, Citation, Engine, Event, Request, Sampling


@torch.no_grad()
def logits(stage: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits, [b, s, vocab], without vocabulary padding. ids: int64 [b, s]."""
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
    """Yield up to `tokens` ids that follow `prompt`, from an engine without other requests. Stop after yielding an id
    in `stop_ids`. cite: function that is called once for each chunk of the text, with the neighbours that the model
    reads. If the generator is closed early, the request is cancelled.

    If the text exceeds the model's maximum length, its beginning is dropped, so that the remaining text fills at most
    half of that length. Errors: RequestError for an empty prompt.
    """
    ids, longest, chunk, seed = list(prompt), engine.limits.longest, engine.limits.chunk, how.seed
    dropped, last_cited = 0, -1
    while tokens > 0:
        if len(ids) >= longest:
            count = _dropped(len(ids), longest, chunk)
            ids, dropped = ids[count:], dropped + count
        room = min(tokens, longest - len(ids))
        request = Request(prompt=tuple(ids), tokens=room, sampling=how, stop_ids=stop_ids, adapter=adapter)
        number = engine.add(request)
        try:
            while not engine.idle:
                for event in engine.step():
                    check_answered(event)
                    assert event.token is not None
                    cited = [each for each in _numbered(event.cited, chunk, dropped) if each.chunk > last_cited]
                    if cited:
                        cite(cited)
                        last_cited = cited[-1].chunk
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
        # With the same seed, the next request would repeat the random numbers of the previous request.
        seed = None if seed is None else seed + 1 if seed < SEEDS[1] else SEEDS[0]
        how = replace(how, seed=seed)


def _dropped(length: int, longest: int, chunk: int) -> int:
    """Return the number of tokens to drop from the start of a text, so that at most `longest` / 2 tokens remain.

    Whole chunks are dropped, so that chunk boundaries do not move, unless a chunk is longer than half of `longest`.

    >>> _dropped(48, 48, 1), _dropped(48, 48, 4), _dropped(50, 48, 5), _dropped(8, 8, 8)
    (24, 24, 30, 4)
    """
    least = length - max(1, longest // 2)
    return -(-least // chunk) * chunk if chunk <= longest // 2 else least


def _numbered(cited: Sequence[Citation], chunk: int, dropped: int) -> list[Citation]:
    """Renumber the chunks of citations so that they are counted from the start of the whole text, not after the first
    `dropped` tokens.

    >>> _numbered([Citation(1, 7, "corpus", 0, "text")], 4, 24)[0].chunk
    7
    """
    return [each._replace(chunk=each.chunk + -(-dropped // chunk)) for each in cited]


def check_answered(event: Event) -> None:
    """Raise ValueError if an event reports a failed request."""
    if event.finish == "failed":
        raise ValueError(f"no answer: {event.message}")


def losses(stage: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return -ln p of every id except the first, [len(ids) - 1], in nats.

    A long text is split into windows of the model's maximum length, so the first ids of each window have little
    context.
    """
    window, parts = stage.architecture.positions, [torch.zeros(0)]
    for start in range(0, len(ids) - 1, window):
        part = torch.tensor([ids[start : start + window + 1]], device=next(stage.parameters()).device)
        window_logits = logits(stage, part[:, :-1])
        parts.append(torch.nn.functional.cross_entropy(window_logits[0].float(), part[0, 1:], reduction="none").cpu())
    return torch.cat(parts)
