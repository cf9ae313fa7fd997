"""Convert tokens to text as they arrive. Incomplete characters are withheld until they are complete.

This module depends on a tokenizer, but not on the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._before = len(tokenizer.decode(self._ids))  # number of characters of `_ids` returned so far

    def push(self, token: int) -> str:
        """Add a token, and return the new text except an incomplete character at the end."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = len(text.rstrip(_HALF)) if _HALF in text[-_LONGEST_HALF:] else len(text)
        whole = max(whole, len(text) - _LONGEST_HALF)
        new = text[self._before : whole]
        self._before = max(self._before, whole)
        if whole == len(text):
            self._move()
        return new

    def finish(self) -> str:
        """Return the remaining text, even if it is an incomplete character."""
        return self._tokenizer.decode(self._ids)[self._before :]

    def _move(self) -> None:
        """Drop all tokens except the last `_CONTEXT`, so that decoding stays cheap. Call this only if there is no
        incomplete character."""
        if len(self._ids) > 2 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._before = len(self._tokenizer.decode(self._ids))
