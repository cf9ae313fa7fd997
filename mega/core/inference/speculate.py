"""Speculative decoding: guess the next tokens of a sequence, and check all of them with the model in one step.

A step of a few tokens takes a device as long as a step of one token. So if a cheap method guesses the next tokens, the
model computes all of them at once, chooses a token at each position as it would otherwise, and keeps its choices up to
the first one that differs from the guess. The answer is the same as without guesses, greedy or drawn, because a draw
depends only on the request's seed and the token's number.

    NGrams        guesses from the text itself: the tokens that followed the last tokens earlier in the text
    ModelDrafts   guesses with a smaller model of the same vocabulary, which draws by the same numbers (drafts.py)
    Drafter       their interface; a head of the model that predicts several tokens could be a third implementation

`Confidence` decides by previous results whether to guess a request's next tokens: a text that cannot be guessed is
computed as without speculation, with steps launched ahead. This file knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

MOST = 15
"""Most guessed tokens of a sequence: with its last known token they fill a recorded step."""

TOKENS = 64
"""Most tokens of a step with guesses; with more sequences in flight, the device is busy without guesses."""

LONGEST, SHORTEST = 4, 2
"""Numbers of last tokens that NGrams searches for, from the most to the fewest."""

SURE, UNSURE = 2, 2
"""Right guesses in a row after which a request's tokens are guessed; steps in a row without a right guess after which
they no longer are."""

REST, LONGEST_REST = 16, 1024
"""Tokens for which an eager drafter rests after wrong guesses; each further rest is four times as long, up to the
second number. After a rest the drafter guesses one token, which costs least."""


class Guessed(NamedTuple):
    """A sequence whose next tokens are to be guessed."""

    number: int  # unique number of the sequence
    request: int  # index of its request, as in `from_request`
    ids: Sequence[int]  # all its tokens
    longest: int  # most tokens that it may have
    numbers: Sequence[tuple[float, ...]]  # `Step.numbers` of the next tokens, one row for each token to guess


class Drafter(Protocol):
    """Guesses tokens.

    eager: guess from the start, and again after a rest if guesses were wrong, because guesses take time. Otherwise
    guesses are free, and used once those for a text were right.
    """

    eager: bool

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        """Guess the next tokens of each sequence, at most as many as it has rows of numbers."""

    def free(self, number: int) -> None:
        """Forget a sequence that has ended."""

    def close(self) -> None: ...


@dataclass
class Confidence:
    """Decides whether to guess the tokens of a request."""

    active: bool = False
    """Its tokens are guessed."""
    reach: int = 3
    """Most tokens to guess at once."""
    right: int = 0
    """Number of right guesses in a row."""
    wrong: int = 0
    """Number of steps in a row without a right guess."""
    expected: list[int] = field(default_factory=list)
    """A guess that no step has checked, to compare with the next tokens."""
    pause: int = 0
    """Length of the next rest; 0: guesses are free, so it never rests."""
    rest: int = 0
    """Tokens until it is active again."""

    @classmethod
    def begin(cls, eager: bool) -> Confidence:
        """The start for a drafter that is `eager` or not."""
        return cls(active=eager, pause=REST if eager else 0)

    def checked(self, guessed: int, right: int) -> None:
        """Note the result of a step that has checked guesses.

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
        """Note a new token that was not guessed in a step.

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
    """Guesses the tokens that followed the last tokens earlier in the same sequence. Holds, for each sequence, where
    each n-gram ended last."""

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
        indexed, ends = self._ends.setdefault(asked.number, ([0], {}))
        for end in range(max(indexed[0], SHORTEST), len(ids)):  # excludes the last n-gram, which no token follows
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                ends[tuple(ids[end - size : end])] = end
        indexed[0] = max(indexed[0], len(ids))
        for size in range(min(LONGEST, len(ids)), SHORTEST - 1, -1):
            start = ends.get(tuple(ids[len(ids) - size :]))
            if start is not None:
                return list(ids[start : start + len(asked.numbers)])
        return []

    def free(self, number: int) -> None:
        self._ends.pop(number, None)

    def close(self) -> None:
        self._ends.clear()
