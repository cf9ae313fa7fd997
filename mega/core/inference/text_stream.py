"""Convert tokens to text as they arrive; half a character is held back until it is complete.

This file knows tokenizers, but neither the engine nor the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from mega.core.text.tokenizer import Tokenizer

_CONTEXT = 8
"""Number of previous tokens that may affect the text of a new one: decoders drop the blank before a text's first piece.
"""
_HALF = "\N{REPLACEMENT CHARACTER}"
_LONGEST_HALF = 3
"""Most bytes of an incomplete character; some decoders show each of them as a replacement character."""


class Thought(str):
    """A model's reasoning before its answer: shown, but not part of the turn in the next prompt."""


class TextStream:
    """The text that follows `prompt`, in pieces; the concatenation of all pieces is the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._before = len(tokenizer.decode(self._ids))  # characters of `_ids` that have already been returned

    def push(self, token: int) -> str:
        """Add a token and return the text that is now complete; empty if it ends in an incomplete character."""
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
        """Return the rest of the text, including an incomplete character."""
        return self._tokenizer.decode(self._ids)[self._before :]

    def _move(self) -> None:
        """Forget all but the last tokens, whose text is complete, so that decoding stays cheap."""
        if len(self._ids) > 2 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._before = len(self._tokenizer.decode(self._ids))
