"""Texts of fixed prompts between steps, by the stages that train, in any layout but over context ranks.

Every token is a forward pass over its whole text: what inference does with a cache is another room's, and a few texts
now and then are cheap next to training. All ranks take the same steps, and one draw counts for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mega.core.architecture import architecture
from mega.core.family import family
from mega.core.parallel.collectives import all_gather, all_reduce
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.metrics.meters import Meters
from mega.core.training.state import TrainState
from mega.core.training.step import output_step

TEMPERATURE, TOP_K = 0.8, 50

MULTIPLE = 64
"""Lengths that a text is filled up to: what tensor ranks and kernels take."""


class Sampler:
    """Continues prompts by `tokens` each. prompts: texts; none is the beginning of a document. meters: on rank 0."""

    def __init__(
        self,
        state: TrainState,
        tokenizer: Tokenizer,
        meters: Meters | None,
        report: Callable[[str], None],
        *,
        prompts: Sequence[str],
        tokens: int,
    ):
        self._state, self._tokenizer, self._meters, self._report = state, tokenizer, meters, report
        longest = architecture(state.run.model).positions
        self._tokens = min(tokens, longest - 1)
        begin = [] if tokenizer.start is None else [tokenizer.start]
        room = longest - self._tokens
        self._prompts = [(tokenizer.encode(text) or begin)[-room:] for text in prompts or ("",)]
        if not all(self._prompts):
            raise ValueError(f"--sample-prompts is missing: {tokenizer.kind} has no token that begins a text")

    def sample(self) -> None:
        """One text of each prompt, reported. The same step gives the same texts."""
        step = self._state.progress.step
        draws = torch.Generator().manual_seed(self._state.run.runtime.seed + step)
        for number, prompt in enumerate(self._prompts, 1):
            ids = [*prompt, *continuation(self._state, prompt, self._tokens, draws, self._tokenizer.eod)]
            text = self._tokenizer.decode(ids)
            name = "sample" if len(self._prompts) == 1 else f"sample {number}"
            if self._meters is not None:
                self._meters.text(step, name, text)
            self._report(f"{name} at step {step} | {text!r}")


@torch.no_grad()
def continuation(
    state: TrainState,
    prompt: Sequence[int],
    tokens: int,
    draws: torch.Generator,
    end: int | None = None,
    *,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
) -> list[int]:
    """Up to `tokens` ids that follow `prompt`, without the one that ends a document. Every rank calls it alike."""
    ids = list(prompt)
    for _ in range(tokens):  # all ranks as often, also where a text has ended
        ids.append(_draw(state, _next_logits(state, ids), draws, temperature, top_k))
    new = ids[len(prompt) :]
    return new[: new.index(end)] if end in new else new


def _next_logits(state: TrainState, ids: Sequence[int]) -> torch.Tensor:
    """fp32 [vocab] on the CPU, the same on every rank of a data coordinate."""
    model, mesh, where = architecture(state.run.model), state.mesh, state.device.torch
    prompt = family(state.run.model).prompt
    assert prompt is not None
    length = min(-(-len(ids) // MULTIPLE) * MULTIPLE, model.positions)
    row = torch.zeros(1, length, dtype=torch.int64)
    row[0, : len(ids)] = torch.tensor(ids)
    outputs = output_step(state, [prompt(row).to(where)])
    logits = torch.zeros(model.input.vocab, device=where)
    if outputs:
        logits += all_gather(outputs[0][0, len(ids) - 1].float(), mesh.tp)[: model.input.vocab]
    all_reduce(logits, mesh.pp)
    return logits.cpu()


def _draw(state: TrainState, logits: torch.Tensor, draws: torch.Generator, temperature: float, top_k: int) -> int:
    """One of the likeliest, the same on all ranks: rank 0's. temperature: 0 takes the likeliest. top_k: 0 is off."""
    top, ids = logits.topk(min((top_k or len(logits)) if temperature else 1, len(logits)))
    chance = torch.softmax(top / (temperature or 1.0), 0)
    chosen = ids[torch.multinomial(chance, 1, generator=draws)]
    drawn = (chosen if state.mesh.rank == 0 else torch.zeros_like(chosen)).to(state.device.torch)
    all_reduce(drawn, state.mesh.everyone)
    return int(drawn)
