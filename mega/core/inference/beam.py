"""Beam search over candidates that somebody else finds: which beams continue, which are finished, when it is over.

Every step takes the best candidates of all beams. One that stops among the best `width` is finished, with the sum of
its log-probabilities over length ** penalty as its score, length counted from the prompt's end with the stop token; the
best others are the next beams. It is over when `width` are finished and none that is open can beat the worst of them
(Megatron-LM's and transformers' rule). No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mega.core.inference.request import Beam, Top


@dataclass
class BeamSearch:
    """live: sum of log-probabilities and new ids of each open beam; at first one, without ids."""

    width: int
    tokens: int
    stop_ids: frozenset[int]
    length_penalty: float
    live: list[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: [(0.0, ())])
    finished: list[Beam] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """How many of the likeliest ids of each beam a step needs: enough for `width` beams if all others stop."""
        return max(2, 1 + len(self.stop_ids)) * self.width

    def advance(self, likeliest: Sequence[Top]) -> list[tuple[int, int]]:
        """likeliest: of each open beam. Gives the next beams as (number of the beam it continues, id); none: over."""
        found = [
            (total + logprob, number, token)
            for number, ((total, _), top) in enumerate(zip(self.live, likeliest, strict=True))
            for token, logprob in top
            if logprob > float("-inf")
        ]
        found.sort(key=lambda each: -each[0])
        following: list[tuple[float, int, int]] = []
        for rank, (total, number, token) in enumerate(found[: self.candidates]):
            if token in self.stop_ids:
                if rank < self.width:
                    self._finish(total, (*self.live[number][1], token))
            elif len(following) < self.width:
                following.append((total, number, token))
        length = len(self.live[0][1]) + 1
        self.live = [(total, (*self.live[number][1], token)) for total, number, token in following]
        if not self.live or length == self.tokens or self._over(length):
            return []
        return [(number, token) for _, number, token in following]

    def _finish(self, total: float, ids: tuple[int, ...]) -> None:
        self.finished.append(Beam(ids, self._score(total, len(ids))))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.width :]

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self.length_penalty)

    def _over(self, length: int) -> bool:
        full = len(self.finished) == self.width
        return full and self.finished[-1].score >= self._score(self.live[0][0], length)

    def result(self) -> tuple[Beam, ...]:
        """Best first; beams that are still open where the length is used up count as they are."""
        if self.live and len(self.live[0][1]) == self.tokens:
            for total, ids in self.live:
                self._finish(total, ids)
        return tuple(self.finished)
