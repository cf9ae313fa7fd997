"""Guess tokens with a smaller model, which has its own cache and worker on rank 0.

The smaller model samples with the same random numbers as the large model, so both often choose the same token if their
probabilities are similar. The host launches all steps that guess tokens, then waits once for all guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from mega.core.inference.cache import Blocks
from mega.core.inference.speculate import MOST, Guessed
from mega.core.inference.step import CHOOSE, NOT_FINITE, NUMBERS, Step, from_request, scratch_step
from mega.core.inference.worker import Worker
from mega.core.ops.paged_attention import Integers


class DraftRun(NamedTuple):
    """Consecutive positions of a sequence in a step that guesses tokens."""

    tokens: Integers  # int64 [t]; negative values are `from_request` placeholders
    first: int  # position of the first token
    blocks: Sequence[int]  # blocks of the sequence in the cache
    number: int  # unique number of the sequence
    request: int  # the run's value in `Step.requests`
    offset: int = 0  # offset added to a position to get its row in the rotary tables


def draft_step(runs: Sequence[DraftRun], numbers: Sequence[tuple[float, ...]], size: int) -> Step:
    """Return a step that guesses one token after each run. numbers: `Step.numbers` of the guesses; empty if the step
    only computes known tokens, so that no logits are returned. size: number of tokens in a block."""
    counts = np.array([len(run.tokens) for run in runs], dtype=np.int64)
    positions = [np.arange(run.first, run.first + len(run.tokens)) for run in runs]
    addresses = [
        np.array(run.blocks)[indices // size] * size + indices % size
        for run, indices in zip(runs, positions, strict=True)
    ]
    lengths = np.array([run.first for run in runs], dtype=np.int64) + counts
    width, rows = -(-int(lengths.max()) // size), len(numbers)
    tables = [[*run.blocks[:width], *[0] * (width - len(run.blocks))] for run in runs]
    minus_ones, pairs = np.full(rows, -1, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    return Step(
        tokens=np.concatenate([run.tokens for run in runs]).astype(np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(addresses),
        counts=counts,
        lengths=lengths,
        tables=np.array(tables, dtype=np.int64),
        sequences=np.array([run.number for run in runs], dtype=np.int64),
        adapters=np.zeros(len(runs), dtype=np.int64),
        offsets=np.array([run.offset for run in runs], dtype=np.int64),
        copies=pairs,
        wanted=np.cumsum(counts)[:rows] - 1,
        targets=minus_ones * 0 + CHOOSE,
        tops=minus_ones,
        seen=minus_ones,
        requests=np.array([run.request for run in runs[:rows]], dtype=np.int64),
        marks=pairs,
        biases=np.zeros((0, 3)),
        numbers=np.array(numbers, dtype=np.float64).reshape(-1, len(NUMBERS)),
        allowed=np.zeros((0, 0), dtype=np.bool_),
    )


@dataclass
class _CachedDraft:
    """A sequence in the small model's cache."""

    blocks: list[int]
    promised: int
    """Number of blocks that are reserved for the sequence but not allocated yet."""
    computed: int = 0
    """Number of the sequence's tokens in the cache."""
    length: int = 0
    """Number of known tokens when tokens were last guessed."""
    guesses: list[int] = field(default_factory=list)
    """The last guesses, which follow the first `length` tokens."""

    def keep(self, ids: Sequence[int]) -> None:
        """Keep cached tokens only up to the first wrong guess. ids: the known tokens."""
        right_count = 0
        while right_count < len(self.guesses) - 1 and self.length + right_count < len(ids) - 1:
            if self.guesses[right_count] != ids[self.length + right_count]:
                break
            right_count += 1
        self.computed = min(self.length + right_count, len(ids) - 1)


