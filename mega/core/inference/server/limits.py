"""How much is accepted of clients, in one place. It knows no route, and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mega.core.config.option import COUNT, FROM_0, NOT_NEGATIVE, Range, VerbSection, option

MOST_PROMPTS = 128
"""Sequences of one request: Megatron-LM's limit on prompts; prompts x n of OpenAI's routes."""

MOST_INPUTS = 2048
"""Texts of one request of /v1/embeddings, as OpenAI's."""

MOST_STOPS, STOP_CHARACTERS = 16, 256
"""Stop strings of a request, and characters of one."""

MOST_BIASES = 1024
"""Tokens of a request's logit_bias."""

MOST_MESSAGES = 1024
"""Messages of a conversation."""

GRAMMAR_BYTES = 1 << 16
"""Of a JSON schema or a regular expression, as JSON."""

HEADER_BYTES = 1 << 16
"""Of a request's line and headers together."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits(VerbSection):
    """How much a server accepts, and for how long it waits."""

    title: ClassVar[str] = "Limits"

    max_waiting: int = option(256, "maximum number of waiting sequences; further requests get 429", within=FROM_0)
    max_body: int = option(
        8 << 20, "maximum size of a request, in bytes", within=Range("at least 1024", lambda value: value >= 1024)
    )
    max_connections: int = option(1024, "maximum number of concurrent clients", within=COUNT)
    request_timeout: float = option(
        600.0, "seconds until an answer must be complete", within=Range("at least 0.1", lambda value: value >= 0.1)
    )
    drain_seconds: float = option(
        30.0, "seconds that answers in flight get to finish after SIGTERM", within=NOT_NEGATIVE
    )
    bodies: int = 256 << 20
    """Bytes of all requests that are being read."""
    header_seconds: float = 10.0
    """To send the headers of a request."""
    body_seconds: float = 30.0
    """To send the body of a request."""
    write_seconds: float = 30.0
    """A client that reads nothing for this long is disconnected."""
    idle_seconds: float = 60.0
    """A connection without a request is closed after this."""
