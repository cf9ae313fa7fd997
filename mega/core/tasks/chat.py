"""Conversations as texts: a harness passes prompts on as text, in which a template's control tokens stand by name.

So a question that spells such a name ends a turn, as it does in the harness's own backends. It knows no harness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.templates import TEMPLATES
from mega.core.text.tokenizer import Tokenizer


class ChatTexts:
    """Conversations by one template. ends: tokens with which the assistant's turn ends."""

    def __init__(self, template: str, tokenizer: Tokenizer):
        """template: a name of text/chat/templates.py, or the text of a Jinja template. Errors: ValueError."""
        what = f"--chat-template {template}" if template in TEMPLATES else "the chat template"
        self._chat, self._tokenizer = ChatFormat(template, tokenizer, what), tokenizer
        self.template, self.ends = template, self._chat.ends
        self._asked = False

    def text(self, history: Sequence[Mapping[str, str]], reply: bool) -> str:
        """The prompt for the next turn; without `reply`, for more of the assistant's, which `history` ends with."""
        messages = [{"role": each["role"], "content": each["content"]} for each in history]
        begun = "" if reply else messages.pop()["content"]
        self._asked = True
        return self._chat.text(messages) + begun

    def encode(self, text: str, lead: Sequence[int]) -> list[int]:
        """Ids of a prompt or of any other text, without what the family puts in front of every text, `lead`."""
        return self._tokenizer.parse(text).ids if self._asked else self._tokenizer.encode(text)[len(lead) :]
