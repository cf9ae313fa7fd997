"""Parse and answer requests to /v1/embeddings in OpenAI's format. To compute an embedding, the last hidden states of a
text are pooled and normalized.

Source: OpenAI's API reference; vLLM's documentation for `normalize`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.config import JsonDict, JsonValue

from mega.core.inference.request import Request
from mega.core.inference.server.driver import EngineLost, QueueFull, Ticket
from mega.core.inference.server.fields import BadField, Body, read
from mega.core.inference.server.limits import MOST_INPUTS
from mega.core.inference.server.service import Service
from mega.core.inference.server.session import AnswerFailed
from mega.core.untrusted import Json

_IDS: JsonDict = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT: JsonDict = {"type": "string"}
_INPUT: list[JsonValue] = [
    _TEXT,
    {"type": "array", "minItems": 1, "maxItems": MOST_INPUTS, "items": _TEXT},
    _IDS,
    {"type": "array", "minItems": 1, "maxItems": MOST_INPUTS, "items": _IDS},
]
_MANY = 1 << 14
"""Answers with more numbers than this are serialized on the text thread instead of the event loop's thread."""
_RETRY_SECONDS = 0.01
"""Seconds between attempts to queue the remaining texts of a request."""


class EmbeddingFields(Body):
    """The body of /v1/embeddings."""

    input: str | list[object] = Field(
        description="a text, texts, token ids as of /tokenize, or lists of token ids",
        json_schema_extra={"anyOf": _INPUT},
    )
    model: str | None = Field(None, description="the served model, by name")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of little-endian float32")
    dimensions: int | None = Field(None, ge=1, description="only the number that the model's vectors have")
    normalize: bool = Field(True, description="vectors have length 1; false: the pooled states as they are")
    user: str | None = Field(None, description="who asks; without effect on the answer")


async def answer(service: Service, body: object) -> bytes:
    """Return the complete answer, as JSON. Errors: BadField, QueueFull, EngineLost, AnswerFailed."""
    fields = read(body, EmbeddingFields)
    service.adapter(fields.model)
    width = service.options.vector_width
    if fields.dimensions not in (None, width):
        raise BadField(
            "dimensions", f"dimensions {fields.dimensions}: the model's vectors have {width}; valid: {width}"
        )
    rows = await _rows(service, fields.input)
    vectors = await _vectors(service, rows)
    tokens = sum(map(len, rows))
    name = fields.model or service.options.name
    if len(vectors) * width > _MANY:
        return await service.off_loop(_rendered, vectors, tokens, name, fields)
    return _rendered(vectors, tokens, name, fields)


def _rendered(vectors: Sequence[NDArray[np.float32]], tokens: int, name: str, fields: EmbeddingFields) -> bytes:
    """Return the answer as JSON. Each vector is serialized separately, because a single json.dumps call for all vectors
    would hold the interpreter lock, and thus block the event loop, for its whole duration."""
    parts = [b'{"object":"list","data":[']
    for index, vector in enumerate(vectors):
        unit = vector / max(float(np.linalg.norm(vector)), 1e-12) if fields.normalize else vector
        numbers = _encoded(unit, fields.encoding_format)
        part = _json({"object": "embedding", "index": index, "embedding": numbers})
        parts.append(part if index == 0 else b"," + part)
    usage = _json({"prompt_tokens": tokens, "total_tokens": tokens})
    return b"".join([*parts, b'],"model":', _json(name), b',"usage":', usage, b"}"])


def _json(value: Json) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _encoded(vector: NDArray[np.float32], form: str) -> Json:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


async def _rows(service: Service, given: str | list[object]) -> list[tuple[int, ...]]:
    """Return one row of ids per input. A text is placed between [CLS] and [SEP]; ids are used unchanged. Errors:
    BadField."""
    if isinstance(given, list) and not given:
        raise BadField("input", "input: must not be empty")
    texts = given if isinstance(given, list) and not isinstance(given[0], int | float) else [given]
    if len(texts) > MOST_INPUTS:
        raise BadField("input", f"input: {len(texts)} texts, at most {MOST_INPUTS} are accepted in a request")
    if len({type(each) for each in texts}) != 1 or not isinstance(texts[0], str | list):
        raise BadField("input", "input: must be a string, strings, token ids, or lists of token ids")
    service.check_queue(min(len(texts), service.driver.engine.limits.requests))
    rows: list[tuple[int, ...]] = []
    for index, text in enumerate(texts):
        if isinstance(text, str):
            row = service.framed(await service.ids_of("input", text))
        else:
            row = service.checked("input", text if isinstance(text, list) else ())
        if not 0 < len(row) <= service.longest:
            raise BadField("input", f"input[{index}]: {len(row)} tokens; must be 1 to {service.longest}")
        rows.append(row)
    return rows


async def _vectors(service: Service, rows: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
    """Return the vector of each row. Rows are queued in batches, because a request may have more rows than fit into the
    queue."""
    part, vectors = service.driver.engine.limits.requests, list[NDArray[np.float32]]()
    for first in range(0, len(rows), part):
        requests = [Request(prompt=row, tokens=0) for row in rows[first : first + part]]
        tickets = await _queued(service, requests, wait=first > 0)
        try:
            vectors += [await _vector(ticket) for ticket in tickets]
        finally:
            _cancel(tickets)
    return vectors


async def _queued(service: Service, requests: Sequence[Request], *, wait: bool) -> list[Ticket]:
    """Queue engine requests. wait: whether to wait until the queue has space instead of raising QueueFull. Errors:
    QueueFull; EngineLost."""
    while True:
        try:
            return await service.add(requests)
        except QueueFull:
            if not wait:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


async def _vector(ticket: Ticket) -> NDArray[np.float32]:
    """Wait for a vector. Errors: EngineLost; AnswerFailed if the vector is not finite."""
    event = await ticket.events.get()
    if isinstance(event, EngineLost):
        raise event
    if event.vector is None:
        raise AnswerFailed(event.message or "the request was cancelled", by_request=False)
    return event.vector


def _cancel(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()
