"""Conversations as texts: a harness passes prompts on as text, in which a template's control tokens stand by name.

So a question that spells such a name ends a turn, as it does in the harness's own backends. It knows no harness.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mega.core.inference.server.chat_prompt import ChatPrompt
from mega.core.text.chat import EOD, Message
from mega.core.text.tokenizer import Tokenizer


class ChatTexts:
    """Conversations by one template. ends: tokens with which the assistant's turn ends."""

    def __init__(self, template: str, tokenizer: Tokenizer):
        """template: a name of text/chat.py, or the text of a Jinja template. Errors: ValueError."""
        self._prompt, self._tokenizer = ChatPrompt(template, tokenizer), tokenizer
        self.template, self.ends = template, self._prompt.ends
        self._controls: dict[str, int] = {}

    def text(self, history: Sequence[Mapping[str, str]], reply: bool) -> str:
        """The prompt for the next turn; without `reply`, for more of the assistant's, which `history` ends with."""
        messages = [Message(each["role"], each["content"]) for each in history]
        begun = "" if reply else messages.pop().content
        found = []
        for part in self._prompt.parts(messages, begun):
            name = part.text
            if part.control:
                eod = self._tokenizer.eod
                name = self._tokenizer.decode([eod]) if name == EOD and eod is not None else name
                token = eod if part.text == EOD else self._tokenizer.control(name)
                assert token is not None, "the template was tried"
                self._controls[name] = token
            found.append(name)
        return "".join(found)

    def encode(self, text: str, lead: Sequence[int]) -> list[int]:
        """Ids of a prompt or of any other text, without what the family puts in front of every text, `lead`."""
        if not self._controls:
            return self._tokenizer.encode(text)[len(lead) :]
        names = "|".join(re.escape(name) for name in sorted(self._controls, key=len, reverse=True))
        ids: list[int] = []
        for part in re.split(f"({names})", text):
            if part in self._controls:
                ids.append(self._controls[part])
            elif part:
                ids += self._tokenizer.encode(part)[len(lead) :]
        return ids
