"""Format conversations as text, for a harness that requires text prompts. Control tokens of the template are written as
their names.

As in the backends of the harness, the name of a control token in a question is parsed as the control token, and can
therefore end the turn. This module does not depend on a harness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.templates import TEMPLATES
from mega.core.text.tokenizer import Tokenizer


class ChatTexts:
    """Formatter of conversations with one template. ends: ids of tokens that end the assistant's turn."""

    def __init__(self, template: str, tokenizer: Tokenizer):
        """template: a name in text/chat/templates.py, or the text of a Jinja template. Errors: ValueError if the
        template cannot be used with the tokenizer."""
        label = f"--chat-template {template}" if template in TEMPLATES else "the chat template"
        self._chat, self._tokenizer = ChatFormat(template, tokenizer, label), tokenizer
        self.template, self.ends = template, self._chat.ends
        self._asked = False

    def text(self, history: Sequence[Mapping[str, str]], reply: bool) -> str:
        """Return the prompt for the next turn, or, if not `reply`, the prompt that continues the assistant's turn at
        the end of `history`."""
        messages = [{"role": each["role"], "content": each["content"]} for each in history]
        prefix = "" if reply else messages.pop()["content"]
        self._asked = True
        return self._chat.text(messages) + prefix

    def encode(self, text: str, lead: Sequence[int]) -> list[int]:
        """Return the ids of a prompt or another text, without the ids `lead` that the tokenizer adds to each text."""
        return self._tokenizer.parse(text).ids if self._asked else self._tokenizer.encode(text)[len(lead) :]
