"""Guess tokens with the model's own multi-token prediction layers.

Layer d reads, at each position i, the hidden state from layer d - 1 and the embedding of token i + d, and predicts
token i + d + 1. With tokens 0 to n known, position n - 1 is the last position for which the model has computed the
final norm. At this position, layer 1 guesses token n + 1, and each further layer guesses one more token from the
previous guess:

    position          n - 2      n - 1
    layer 1 reads     token n-1  token n     -> guesses token n + 1
    layer 2 reads     token n    the guess   -> guesses token n + 2

The layers have their own cache of keys and values. A key that depends on a guess is computed again by the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.device import sent
from mega.core.inference.cache import Blocks
from mega.core.inference.speculate import Guessed
from mega.core.inference.step import Step
from mega.core.inference.worker import paged_cache, sampled
from mega.core.model.decode_ahead import AheadStep
from mega.core.model.decoder import DecoderStage
from mega.core.ops.paged_attention import Integers

_PARTS = 16
"""Maximum number of tensors in which the states of a sequence are kept."""


@dataclass
class _Watched:
    """The states of a sequence that the layers have not read yet, and its blocks of the cache."""

    origin: int
    """Position of the first token in the cache. Earlier tokens were computed for another request with this prefix."""
    first: int
    """Position of the first state."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """Outputs of the final norm, each [t, h]."""
    blocks: list[int] = field(default_factory=list)
    promised: int = 0
    """Number of blocks that are reserved for the sequence but not allocated yet."""

    @property
    def end(self) -> int:
        """Position after the last state."""
        return self.first + sum(map(len, self.parts))

    def cut(self, end: int) -> None:
        """Remove the states from position `end` on."""
        while self.parts and self.end > end:
            last = self.parts.pop()
            if (rest := end - self.end) > 0:
                self.parts.append(last[:rest])

    def add(self, states: torch.Tensor) -> None:
        if len(self.parts) == _PARTS:
            self.parts = [torch.cat(self.parts)]
        self.parts.append(states)

    def take(self, count: int, keep: int) -> torch.Tensor:
        """Return the first `count` states, and remove all of them but the last `keep`."""
        states = torch.cat(self.parts)
        removed = max(count - keep, 0)
        self.parts, self.first = [states[removed:].clone()], self.first + removed
        return states[:count]


class _Run(NamedTuple):
    """Positions of one sequence in a pass through the layers."""

    watched: _Watched
    ids: list[int]  # the known tokens, followed by guesses
    first: int
    states: torch.Tensor  # [t, h]

    @property
    def positions(self) -> Integers:
        return np.arange(self.first, self.first + len(self.states))


class AheadDrafts:
    """Guesses tokens with the multi-token prediction layers of `stage`. blocks: blocks of the layers' cache. requests:
    maximum number of requests in flight. vocab: only ids below this value are guessed. chunk: maximum number of
    positions of one sequence in a pass."""

    eager = True

    def __init__(
        self, stage: DecoderStage, device: torch.device, blocks: Blocks, requests: int, vocab: int, chunk: int = 512
    ):
        model = stage.architecture
        windows = [each.layer.attention.window for each in model.output.ahead]
        self._cache = paged_cache(stage, windows, device, (blocks.count, blocks.size), len(model.layers))
        self._step, self._device, self._blocks, self._vocab = AheadStep(stage), device, blocks, vocab
        self._most, self._chunk = 2 * requests, chunk
        self._watched: OrderedDict[int, _Watched] = OrderedDict()

    def watch(self, step: Step, normed: torch.Tensor) -> None:
        """Store the hidden states of one step of the model. normed: [tokens, h], the output of its final norm."""
        start = 0
        for number, count, length in zip(
            step.sequences.tolist(), step.counts.tolist(), step.lengths.tolist(), strict=True
        ):
            first, watched = length - count, self._watched.get(number)
            if number < 0:  # belongs to no sequence
                start += count
                continue
            if watched is None or not watched.first <= first <= watched.end:
                self.free(number)
                watched = self._watched[number] = _Watched(first, first)
            watched.cut(first)
            watched.add(normed[start : start + count])
            self._watched.move_to_end(number)
            start += count
        while len(self._watched) > self._most:
            self.free(next(iter(self._watched)))

    @torch.inference_mode()
    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        admitted = [each for each in asked if len(each.numbers) and self._admit(each)]
        runs = [self._last_run(each) for each in admitted]
        if runs:
            self._guess(runs, [each.numbers for each in admitted])
        guesses = {
            each.number: run.ids[len(each.ids) :][: len(each.numbers)] for each, run in zip(admitted, runs, strict=True)
        }
        return [guesses.get(each.number, []) for each in asked]

    def _admit(self, asked: Guessed) -> bool:
        """Whether the states of all known tokens but the last are stored, and the cache has space for the sequence."""
        watched = self._watched.get(asked.number)
        if watched is None:
            return False
        watched.cut(len(asked.ids) - 1)
        if watched.end < len(asked.ids) - 1 or watched.end == watched.first:
            return False
        if not watched.blocks and not watched.promised:
            need = -(-(asked.longest - watched.origin) // self._blocks.size)
            if not self._blocks.admit((), need):
                return False
            watched.promised = need
        return True

    def _last_run(self, asked: Guessed) -> _Run:
        """Return the last positions of a sequence, at which tokens are guessed; earlier positions are computed here, in
        chunks."""
        watched, ids, depths = self._watched[asked.number], list(asked.ids), self._step.depths
        while watched.end - watched.first >= self._chunk + depths:
            first = watched.first
            self._through([_Run(watched, ids, first, watched.take(self._chunk, 0))], [])
        first, count = watched.first, watched.end - watched.first
        return _Run(watched, ids, first, watched.take(count, depths - 1))

    def _guess(self, runs: Sequence[_Run], numbers: Sequence[Sequence[tuple[float, ...]]]) -> None:
        """Append one guess from each layer to the ids of each run. numbers: as in `Guessed`; if a run has fewer rows
        than there are layers, its last row is used repeatedly."""
        rows = [[each[min(depth, len(each) - 1)] for each in numbers] for depth in range(self._step.depths)]
        self._through(runs, [np.array(row, dtype=np.float64) for row in rows])

    def _through(self, runs: Sequence[_Run], numbers: Sequence[NDArray[np.float64]]) -> None:
        """Run all layers. numbers: for each layer, `Step.numbers` for the layer's guesses, [runs, n]; if empty, no
        token is guessed."""
        counts = np.array([len(run.states) for run in runs])
        positions = np.concatenate([run.positions for run in runs])
        addresses, tables = self._allocate(runs)
        lengths = np.array([run.first - run.watched.origin for run in runs]) + counts
        h, device_positions = torch.cat([run.states for run in runs]), sent(positions, self._device)
        last = sent(np.cumsum(counts) - 1, self._device)
        for depth in range(self._step.depths):
            tokens = [run.ids[position + depth + 1] for run in runs for position in run.positions.tolist()]
            self._cache.begin(sent(addresses, self._device), self._cache.pages(counts, lengths, tables))
            h = self._step(depth, sent(np.array(tokens), self._device), device_positions, h, self._cache)
            if numbers:
                logits = self._step.logits(h[last])[:, : self._vocab].float()
                guesses, _ = sampled(logits, numbers[depth], numbers[depth][:, 0] > 0)
                for run, guess in zip(runs, guesses.clamp(0, self._vocab - 1).tolist(), strict=True):
                    run.ids.append(guess)

    def _allocate(self, runs: Sequence[_Run]) -> tuple[Integers, Integers]:
        """Allocate blocks. Return the address of each position in the cache, and the blocks of each run, [runs, b]."""
        size, addresses = self._blocks.size, list[Integers]()
        for run in runs:
            rows, watched = run.positions - run.watched.origin, run.watched
            while len(watched.blocks) * size <= rows[-1]:
                watched.blocks.append(self._blocks.take())
                watched.promised -= 1
            addresses.append(np.array(watched.blocks)[rows // size] * size + rows % size)
        width = max(len(run.watched.blocks) for run in runs)
        tables = np.array([run.watched.blocks + [0] * (width - len(run.watched.blocks)) for run in runs])
        return np.concatenate(addresses), tables

    def free(self, number: int) -> None:
        watched = self._watched.pop(number, None)
        if watched is not None:
            for block in reversed(watched.blocks):
                watched.promised += self._blocks.release(block)
            self._blocks.waive(watched.promised)

    def close(self) -> None:
        self._watched.clear()