class ModelDrafts:
    """Guesses tokens with a model. worker: runs the whole model on this rank. blocks: the blocks of the model's cache.
    chunk: maximum number of tokens in a step.
    """

    eager = True

    def __init__(self, worker: Worker, blocks: Blocks, chunk: int = 512):
        self._worker, self._blocks, self._chunk = worker, blocks, chunk
        self._cached: dict[int, _CachedDraft] = {}

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes of the model's weights and of its cache."""
        parameters = self._worker.stage.parameters()
        return sum(each.nbytes for each in parameters), self._worker.cache.pool.nbytes

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        admitted = [each for each in asked if len(each.numbers) and self._admit(each)]
        guesses: dict[int, list[int]] = {each.number: [] for each in asked}
        for each in admitted:
            self._cached[each.number].keep(each.ids)
            self._catch_up(each)
        launched = []
        for turn in range(max((len(each.numbers) for each in admitted), default=0)):
            sequences = [each for each in admitted if turn < len(each.numbers)]
            launched.append((sequences, self._worker.launch(self._step(sequences, turn))))
        for sequences, step in launched:
            for each, choice in zip(sequences, step.choices(), strict=True):
                guesses[each.number].append(choice.token)
        for each in admitted:
            cached = self._cached[each.number]
            guesses[each.number] = list(takewhile(lambda token: token != NOT_FINITE, guesses[each.number]))
            cached.length, cached.guesses = len(each.ids), guesses[each.number]
        return [guesses[each.number] for each in asked]

    def _admit(self, asked: Guessed) -> bool:
        if asked.number in self._cached:
            return True
        need = -(-(asked.longest + MOST) // self._blocks.size)
        if not self._blocks.admit((), need):
            return False
        self._cached[asked.number] = _CachedDraft([], need)
        return True

    def _catch_up(self, asked: Guessed) -> None:
        """Compute, in chunks, tokens that are not in the cache, until at most one chunk is left."""
        cached = self._cached[asked.number]
        while len(asked.ids) - cached.computed > self._chunk:
            tokens = np.array(asked.ids[cached.computed : cached.computed + self._chunk], dtype=np.int64)
            self._worker.launch(self._made([asked], [tokens], []))

    def _step(self, asked: Sequence[Guessed], turn: int) -> Step:
        """Return a step that guesses one more token of each sequence. The first step also computes all known tokens
        that are not in the cache; each later step continues from the token that the previous step chose."""
        tokens = [
            np.array(each.ids[self._cached[each.number].computed :] if turn == 0 else [from_request(each.request)])
            for each in asked
        ]
        return self._made(asked, tokens, [each.numbers[turn] for each in asked])

    def _made(self, asked: Sequence[Guessed], tokens: Sequence[Integers], numbers: Sequence[tuple[float, ...]]) -> Step:
        runs = [self._run(each, new) for each, new in zip(asked, tokens, strict=True)]
        return draft_step(runs, numbers, self._blocks.size)

    def _run(self, asked: Guessed, tokens: Integers) -> DraftRun:
        """Return a run of new tokens, for which blocks are allocated."""
        cached = self._cached[asked.number]
        first, end = cached.computed, cached.computed + len(tokens)
        while len(cached.blocks) * self._blocks.size < end:
            cached.blocks.append(self._blocks.take())
            cached.promised -= 1
        cached.computed = end
        return DraftRun(tokens, first, cached.blocks, asked.number, asked.request)

    def warm_up(self, counts: Sequence[int]) -> None:
        longest = self._worker.stage.architecture.positions
        if sum(counts) <= self._chunk and max(counts) <= longest:
            size, vocab, free = self._blocks.size, self._worker.vocab, self._blocks.never_used
            self._worker.run(scratch_step(counts, size, vocab, free=free))

    def free(self, number: int) -> None:
        cached = self._cached.pop(number, None)
        if cached is not None:
            for block in reversed(cached.blocks):
                cached.promised += self._blocks.release(block)
            self._blocks.waive(cached.promised)

    def close(self) -> None:
        self._worker.close()
