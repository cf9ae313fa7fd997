"""Speculative decoding: guess the next tokens of a sequence, and check all of them with the model in one step.

A step of a few tokens takes a device as long as a step of one token. So if a cheap method guesses the next tokens, the
model computes all of them at once, chooses a token at each position as it would without guesses, and keeps its choices
up to the first choice that differs from the guess. The answer is the same as without guesses, greedy or drawn, because
a draw depends only on the request's seed and the token's index.

    NGrams        guesses from the text itself: the tokens that followed the last tokens earlier in the text
    ModelDrafts   guesses with a smaller model of the same vocabulary and the same random numbers (drafts.py)
    Drafter       their interface; a head of the model that predicts several tokens could be a third implementation

`Confidence` decides from previous results whether to guess a request's next tokens. A text whose tokens cannot be
guessed is computed as without speculation, with steps launched ahead. This module does not depend on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

MOST = 15
"""Maximum number of guessed tokens of a sequence. With its last known token they fill a recorded step."""

TOKENS = 64
"""Maximum number of tokens in a step with guesses; with more sequences, the device is busy without guesses."""

LONGEST, SHORTEST = 4, 2
"""Maximum and minimum length of the n-grams that `NGrams` searches for."""

SURE, UNSURE = 2, 2
"""Number of right guesses in a row after which a request's tokens are guessed, and number of steps in a row without a
right guess after which guessing stops."""

REST, LONGEST_REST = 16, 1024
"""Number of tokens for which an eager drafter rests after wrong guesses; each further rest is four times as long, up to
the second number. After a rest, the drafter guesses only one token, which costs the least."""


class Guessed(NamedTuple):
    """A sequence whose next tokens are to be guessed."""

    number: int  # unique number of the sequence
    request: int  # index of the sequence's request, as in `from_request`
    ids: Sequence[int]  # all tokens of the sequence
    longest: int  # maximum number of tokens of the sequence
    numbers: Sequence[tuple[float, ...]]  # `Step.numbers` of the next tokens, one row for each token to guess


class Drafter(Protocol):
    """Guesses tokens.

    eager: guess from the start, and rest after wrong guesses, because guesses take time. If not eager, guesses are
    free, and used once the guesses for a text were right.
    """

    eager: bool

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        """Guess the next tokens of each sequence, at most one per row of its `numbers`."""

    def free(self, number: int) -> None:
        """Remove a sequence that has ended."""

    def close(self) -> None: ...


@dataclass
class Confidence:
    """Decides whether to guess the tokens of a request."""

    active: bool = False
    """Whether the request's tokens are guessed."""
    reach: int = 3
    """Maximum number of tokens to guess at once."""
    right: int = 0
    """Number of right guesses in a row."""
    wrong: int = 0
    """Number of steps in a row without a right guess."""
    expected: list[int] = field(default_factory=list)
    """Guessed tokens that no step has checked, to compare with the next tokens."""
    pause: int = 0
    """Length of the next rest in tokens; 0: guesses are free, so guessing never rests."""
    rest: int = 0
    """Number of tokens until guessing starts again; 0: no rest."""

    @classmethod
    def begin(cls, eager: bool) -> Confidence:
        """The initial state. eager: see `Drafter`."""
        return cls(active=eager, pause=REST if eager else 0)

    def checked(self, guessed: int, right: int) -> None:
        """Record the result of a step that has checked guesses.

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
                self.wrong, self.reach = UNSURE - 1, 1  # after a rest, one step without a right guess is enough
            else:
                self.wrong = 0
            self.rest, self.pause = self.pause, min(4 * self.pause, LONGEST_REST)

    def watched(self, token: int) -> None:
        """Record a new token from a step without guesses.

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
    """Guesses the tokens that followed the last tokens earlier in the same sequence. For each sequence, stores the last
    position of each n-gram."""

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
        for end in range(max(indexed[0], SHORTEST), len(ids)):  # excludes the n-gram at the end, which no token follows
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
