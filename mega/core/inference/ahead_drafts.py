"""Guess tokens with the model's own multi-token prediction layers. This module plans the steps on rank 0;
draft_worker.py computes them on every rank.

Layer d reads, at each position i, the hidden state from layer d - 1 and the embedding of token i + d, and predicts
token i + d + 1. With tokens 0 to n known, position n - 1 is the last position for which the model has computed the
final norm. At this position, layer 1 guesses token n + 1, and each further layer guesses one more token from the
previous guess:

    position          n - 2      n - 1
    layer 1 reads     token n-1  token n     -> guesses token n + 1
    layer 2 reads     token n    the guess   -> guesses token n + 2

The guesses stay on the device until all layers have run. Keys that depend on guesses are recomputed in the next call.

Keys and hidden states are stored in the blocks of the model's cache, so requests with a common prefix share both. The
keys at the last positions of a shared prefix depend on tokens after the prefix, so a request may read keys that were
computed for another request. This affects only the guesses, never the generated text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np

from mega.core.inference.draft_worker import CHUNK, RUNS, AheadWorker
from mega.core.inference.drafts import DraftRun, draft_step
from mega.core.inference.relay import DRAFT, Relay
from mega.core.inference.speculate import Guessed
from mega.core.inference.step import NOT_FINITE, Step, from_request, scratch_step
from mega.core.inference.worker import Launched


class AheadDrafts:
    """Guesses tokens with the multi-token prediction layers. worker: runs this rank's share of the steps. relay:
    connection to the other ranks; None on a single rank. block: number of tokens per cache block. vocab: vocabulary
    size."""

    eager = True

    def __init__(self, worker: AheadWorker, relay: Relay | None, block: int, vocab: int):
        self._worker, self._relay, self._block, self._vocab, self._chunk = worker, relay, block, vocab, CHUNK
        self._computed: dict[int, int] = {}
        """Sequence number -> number of leading positions whose keys depend only on known tokens."""

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        # A sequence of one token has no hidden state yet.
        able = [each for each in asked if len(each.numbers) and len(each.ids) > 1]
        guesses = {each.number: list[int]() for each in asked}
        for each in able:
            self._catch_up(each)
        for part in self._passes(able):
            for depth, step in enumerate([self._launch(depth, self._guessing(part, depth)) for depth in self._depths]):
                for each, choice in zip(part, step.choices(), strict=True):
                    if depth < len(each.numbers):
                        guesses[each.number].append(choice.token)
            for each in part:
                self._computed[each.number] = max(len(each.ids) - self._worker.depths, 0)
        return [list(takewhile(lambda token: token != NOT_FINITE, guesses[each.number])) for each in asked]

    @property
    def _depths(self) -> range:
        return range(self._worker.depths)

    def _first(self, asked: Guessed) -> int:
        """Return the first position that a step for this sequence computes; the last position is always computed."""
        return min(self._computed.get(asked.number, 0), len(asked.ids) - 2)

    def _pending(self, asked: Guessed) -> int:
        """Return the number of positions that a step for this sequence computes."""
        return len(asked.ids) - 1 - self._first(asked)

    def _catch_up(self, asked: Guessed) -> None:
        """Compute positions in chunks until at most one chunk of positions is left."""
        while self._pending(asked) > self._chunk:
            first = self._first(asked)
            end = min(first + self._chunk, len(asked.ids) - self._worker.depths)
            for depth in self._depths:
                self._launch(depth, draft_step([self._run(asked, depth, first, end)], [], self._block))
            self._computed[asked.number] = end

    def _passes(self, asked: Sequence[Guessed]) -> Iterator[list[Guessed]]:
        """Yield the sequences in groups, each of which fits into one step."""
        part, positions = list[Guessed](), 0
        for each in asked:
            if part and positions + self._pending(each) > self._chunk:
                yield part
                part, positions = [], 0
            part.append(each)
            positions += self._pending(each)
        if part:
            yield part

    def _guessing(self, asked: Sequence[Guessed], depth: int) -> Step:
        """Return a step that guesses one token after the last position of each sequence. If a sequence has fewer rows
        of sampling parameters than there are layers, its last row is used for the remaining layers."""
        runs = [self._run(each, depth, self._first(each), len(each.ids) - 1) for each in asked]
        return draft_step(runs, [each.numbers[min(depth, len(each.numbers) - 1)] for each in asked], self._block)

    def _run(self, asked: Guessed, depth: int, first: int, end: int) -> DraftRun:
        """Return a `DraftRun` of the positions `first` to `end` - 1. Each position reads the token depth + 1 positions
        later."""
        row, depths = asked.request * self._worker.depths, self._worker.depths
        known = list(asked.ids[first + depth + 1 : end + depth + 1])
        guessed = range(depth - (end - first - len(known)), depth)
        tokens = np.array([*known, *(from_request(row + each) for each in guessed)], dtype=np.int64)
        assert asked.request >= 0 and len(tokens) == end - first <= CHUNK + depths
        return DraftRun(tokens, first, asked.blocks, asked.number, row + depth, asked.offset)

    def _launch(self, depth: int, step: Step) -> Launched:
        """Start a step on all ranks."""
        if self._relay is not None:
            self._relay.send(DRAFT, np.concatenate([[depth], step.pack()]))
        return self._worker.launch(depth, step)

    def warm_up(self, counts: Sequence[int]) -> None:
        if sum(counts) <= RUNS:
            step = scratch_step(counts, self._block, self._vocab)
            for depth in self._depths:
                self._launch(depth, step).choices()

    def free(self, number: int) -> None:
        self._computed.pop(number, None)

    def close(self) -> None:
        self._computed.clear()
