"""A conversation as the prompt for its next turn, by the checkpoint's template; which tokens end the assistant's turn.

It knows no route. What a template may cost is bounded by text/chat.py.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence

from mega.core.text.chat import EOD, TEMPLATES, Message, TemplatePart, encode, jinja_text
from mega.core.text.tokenizer import Tokenizer

_SECONDS = 1
"""Of processor time to render a conversation."""
_MARK = "\ue000reply\ue001"
_READS_NAMES = re.compile(r"\b(name|items|values|keys|tojson|dictsort|pprint|string|xmlattr)\b")
"""What a Jinja template that reads a message's `name`, or all of its keys, has at least one of."""


class ChatPrompt:
    """Conversations for one tokenizer. ends: tokens with which the template has the assistant end its turn.
    reads_names: whether the template may go by a message's `name`, which it is not given."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        """template: a name of TEMPLATES, or the text of a Jinja template. Errors: ValueError."""
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self.reads_names = template not in TEMPLATES and _READS_NAMES.search(template) is not None
        self._render: Callable[[Sequence[Message], str], list[TemplatePart]]
        if template in TEMPLATES:
            whole = TEMPLATES[template]
            self._render = lambda messages, begun: _up_to_reply(whole([*messages, Message("assistant", _MARK)]), begun)
        else:
            whole = jinja_text(template, tokenizer, "the chat template", seconds=_SECONDS)
            reply = jinja_text(template, tokenizer, "the chat template", reply=True, seconds=_SECONDS)
            self._render = lambda messages, begun: [*reply(messages), *_text(begun)]
        ended = whole([Message("user", "a"), Message("assistant", "b")])
        names = [part.text for part in ended if part.control and part.trained]
        found = [tokenizer.eod if name == EOD else tokenizer.control(name) for name in names]
        self.ends = frozenset(token for token in found if token is not None)
        self.ids([Message("user", "a")])  # a tokenizer without the template's tokens is reported now

    def ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt. Errors: ValueError where the template refuses the conversation."""
        return tuple(encode(self.parts(messages), self._tokenizer).ids)

    def parts(self, messages: Sequence[Message], begun: str = "") -> list[TemplatePart]:
        """The prompt, as runs of text and names of control tokens. begun: of the reply. Errors: as of `ids`."""
        with self._lock:  # its process answers one question at a time
            return self._render(messages, begun)


def _up_to_reply(parts: Sequence[TemplatePart], begun: str) -> list[TemplatePart]:
    """The parts before the marked text, and what is begun of it; a blank right before it belongs to its first token."""
    at = next(i for i, part in enumerate(parts) if _MARK in part.text)
    before = parts[at].text.split(_MARK)[0]
    return [*parts[:at], *_text(before + begun if begun else before.rstrip(" "))]


def _text(text: str) -> list[TemplatePart]:
    return [TemplatePart(text, False, False)] if text else []
