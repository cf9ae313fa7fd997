"""Conversations as text for a harness that handles prompts as text, with a template's control tokens by name.

As in the harness's own backends, a question that spells a control token's name ends its turn. This module does not
depend on a harness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.templates import TEMPLATES
from mega.core.text.tokenizer import Tokenizer


class ChatTexts:
    """Formats conversations with one template. ends: tokens that end the assistant's turn."""

    def __init__(self, template: str, tokenizer: Tokenizer):
        """template: a name of text/chat/templates.py, or the text of a Jinja template. Errors: ValueError."""
        label = f"--chat-template {template}" if template in TEMPLATES else "the chat template"
        self._chat, self._tokenizer = ChatFormat(template, tokenizer, label), tokenizer
        self.template, self.ends = template, self._chat.ends
        self._asked = False

    def text(self, history: Sequence[Mapping[str, str]], reply: bool) -> str:
        """The prompt for the next turn; without `reply`, the prompt for continuing the assistant's turn at the end of
        `history`."""
        messages = [{"role": each["role"], "content": each["content"]} for each in history]
        prefix = "" if reply else messages.pop()["content"]
        self._asked = True
        return self._chat.text(messages) + prefix

    def encode(self, text: str, lead: Sequence[int]) -> list[int]:
        """Ids of a prompt or another text, without the ids `lead` that the tokenizer adds to each text."""
        return self._tokenizer.parse(text).ids if self._asked else self._tokenizer.encode(text)[len(lead) :]
