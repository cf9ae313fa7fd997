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
        self._longest = longest

    def sample(self) -> None:
        """One text of each prompt, reported. The same step gives the same texts."""
        step = self._state.progress.step
        draws = torch.Generator().manual_seed(self._state.run.runtime.seed + step)
        for number, prompt in enumerate(self._prompts, 1):
            ids = self._continued(prompt, draws)
            text = self._tokenizer.decode(ids)
            name = "sample" if len(self._prompts) == 1 else f"sample {number}"
            if self._meters is not None:
                self._meters.text(step, name, text)
            self._report(f"{name} at step {step} | {text!r}")

    @torch.no_grad()
    def _continued(self, prompt: Sequence[int], draws: torch.Generator) -> list[int]:
        """The prompt and what follows, to the end of the document at the most."""
        ids, end, new = list(prompt), self._tokenizer.eod, 0
        for _ in range(self._tokens):  # all ranks as often, also where a text has ended
            chosen = self._draw(self._next_logits(ids), draws)
            ids.append(chosen)
        for token in ids[len(prompt) :]:
            if token == end:
                break
            new += 1
        return ids[: len(prompt) + new]

    def _next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """fp32 [vocab] on the CPU, the same on every rank of a data coordinate."""
        state = self._state
        mesh, vocab, where = state.mesh, architecture(state.run.model).input.vocab, state.device.torch
        prompt = family(state.run.model).prompt
        assert prompt is not None
        length = min(-(-len(ids) // MULTIPLE) * MULTIPLE, self._longest)
        row = torch.zeros(1, length, dtype=torch.int64)
        row[0, : len(ids)] = torch.tensor(ids)
        made = output_step(state, [prompt(row).to(where)])
        found = torch.zeros(vocab, device=where)
        if made:
            found += all_gather(made[0][0, len(ids) - 1].float(), mesh.tp)[:vocab]
        all_reduce(found, mesh.pp)
        return found.cpu()

    def _draw(self, logits: torch.Tensor, draws: torch.Generator) -> int:
        """One of the likeliest, the same on all ranks: rank 0's."""
        top, ids = logits.topk(min(TOP_K, len(logits)))
        chance = torch.softmax(top / TEMPERATURE, 0)
        chosen = ids[torch.multinomial(chance, 1, generator=draws)]
        state = self._state
        drawn = (chosen if state.mesh.rank == 0 else torch.zeros_like(chosen)).to(state.device.torch)
        all_reduce(drawn, state.mesh.everyone)
        return int(drawn)
