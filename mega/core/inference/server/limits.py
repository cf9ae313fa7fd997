"""Define all limits on requests and connections. This module does not depend on routes, and does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mega.core.config.option import COUNT, FROM_0, NOT_NEGATIVE, Range, VerbSection, option

MOST_PROMPTS = 128
"""Maximum number of sequences in one request: the number of prompts in PUT /api (Megatron-LM's limit), or prompts x n
in OpenAI's routes."""

MOST_INPUTS = 2048
"""Maximum number of inputs in one request to /v1/embeddings, as in OpenAI's API."""

MOST_STOPS, STOP_CHARACTERS = 16, 256
"""Maximum number of stop strings in a request, and maximum number of characters in a stop string."""

MOST_BIASES = 1024
"""Maximum number of tokens in a request's logit_bias."""

MOST_MESSAGES = 1024
"""Maximum number of messages in a conversation."""

GRAMMAR_BYTES = 1 << 16
"""Maximum size in bytes of a JSON schema or a regular expression, written as JSON."""

HEADER_BYTES = 1 << 16
"""Maximum total size of the request line and the headers in bytes."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits(VerbSection):
    """Limits on requests, connections and durations."""

    title: ClassVar[str] = "Limits"

    max_waiting: int = option(
        256, "maximum number of waiting sequences; further requests get status 429", within=FROM_0
    )
    max_body: int = option(
        8 << 20, "maximum size of a request, in bytes", within=Range("at least 1024", lambda value: value >= 1024)
    )
    max_connections: int = option(1024, "maximum number of concurrent clients", within=COUNT)
    request_timeout: float = option(
        600.0, "seconds until an answer must be complete", within=Range("at least 0.1", lambda value: value >= 0.1)
    )
    drain_seconds: float = option(
        30.0, "seconds after SIGTERM in which answers in flight may finish", within=NOT_NEGATIVE
    )
    bodies: int = 256 << 20
    """Maximum total size, in bytes, of all bodies that are being read."""
    header_seconds: float = 10.0
    """Maximum time, in seconds, in which a client must send the headers of a request."""
    body_seconds: float = 30.0
    """Maximum time, in seconds, in which a client must send the body of a request."""
    write_seconds: float = 30.0
    """Seconds after which a client that does not read its answer is disconnected."""
    idle_seconds: float = 60.0
    """Seconds after which a connection without a request is closed."""
