"""Run a beam search on candidates from a model: determine which beams continue, which beams are finished, and when the
search ends.

Every step considers the best candidates of all beams. A stop token among the best `width` candidates finishes its beam.
The beam's score is sum(log-probabilities) / length ** penalty, where length is the number of new tokens, including the
stop token. The best candidates that are not stop tokens become the next beams. The search ends when `width` beams are
finished and the best open beam does not score higher than the worst finished beam, as in Megatron-LM and transformers.
This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mega.core.inference.request import Beam, Top


@dataclass
class BeamSearch:
    """The state of one beam search."""

    width: int
    tokens: int  # maximum number of new tokens
    stop_ids: frozenset[int]
    length_penalty: float
    live: list[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: [(0.0, ())])
    """(sum of log-probabilities, new ids) for each open beam; initially one beam without ids."""
    finished: list[Beam] = field(default_factory=list)
    """The best `width` finished beams, best first."""

    @property
    def candidates(self) -> int:
        """Number of most likely ids to request per beam, so that at least `width` of them are not stop tokens."""
        return max(2, 1 + len(self.stop_ids)) * self.width

    def advance(self, likeliest: Sequence[Top]) -> list[tuple[int, int]]:
        """Process the results of a step, and return the next beams as (index of the continued beam, new id); [] if the
        search has ended. likeliest: candidates for each open beam."""
        candidates = [
            (total + logprob, number, token)
            for number, ((total, _), top) in enumerate(zip(self.live, likeliest, strict=True))
            for token, logprob in top
            if logprob > float("-inf")
        ]
        candidates.sort(key=lambda each: -each[0])
        following: list[tuple[float, int, int]] = []
        for rank, (total, number, token) in enumerate(candidates[: self.candidates]):
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
        """Return the finished beams, best first. Beams that are still open at the length limit count as finished."""
        if self.live and len(self.live[0][1]) == self.tokens:
            for total, ids in self.live:
                self._finish(total, ids)
        return tuple(self.finished)
