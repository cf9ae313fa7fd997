"""Tokens that a sequence may continue with, guessed ahead and checked by the model in one step.

A step of a few tokens takes a device as long as one of a single token. So where something cheap guesses the next ones,
the model computes them all at once, chooses at each position as it would without them, and keeps what follows only as
long as its own choices are the guessed ones. The answer is the same as without, greedy or drawn: a draw goes by the
request's seed and the token's number alone.

    NGrams        the text itself: what followed the last tokens when they came before
    ModelDrafts   a smaller model with the same vocabulary, which draws by the same numbers (drafts.py)
    Drafter       what these have in common; a head of the model that predicts further ahead would be another one

Whether a request's next tokens are guessed is decided by how well that went (`Confidence`): a text that cannot be
guessed is computed as without, with steps launched ahead. It knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

MOST = 15
"""Guessed tokens of a sequence at the most: with the last known one they fill a recorded step."""

TOKENS = 64
"""Tokens of a step with guesses; where more sequences are under way, the device has enough to do."""

LONGEST, SHORTEST = 4, 2
"""Numbers of last tokens that NGrams looks for, the most first."""

SURE, UNSURE = 2, 2
"""Right guesses in a row after which a request's tokens are guessed; steps without a right one after which they are
not."""

REST, LONGEST_REST = 16, 1024
"""Tokens for which a drafter that guesses from the start is not asked once its guesses were wrong; four times as many
each time, up to the second. It is then asked for one token, which costs least."""


class Guessed(NamedTuple):
    """A sequence whose next tokens are to be guessed. number: no other has it. request: as of `from_request`. ids: all
    of its tokens. longest: tokens that it may have. numbers: `Step.numbers` of the next tokens, one row for each that
    is wanted."""

    number: int
    request: int
    ids: Sequence[int]
    longest: int
    numbers: Sequence[tuple[float, ...]]


class Drafter(Protocol):
    """eager: whether it guesses from the start, and again after a rest where its guesses were wrong, since it takes
    time; else once its guesses of a text, which cost nothing, were right."""

    eager: bool

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        """Of each sequence the next tokens, at most as many as rows of its numbers."""

    def free(self, number: int) -> None:
        """A sequence has ended."""

    def close(self) -> None: ...


@dataclass
class Confidence:
    """Of a request. active: its tokens are guessed. reach: how many at the most. right: guesses in a row; wrong: steps
    in a row without a right one. expected: a guess that no step has checked. pause: the length of the next rest; 0:
    guesses cost nothing, there are no rests. rest: tokens until it is active again."""

    active: bool = False
    reach: int = 3
    right: int = 0
    wrong: int = 0
    expected: list[int] = field(default_factory=list)
    pause: int = 0
    rest: int = 0

    @classmethod
    def begin(cls, eager: bool) -> Confidence:
        """In a drafter that is as of `Drafter`."""
        return cls(active=eager, pause=REST if eager else 0)

    def checked(self, guessed: int, right: int) -> None:
        """A step has checked guesses.

        >>> confidence = Confidence(active=True)
        >>> confidence.checked(3, 3)
        >>> confidence.reach
        7
        >>> confidence.checked(7, 0)
        >>> confidence.checked(1, 0)
        >>> confidence.active, confidence.reach
        (False, 3)
        """
        self.wrong = 0 if right else self.wrong + 1
        self.reach = min(2 * self.reach + 1, MOST) if right == guessed else max(min(self.reach, right + 1), 3)
        if self.pause and right:
            self.pause = REST
        if self.wrong >= UNSURE:
            self.active, self.right, self.expected = False, 0, []
            if self.pause:
                self.wrong, self.reach = UNSURE - 1, 1  # after a rest one wrong step is enough
            else:
                self.wrong = 0
            self.rest, self.pause = self.pause, min(4 * self.pause, LONGEST_REST)

    def watched(self, token: int) -> None:
        """A token has come whose guess no step had to check.

        >>> confidence = Confidence.begin(eager=True)
        >>> confidence.checked(3, 0)
        >>> confidence.checked(3, 0)
        >>> for token in range(15): confidence.watched(token)
        >>> confidence.active
        False
        >>> confidence.watched(15)
        >>> confidence.active, confidence.pause, confidence.reach
        (True, 64, 1)
        """
        if self.rest:
            self.rest -= 1
            self.active = self.rest == 0
        elif self.expected and self.expected.pop(0) == token:
            self.right += 1
            self.active = self.right >= SURE
        else:
            self.right, self.expected = 0, []


class NGrams:
    """For each sequence, where its last tokens stand in it."""

    eager = False

    def __init__(self) -> None:
        self._ends: dict[int, tuple[list[int], dict[tuple[int, ...], int]]] = {}

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        """
        >>> numbers = [()] * 3
        >>> NGrams().propose([Guessed(0, 0, [1, 2, 3, 4, 9, 1, 2], 20, numbers), Guessed(1, 1, [1, 2, 3], 20, numbers)])
        [[3, 4, 9], []]
        """
        return [self._after(each) for each in asked]

    def _after(self, asked: Guessed) -> list[int]:
        ids = asked.ids
        seen, found = self._ends.setdefault(asked.number, ([0], {}))
        for end in range(max(seen[0], SHORTEST), len(ids)):  # the last tokens have nothing after them
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                found[tuple(ids[end - size : end])] = end
        seen[0] = max(seen[0], len(ids))
        for size in range(min(LONGEST, len(ids)), SHORTEST - 1, -1):
            at = found.get(tuple(ids[len(ids) - size :]))
            if at is not None:
                return list(ids[at : at + len(asked.numbers)])
        return []

    def free(self, number: int) -> None:
        self._ends.pop(number, None)

    def close(self) -> None:
        self._ends.clear()
