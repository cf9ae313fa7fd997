"""Generate texts from fixed prompts between steps, with the stages that are being trained, in any layout without
context parallelism. There is no KV cache: every token needs a forward pass over the whole text, which costs little
compared with training. All ranks run the same steps, and rank 0 draws the tokens.
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
"""Texts are padded to a multiple of this length, which tensor ranks and kernels require."""


class Sampler:
    """Continues each prompt by `tokens` tokens. prompts: texts; if empty, one text is generated from the start of a
    document. meters: the meters of the run; None except on rank 0."""

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
        """Generate and report one text per prompt. The texts depend only on the state and the step."""
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
    """Generate up to `tokens` ids after `prompt`, without the end-of-document id. This is a collective that all ranks
    must call."""
    ids = list(prompt)
    for _ in range(tokens):  # all ranks run all passes, even after the end of a document
        ids.append(_draw(state, _next_logits(state, ids), draws, temperature, top_k))
    new = ids[len(prompt) :]
    return new[: new.index(end)] if end in new else new


def _next_logits(state: TrainState, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of the next token, fp32 [vocab] on the CPU, identical on all ranks with the same data index."""
    model, mesh, device = architecture(state.run.model), state.mesh, state.device.torch
    prompt = family(state.run.model).prompt
    assert prompt is not None
    length = min(-(-len(ids) // MULTIPLE) * MULTIPLE, model.positions)
    row = torch.zeros(1, length, dtype=torch.int64)
    row[0, : len(ids)] = torch.tensor(ids)
    outputs = output_step(state, [prompt(row).to(device)])
    logits = torch.zeros(model.input.vocab, device=device)
    if outputs:  # empty except on the last stage; other stages add zeros
        logits += all_gather(outputs[0][0, len(ids) - 1].float(), mesh.tp)[: model.input.vocab]
    all_reduce(logits, mesh.pp)
    return logits.cpu()


def _draw(state: TrainState, logits: torch.Tensor, draws: torch.Generator, temperature: float, top_k: int) -> int:
    """Draw a token on rank 0 for all ranks. temperature: 0 selects the most likely token. top_k: 0 allows all
    tokens."""
    top, ids = logits.topk(min((top_k or len(logits)) if temperature else 1, len(logits)))
    probabilities = torch.softmax(top / (temperature or 1.0), 0)
    sample = ids[torch.multinomial(probabilities, 1, generator=draws)]
    token = (sample if state.mesh.rank == 0 else torch.zeros_like(sample)).to(state.device.torch)
    all_reduce(token, state.mesh.everyone)  # a broadcast of rank 0's token, to which other ranks add 0
    return int(token)
