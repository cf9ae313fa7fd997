"""How much is accepted of others, in one place. It knows no route."""

from __future__ import annotations

from dataclasses import dataclass

MOST_PROMPTS = 128
"""Sequences of one request: Megatron-LM's limit on prompts; prompts x n of OpenAI's routes."""

MOST_STOPS, STOP_CHARACTERS = 16, 256
"""Stop strings of a request, and characters of one."""

MOST_MESSAGES = 1024
"""Messages of a conversation."""

GRAMMAR_BYTES = 1 << 16
"""Of a JSON schema or a regular expression, as JSON."""

HEADER_BYTES = 1 << 16
"""Of a request's line and headers together."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """body: bytes of one request; bodies: of all that are being read. waiting: sequences that wait for the engine;
    more get 429. connections: at a time; the one that is idle for longest makes room for another. header_seconds,
    body_seconds: to send the headers, and the body, of a request. write_seconds: a client that reads nothing for so
    long is disconnected. request_seconds: from a whole request to its whole answer. drain_seconds: for requests in
    flight, after SIGTERM."""

    body: int = 8 << 20
    bodies: int = 256 << 20
    waiting: int = 256
    connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    idle_seconds: float = 60.0
