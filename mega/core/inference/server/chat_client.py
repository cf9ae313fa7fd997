"""Stream the next turn of a conversation from POST /v1/chat/completions of mega or another server.

This process does not load a model.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mega.core.inference.request import Sampling
from mega.core.inference.server.client import connected, message_of
from mega.core.inference.text_stream import Thought
from mega.core.text.chat.messages import Message
from mega.core.untrusted import below

DEFAULTS = Sampling()


@dataclass(frozen=True)
class ServerAnswers:
    """Answers conversations by sending them to a server. url: HOST:PORT, or the complete address. name: name of the
    model to request; None for the server's default."""

    url: str
    name: str | None = None

    def answer(
        self, messages: Sequence[Message], how: Sampling, tokens: int | None, given: Collection[str] = ()
    ) -> Generator[str, None, None]:
        """Stream the text of the answer. A sampling field that has its default value and is not in `given` is omitted,
        so that the server's default applies. Errors: ValueError with the server's message; OSError if the server does
        not answer.
        """
        body: dict[str, object] = {"messages": list(messages), "stream": True}
        body |= {} if tokens is None else {"max_tokens": tokens}
        body |= {name: value for name, value in vars(how).items() if name in given or value != getattr(DEFAULTS, name)}
        body |= {} if self.name is None else {"model": self.name}
        connection, path, headers = connected(self.url, "/v1/chat/completions")
        try:
            connection.request("POST", path, json.dumps(body).encode(), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(f"--url {self.url}: {reply.status}: {message_of(_json(reply.read(1 << 20)))}")
            for line in reply:
                data = line.decode(errors="replace").strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if data:
                    yield from self._texts(_json(data.encode()))
        except (http.client.HTTPException, OSError) as error:
            raise OSError(f"--url {self.url}: no answer: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _texts(self, event: object) -> Iterator[str]:
        """Yield the reasoning text and the answer text of one event."""
        if not isinstance(event, dict) or "error" in event:
            raise ValueError(f"--url {self.url}: {message_of(event)}")
        choices = event.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else {}
        delta: Mapping[str, object] = below(first, "delta") if isinstance(first, dict) else {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Thought(reasoning)
        if text := delta.get("content"):
            yield str(text)


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return {"error": data.decode(errors="replace")}
