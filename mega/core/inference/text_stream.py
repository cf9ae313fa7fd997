"""Convert tokens to text as they arrive. Incomplete characters are withheld until they are complete.

This module depends on a tokenizer, but not on the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from mega.core.text.tokenizer import Tokenizer

_CONTEXT = 8
"""Number of previous tokens to decode together with a new token. Decoders drop the space before the first token of a
text."""
_HALF = "\N{REPLACEMENT CHARACTER}"
_LONGEST_HALF = 3
"""Maximum number of bytes in an incomplete character. Some decoders return each byte as a replacement character."""


class Thought(str):
    """A model's reasoning before its answer. Reasoning is shown, but is not included in the next prompt."""


class TextStream:
    """Converts the tokens that follow `prompt` to text, incrementally. The concatenation of all returned strings is the
    text of all tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        text = tokenizer.decode(self._ids)
        self._before = len(text)  # number of characters of `_ids` returned so far
        self._cut = text if text.endswith(_HALF) else ""  # text of a prompt that may end within a character
        self._incomplete = 0  # number of characters that `finish` would return
        self._begun = 0  # number of these characters before the last one, which the next token may continue

    def push(self, token: int) -> str:
        """Add a token, and return the new text except an incomplete character at the end. A character that begins in
        the prompt is returned when it is complete."""
        begun = self.begin(token)
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if self._cut:
            self._before = min(self._before, _common(self._cut, text))
        whole = len(text.rstrip(_HALF)) if _HALF in text[-_LONGEST_HALF:] else len(text)
        whole = max(whole, len(text) - _LONGEST_HALF)
        new = text[self._before : whole]
        self._before = max(self._before, whole)
        self._incomplete = len(text) - self._before
        self._begun = max(begun - len(new), 0)
        if new or whole == len(text):
            self._cut = ""
        if whole == len(text):
            self._move()
        return new

    def without_space(self, tokens: Iterable[int]) -> frozenset[int]:
        """Return those of `tokens` that would lose the space with which they begin, if one of them were the next token.
        SentencePiece's decoders drop one space at the beginning of a text."""
        if self._before or self._incomplete:
            return frozenset()
        spaced = {token for token in tokens if self._tokenizer.token_bytes(token).startswith(b" ")}
        return frozenset(each for each in spaced if self._lost_spaces(each))

    def begin(self, token: int) -> int:
        """Return the number of characters between the text returned so far and the text of `token`, if it were the next
        token: 0 unless incomplete characters precede it that it does not continue."""
        if not self._incomplete:
            return 0
        data = self._tokenizer.token_bytes(token)
        unknown = data.startswith(_HALF.encode())  # of a tokenizer that does not give the bytes of its tokens
        continues = data and data[0] & 0xC0 == 0x80
        return self._begun if unknown or continues else self._incomplete

    def _lost_spaces(self, token: int) -> bool:
        data, text = self._tokenizer.token_bytes(token), self._tokenizer.decode([*self._ids, token])
        return _blanks(text) < _blanks(data.decode(errors="replace"))

    def finish(self) -> str:
        """Return the remaining text, even if it is an incomplete character."""
        return self._tokenizer.decode(self._ids)[self._before :]

    def _move(self) -> None:
        """Drop all tokens except the last `_CONTEXT`, so that decoding stays cheap. Call this only if there is no
        incomplete character."""
        if len(self._ids) > 2 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._before = len(self._tokenizer.decode(self._ids))


def _blanks(text: str) -> int:
    """Return the number of spaces with which a text begins."""
    return len(text) - len(text.lstrip(" "))


def _common(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
