"""Implement speculative decoding: guess the next tokens of a sequence, and check all of them with the model in one
step.

A step of a few tokens takes about as long as a step of one token. After a cheap method has guessed the next tokens, the
model computes all guessed tokens in one step and chooses a token at each position. Choices are kept up to and including
the first one that differs from its guess. The answer is the same as without guesses, even with sampling, because a
random draw depends only on the request's seed and the token's index.

    NGrams        guesses the tokens that followed an earlier occurrence of the text's last tokens
    ModelDrafts   guesses with a smaller model that has the same vocabulary (drafts.py)
    AheadDrafts   guesses with the model's own multi-token prediction layers (ahead_drafts.py)
    Drafter       the interface of these classes

`Confidence` decides from previous results whether to guess a request's next tokens. If guesses are often wrong, the
request is computed without speculation, with steps launched ahead. This module does not depend on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

MOST = 15
"""Maximum number of guessed tokens per sequence. Together with the last known token, they fill a captured CUDA
graph."""

TOKENS = 64
"""Maximum number of tokens in a step with guesses. With more sequences, the device is fully utilized without
guesses."""

LONGEST, SHORTEST = 4, 2
"""Maximum and minimum length of the n-grams that `NGrams` searches for."""

SURE, UNSURE = 2, 2
"""Number of consecutive correct guesses after which guessing starts, and number of consecutive steps without a correct
guess after which guessing stops."""

REST, LONGEST_REST = 16, 1024
"""Minimum and maximum number of tokens for which an eager drafter pauses after wrong guesses. Each further pause is
four times as long as the previous one. After a pause, the drafter guesses only one token, to keep the cost of a wrong
guess low."""


class Guessed(NamedTuple):
    """A sequence whose next tokens are to be guessed."""

    number: int  # unique number of the sequence
    request: int  # index of the sequence's request, as in `from_request`
    ids: Sequence[int]  # all tokens of the sequence
    longest: int  # maximum number of tokens in the sequence
    numbers: Sequence[tuple[float, ...]]  # rows of `Step.numbers`, one for each token to guess
    blocks: Sequence[int] = ()  # blocks of the sequence in the model's cache, which contains all tokens but the last
    offset: int = 0  # offset added to a position to get its row in the rotary tables


class Drafter(Protocol):
    """The interface of classes that guess tokens.

    eager: whether the drafter guesses from the start and pauses after wrong guesses, because guesses are expensive. If
    False, guesses cost nothing, and are used once earlier guesses for the text have been correct.
    """

    eager: bool

    def propose(self, asked: Sequence[Guessed]) -> list[list[int]]:
        """Guess the next tokens of each sequence, at most one token per row of the sequence's `numbers`."""

    def free(self, number: int) -> None:
        """Remove a sequence that has ended."""

    def warm_up(self, counts: Sequence[int]) -> None:
        """Before the first request, run a step with runs of `counts` tokens, if the drafter computes such steps."""

    def close(self) -> None: ...


@dataclass
class Confidence:
    """Decides whether to guess the tokens of a request."""

    active: bool = False
    """Whether the request's tokens are currently guessed."""
    reach: int = 3
    """Maximum number of tokens to guess in one step."""
    right: int = 0
    """Number of consecutive correct guesses."""
    wrong: int = 0
    """Number of consecutive steps without a correct guess."""
    expected: list[int] = field(default_factory=list)
    """Guesses that are not checked in a step but compared with the next tokens."""
    pause: int = 0
    """Length of the next pause in tokens; 0 for a drafter that never pauses."""
    rest: int = 0
    """Number of tokens until guessing continues; 0 outside a pause."""

    @classmethod
    def begin(cls, eager: bool) -> Confidence:
        """Return the initial state. eager: see `Drafter`."""
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
                self.wrong, self.reach = UNSURE - 1, 1  # after a pause, one step without a correct guess ends guessing
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
    """Guesses the tokens that followed an earlier occurrence of the sequence's last tokens. For each sequence, stores
    the last position of each n-gram."""

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
        for end in range(max(indexed[0], SHORTEST), len(ids)):  # omit the last n-gram, because no token follows it
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

    def warm_up(self, counts: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        self._ends.clear()
