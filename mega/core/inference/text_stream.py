"""Tokens as text while they come: what is certain at each token, so that no half character is shown.

It knows tokenizers, and neither the engine nor who reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from mega.core.text.tokenizer import Tokenizer

_CONTEXT = 8
"""Tokens before a new one that its text may depend on: decoders drop the blank in front of a text's first piece."""
_HALF = "\N{REPLACEMENT CHARACTER}"
_LONGEST_HALF = 3
"""Bytes of a character that are not yet a character; some decoders show each as one sign."""


class Thought(str):
    """What a model thinks before it answers: shown, and no part of the turn that the next question carries."""


class TextStream:
    """The text that follows `prompt`, piece by piece; all pieces together are the text of the tokens as a whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._before = len(tokenizer.decode(self._ids))  # characters of `_ids` that have been given out

    def push(self, token: int) -> str:
        """What is certain with this token; empty while it may be half a character."""
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
        """The rest: what was waiting for its other half."""
        return self._tokenizer.decode(self._ids)[self._before :]

    def _move(self) -> None:
        """Decode from here on with the last few tokens only, all of which are whole."""
        if len(self._ids) > 2 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._before = len(self._tokenizer.decode(self._ids))
