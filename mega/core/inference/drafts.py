"""A smaller model that guesses what another one says: its own cache, and steps of its own worker on rank 0.

It draws by the numbers that the large model will draw by, so that both choose the same token as often as their
probabilities overlap. Steps follow each other on the device; the host waits once, for all guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from mega.core.inference.cache import Blocks
from mega.core.inference.speculate import MOST, Guessed
from mega.core.inference.step import CHOOSE, NOT_FINITE, NUMBERS, Step, from_request
from mega.core.inference.worker import Worker
from mega.core.ops.paged_attention import Integers


@dataclass
class _Known:
    """A sequence of which the first `computed` tokens are in the cache. promised: blocks that it may still take.
    guesses: the last ones, after `length` tokens."""

    blocks: list[int]
    promised: int
    computed: int = 0
    length: int = 0
    guesses: list[int] = field(default_factory=list)

    def keep(self, ids: Sequence[int]) -> None:
        """Of what was computed of guesses, that of right ones."""
        right = 0
        while right < len(self.guesses) - 1 and self.length + right < len(ids) - 1:
            if self.guesses[right] != ids[self.length + right]:
                break
            right += 1
        self.computed = min(self.length + right, len(ids) - 1)


class ModelDrafts:
    """worker: of a model that this rank holds whole. blocks: of its cache. chunk: tokens of a step at the most."""

    eager = True

    def __init__(self, worker: Worker, blocks: Blocks, chunk: int = 512):
        self._worker, self._blocks, self._chunk = worker, blocks, chunk
        self._known: dict[int, _Known] = {}

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        taken = [each for each in asked if len(each.numbers) and self._admit(each)]
        guesses: dict[int, list[int]] = {each.number: [] for each in asked}
        for each in taken:
            self._known[each.number].keep(each.ids)
            self._catch_up(each)
        launched = []
        for turn in range(max((len(each.numbers) for each in taken), default=0)):
            here = [each for each in taken if turn < len(each.numbers)]
            launched.append((here, self._worker.launch(self._step(here, turn))))
        for here, step in launched:
            for each, choice in zip(here, step.choices(), strict=True):
                guesses[each.number].append(choice.token)
        for each in taken:
            known = self._known[each.number]
            guesses[each.number] = list(takewhile(lambda token: token != NOT_FINITE, guesses[each.number]))
            known.length, known.guesses = len(each.ids), guesses[each.number]
        return [guesses[each.number] for each in asked]

    def _admit(self, asked: Guessed) -> bool:
        if asked.number in self._known:
            return True
        need = -(-(asked.longest + MOST) // self._blocks.size)
        if not self._blocks.admit((), need):
            return False
        self._known[asked.number] = _Known([], need)
        return True

    def _catch_up(self, asked: Guessed) -> None:
        """Compute all that is not in the cache, but for the last tokens."""
        known = self._known[asked.number]
        while len(asked.ids) - known.computed > self._chunk:
            tokens = np.array(asked.ids[known.computed : known.computed + self._chunk], dtype=np.int64)
            self._worker.launch(self._made([asked], [tokens], []))

    def _step(self, asked: Sequence[Guessed], turn: int) -> Step:
        """One more token of each: the first follows all known ones, others what the step before chose."""
        tokens = [
            np.array(each.ids[self._known[each.number].computed :] if turn == 0 else [from_request(each.request)])
            for each in asked
        ]
        return self._made(asked, tokens, [each.numbers[turn] for each in asked])

    def _made(self, asked: Sequence[Guessed], tokens: Sequence[Integers], numbers: Sequence[tuple[float, ...]]) -> Step:
        size = self._blocks.size
        positions, stored, tables, lengths = list[Integers](), list[Integers](), list[list[int]](), list[int]()
        for each, new in zip(asked, tokens, strict=True):
            known = self._known[each.number]
            end = known.computed + len(new)
            while len(known.blocks) * size < end:
                known.blocks.append(self._blocks.take())
                known.promised -= 1
            at = np.arange(known.computed, end)
            positions.append(at)
            stored.append(np.array(known.blocks)[at // size] * size + at % size)
            tables.append(known.blocks)
            lengths.append(end)
            known.computed = end
        width, rows = max(map(len, tables)), len(numbers)
        none, pairs = np.full(rows, -1, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
        return Step(
            tokens=np.concatenate(tokens).astype(np.int64),
            positions=np.concatenate(positions),
            slots=np.concatenate(stored),
            counts=np.array([len(new) for new in tokens]),
            lengths=np.array(lengths),
            tables=np.array([table + [0] * (width - len(table)) for table in tables]),
            sequences=np.array([each.number for each in asked]),
            adapters=np.zeros(len(asked), dtype=np.int64),
            offsets=np.zeros(len(asked), dtype=np.int64),
            copies=pairs,
            wanted=np.cumsum([len(new) for new in tokens])[:rows] - 1,
            targets=none * 0 + CHOOSE,
            tops=none,
            seen=none,
            requests=np.array([each.request for each in asked[:rows]], dtype=np.int64),
            marks=pairs,
            biases=np.zeros((0, 3)),
            numbers=np.array(numbers, dtype=np.float64).reshape(-1, len(NUMBERS)),
            allowed=np.zeros((0, 0), dtype=np.bool_),
        )

    def free(self, number: int) -> None:
        known = self._known.pop(number, None)
        if known is not None:
            for block in reversed(known.blocks):
                known.promised += self._blocks.release(block)
            self._blocks.waive(known.promised)

    def close(self) -> None:
        self._worker.close()
