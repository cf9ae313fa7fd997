"""/v1/completions and /v1/chat/completions: OpenAI's forms of requests, answers and streams, and no more fields than
have an effect here. Log-probabilities and echo are as evaluation harnesses read them.

Source: OpenAI's API reference; what lm-eval's `local-completions` sends and reads.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field
from pydantic.config import JsonDict, JsonValue

from mega.core.inference.request import Request, RequestError, Top
from mega.core.inference.server.fields import BadField, SamplingFields, read
from mega.core.inference.server.limits import MOST_MESSAGES, MOST_PROMPTS, MOST_STOPS, STOP_CHARACTERS
from mega.core.inference.server.service import Service
from mega.core.inference.server.session import Continuation, Delta, Scored, all_whole
from mega.core.inference.text_stream import TextStream
from mega.core.text.chat.messages import Message
from mega.core.untrusted import Json

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

_TEXT_PART: JsonDict = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_MESSAGE: JsonDict = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]},
        "name": {"type": ["string", "null"], "description": "for a template that reads it"},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
_IDS: JsonDict = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT: list[JsonValue] = [
    {"type": "string"},
    {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS, "items": {"type": "string"}},
    {**_IDS, "minItems": 1},
    {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS, "items": _IDS},
]
_STOP: JsonDict = {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS}
_FORMAT: list[JsonDict] = [
    {"properties": {"type": {"enum": ["text", "json_object"]}}},
    {"properties": {"type": {"enum": ["regex"]}, "pattern": {"type": "string"}}, "required": ["type", "pattern"]},
    {"properties": {"type": {"enum": ["json_schema"]}, "json_schema": {"type": "object", "required": ["schema"]}}},
]
"""What the routes take within fields, for OpenAPI."""


class Common(SamplingFields):
    """What both routes take."""

    model: str | None = Field(None, description="the served model, or an adapter, by name")
    n: int = Field(1, ge=1, le=MOST_PROMPTS, description="answers to each prompt")
    stop: str | list[object] | None = Field(
        None,
        description=f"strings that end the answer, at most {MOST_STOPS}",
        json_schema_extra={"anyOf": [_STOP, {"type": "array", "maxItems": MOST_STOPS, "items": _STOP}]},
    )
    stream: bool = Field(False, description="answer by server-sent events")
    stream_options: dict[str, object] | None = Field(
        None,
        description='{"include_usage": true}: a last event with the numbers of tokens',
        json_schema_extra={"properties": {"include_usage": {"type": "boolean"}}, "additionalProperties": False},
    )
    ignore_eos: bool = Field(False, description="the end of the document does not end the answer")
    response_format: dict[str, object] | None = Field(
        None,
        description="text, json_object, json_schema, or regex with its pattern",
        json_schema_extra={"anyOf": [{"type": "object", "required": ["type"], **each} for each in _FORMAT]},
    )
    presence_penalty: float | None = Field(None, ge=0, le=0, description="only 0: see repetition_penalty")
    frequency_penalty: float | None = Field(None, ge=0, le=0, description="only 0: see repetition_penalty")
    logit_bias: dict[str, object] | None = Field(None, max_length=0, description="only empty")
    user: str | None = Field(None, description="who asks; without effect on the answer")
    metadata: dict[str, object] | None = Field(None, description="the client's records; without effect on the answer")


class Completion(Common):
    """The body of /v1/completions."""

    prompt: str | list[object] = Field(
        description="a text, texts, token ids, or lists of token ids", json_schema_extra={"anyOf": _PROMPT}
    )
    max_tokens: int = Field(16, ge=0, le=1 << 62, description="most new tokens; 0 with echo scores")
    logprobs: int | None = Field(None, ge=0, le=20, description="of each token, and of the n likeliest")
    echo: bool = Field(False, description="the prompt is part of the answer")
    parse_special_tokens: bool | None = Field(
        None, description="tokens that the prompt's text spells are tokens, not text [the server's]"
    )
    best_of: int | None = Field(None, ge=1, le=1, description="only 1: see n")
    suffix: str | None = Field(None, max_length=0, description="only empty")


class Chat(Common):
    """The body of /v1/chat/completions."""

    messages: list[object] = Field(
        description='[{"role": "system" | "user" | "assistant", "content": text}]',
        json_schema_extra={"minItems": 1, "maxItems": MOST_MESSAGES, "items": _MESSAGE},
    )
    max_tokens: int | None = Field(None, ge=1, le=1 << 62, description="most new tokens [what fits]")
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 62, description="the same")
    logprobs: bool = Field(False, description="of each token")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="and of the n likeliest; needs logprobs")
    tools: list[object] | None = Field(None, max_length=0, description="only empty")
    tool_choice: Literal["none"] | None = Field(None, description="only none")


class PromptText(NamedTuple):
    """A prompt as text where that is part of the answer. offsets: where in it each token of the prompt begins; None
    where the tokenizer does not tell; note: for the client."""

    text: str = ""
    offsets: list[int] | None = None
    note: str | None = None


@dataclass(frozen=True)
class ParsedRequest:
    """A request, read: the engine's requests, n for each prompt, and what is done with their text."""

    fields: Completion | Chat
    requests: tuple[Request, ...]
    prompts: tuple[PromptText, ...]
    stops: tuple[str, ...]
    ends: frozenset[int]
    usage: bool

    @property
    def chat(self) -> bool:
        return isinstance(self.fields, Chat)

    @property
    def notes(self) -> dict[str, list[str]]:
        """What the answer says of its prompts."""
        found = list(dict.fromkeys(prompt.note for prompt in self.prompts if prompt.note is not None))
        return {"notes": found} if found else {}

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(request.prompt) for request in self.requests[:: self.fields.n])


# --- what is asked ------------------------------------------------------------------------------------------------


async def read_completion(service: Service, body: object) -> ParsedRequest:
    """Errors: BadField."""
    fields = read(body, Completion)
    if fields.max_tokens == 0 and not fields.echo:
        raise BadField("max_tokens", "max_tokens 0: needs echo, since nothing else would be in the answer")
    if fields.echo and fields.response_format:
        raise BadField("echo", "echo True: excludes response_format, which is about the answer alone")
    adapter, special = service.adapter(fields.model), fields.parse_special_tokens
    special = service.options.parse_special_tokens if special is None else special
    prompts, texts = await _prompts(service, fields.prompt, fields.echo, special)
    for prompt in prompts:
        service.check_room("max_tokens", prompt, fields.max_tokens)
    scored = {"logprobs": fields.logprobs, "prompt_logprobs": fields.echo and fields.logprobs is not None}
    return await _asked(
        service, fields, prompts, texts, fields.max_tokens, scored, service.ends(fields.ignore_eos, adapter)
    )


async def read_chat(service: Service, body: object) -> ParsedRequest:
    """Errors: BadField."""
    fields = read(body, Chat)
    adapter = service.adapter(fields.model)
    manner = service.manner(adapter)
    if (chat := manner.chat) is None:
        raise BadField("messages", f"{manner.no_chat}; start the server with --chat-template")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadField("top_logprobs", "top_logprobs: needs logprobs True")
    if fields.max_tokens is not None and fields.max_completion_tokens is not None:
        raise BadField("max_tokens", "max_tokens: excludes max_completion_tokens, which means the same")
    try:
        given = messages(fields.messages, service.characters)
        prompt = await service.off_loop(chat.prompt, given)
    except BadField:
        raise
    except ValueError as error:
        raise BadField("messages", f"messages: {' '.join(str(error).split())[:300]}") from None
    asked = fields.max_completion_tokens or fields.max_tokens
    tokens = asked or max(1, service.longest - len(prompt))
    service.check_room("messages", prompt, tokens)
    scored = {"logprobs": (fields.top_logprobs or 0) if fields.logprobs else None}
    ends = frozenset() if fields.ignore_eos else service.ends(adapter=adapter) | chat.ends
    return await _asked(service, fields, [service.checked("messages", prompt)], [PromptText()], tokens, scored, ends)


async def _asked(
    service: Service,
    fields: Completion | Chat,
    prompts: Sequence[tuple[int, ...]],
    texts: Sequence[PromptText],
    tokens: int,
    scored: Mapping[str, Any],
    ends: frozenset[int],
) -> ParsedRequest:
    count = len(prompts) * fields.n
    if count > MOST_PROMPTS:
        raise BadField("n", f"{count} sequences, prompts x n: at most {MOST_PROMPTS} are accepted in a request")
    stops, usage = _stops(fields.stop), _include_usage(fields)
    adapter = service.adapter(fields.model)
    masks = await service.allowed(fields.response_format, ends, count)
    made: list[Request] = []
    try:
        for index, mask in enumerate(masks):
            made.append(
                Request(
                    prompt=prompts[index // fields.n],
                    tokens=tokens,
                    sampling=service.sampling(vars(fields), index),
                    stop_ids=ends,
                    adapter=adapter,
                    allowed=mask,
                    **scored,
                )
            )
    except RequestError as error:
        raise BadField(error.field, str(error)) from None
    return ParsedRequest(fields, tuple(made), tuple(texts), stops, ends, usage)


async def _prompts(
    service: Service, given: str | list[object], echo: bool, special: bool
) -> tuple[list[tuple[int, ...]], list[PromptText]]:
    """Prompts as ids, and as text where that is part of the answer. special: tokens stand in them by name.
    Errors: BadField."""
    if isinstance(given, list) and not given:
        raise BadField("prompt", "prompt: must not be empty")
    prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if len(prompts) > MOST_PROMPTS:
        raise BadField("prompt", f"{len(prompts)} prompts: at most {MOST_PROMPTS} are accepted in a request")
    if len({type(each) for each in prompts}) != 1 or not isinstance(prompts[0], (str, list)):
        raise BadField("prompt", "prompt: must be a string, strings, token ids, or lists of token ids")
    ids: list[tuple[int, ...]] = []
    texts: list[PromptText] = []
    service.check_queue(len(prompts))
    for prompt in prompts:
        if isinstance(prompt, str):
            ids.append(await service.encode("prompt", prompt, special))
            spans = service.tokenizer.located(prompt, special) if echo and prompt else None
            offsets = [begin for begin, _ in spans] if spans is not None and len(spans) == len(ids[-1]) else None
            texts.append(PromptText(prompt, offsets, _note(service, prompt, special)))
        elif isinstance(prompt, list):
            ids.append(service.checked("prompt", prompt) or (service.start("prompt"),))
            if len(ids[-1]) > service.longest:
                service.check_room("prompt", ids[-1], 0)
            texts.append(PromptText(service.tokenizer.decode(ids[-1]) if echo else ""))
    return ids, texts


def _note(service: Service, text: str, special: bool) -> str | None:
    """What became of special tokens that a prompt spells."""
    if (name := service.special.first_in(text)) is None:
        return None
    how = "tokens, by parse_special_tokens" if special else "text; parse_special_tokens true makes tokens of them"
    return f"the prompt spells special tokens such as {name}, which are {how}"


def messages(given: Sequence[object], characters: int) -> list[Message]:
    """The messages of a conversation, `characters` at most together. Errors: BadField.

    >>> messages([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], 100)
    [{'role': 'user', 'content': 'Hello'}]
    """
    if not given or len(given) > MOST_MESSAGES:
        raise BadField("messages", f"messages: must be 1 to {MOST_MESSAGES}, not {len(given)}")
    found: list[Message] = []
    for index, each in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(each, dict) or set(each) - {"name"} != {"role", "content"}:
            raise BadField("messages", f"{where}: must be an object with role and content, and nothing else")
        if not isinstance(each.get("name"), (str, type(None))):
            raise BadField("messages", f"{where}: name must be a string")
        role = {"developer": "system"}.get(str(each["role"]), each["role"])
        if role not in ("system", "user", "assistant"):
            raise BadField("messages", f"{where}: role must be system, developer, user or assistant")
        name = {} if each.get("name") is None else {"name": each["name"]}
        found.append({"role": role, "content": _content(each["content"], where), **name})
    if sum(len(text) for each in found for text in each.values()) > characters:
        raise BadField("messages", f"messages: must be at most {characters} characters together")
    return found


def _content(given: object, where: str) -> str:
    """A text, or parts of type text."""
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, list) else []
    whole = (part for part in parts if isinstance(part, dict) and set(part) == {"type", "text"})
    texts = [part["text"] for part in whole if part["type"] == "text"]
    if not texts or len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadField("messages", f"{where}: content must be a string, or parts of type text")
    return "".join(map(str, texts))


def _stops(given: str | Sequence[object] | None) -> tuple[str, ...]:
    listed = () if given is None else (given,) if isinstance(given, str) else given
    if len(listed) > MOST_STOPS:
        raise BadField("stop", f"stop: {len(listed)} strings, at most {MOST_STOPS}")
    stops: list[str] = []
    for stop in listed:
        if not isinstance(stop, str) or not 1 <= len(stop) <= STOP_CHARACTERS:
            raise BadField("stop", f"stop {repr(stop)[:40]}: must be a string of 1 to {STOP_CHARACTERS} characters")
        stops.append(stop)
    return tuple(stops)


def _include_usage(fields: Common) -> bool:
    options = fields.stream_options
    if options is None:
        return False
    if not fields.stream or set(options) - {"include_usage"} or type(options.get("include_usage", False)) is not bool:
        raise BadField("stream_options", 'stream_options: must be {"include_usage": true or false}, and needs stream')
    return bool(options.get("include_usage", False))


# --- what is answered ---------------------------------------------------------------------------------------------


async def start(service: Service, asked: ParsedRequest) -> list[Continuation]:
    """All sequences on their way. Errors: BadField, QueueFull, EngineLost."""
    return await service.continuations(asked.requests, stops=asked.stops, end_ids=asked.ends)


async def answer(service: Service, asked: ParsedRequest) -> dict[str, Json]:
    """The whole answer. Errors: as of `start`; AnswerFailed."""
    running = await start(service, asked)
    await all_whole(running)
    choices = [_choice(service, asked, index, each) for index, each in enumerate(running)]
    return {**_head(service, asked, _id(asked)), "choices": choices, "usage": _usage(asked, running), **asked.notes}


async def events(
    service: Service, asked: ParsedRequest, running: Sequence[Continuation]
) -> AsyncGenerator[dict[str, Json], None]:
    """The chunks of a streamed answer, those of several sequences as they come."""
    head = _head(service, asked, _id(asked), chunk=True)
    merged: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(maxsize=256)

    async def forward(index: int, each: Continuation) -> None:
        try:
            async with aclosing(each.deltas()) as deltas:
                async for delta in deltas:
                    await merged.put((index, delta))
        except Exception as error:
            await merged.put((index, error))

    tasks = [asyncio.create_task(forward(index, each)) for index, each in enumerate(running)]
    first = [True] * len(running)
    left = len(running)
    try:
        while left:
            index, delta = await merged.get()
            if isinstance(delta, Exception):
                raise delta
            notes = asked.notes if all(first) else {}
            yield {**head, "choices": [_chunk(service, asked, index, running[index], delta, first[index])], **notes}
            first[index] = False
            left -= delta.finish is not None
        if asked.usage:
            yield {**head, "choices": [], "usage": _usage(asked, running)}
    finally:
        for task in tasks:
            task.cancel()
        for each in running:
            each.ticket.cancel()


def _id(asked: ParsedRequest) -> str:
    return f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"


def _head(service: Service, asked: ParsedRequest, name: str, chunk: bool = False) -> dict[str, Json]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if asked.chat else "text_completion"
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": asked.fields.model or service.options.name,
    }


def _usage(asked: ParsedRequest, running: Sequence[Continuation]) -> dict[str, int]:
    new = sum(len(each.ids) for each in running)
    return {"prompt_tokens": asked.prompt_tokens, "completion_tokens": new, "total_tokens": asked.prompt_tokens + new}


def _choice(service: Service, asked: ParsedRequest, index: int, done: Continuation) -> dict[str, Json]:
    found: dict[str, Json] = {"index": index, "finish_reason": done.finish}
    fields = asked.fields
    if isinstance(fields, Chat):
        found["message"] = {"role": "assistant", "content": done.text}
        found["logprobs"] = _chat_logprobs(service, done.scored) if fields.logprobs else None
        return found
    prompt = asked.prompts[index // fields.n]
    echoed = prompt.text if fields.echo else ""
    found["text"] = echoed + done.text
    found["logprobs"] = None
    if fields.logprobs is not None:
        before = prompt_scored(service, done, prompt) if fields.echo else []
        found["logprobs"] = _logprobs(service, before, done.scored, len(echoed), fields.logprobs)
    return found


def _chunk(
    service: Service, asked: ParsedRequest, index: int, running: Continuation, delta: Delta, first: bool
) -> dict[str, Json]:
    found: dict[str, Json] = {"index": index, "finish_reason": delta.finish, "logprobs": None}
    fields = asked.fields
    if isinstance(fields, Chat):
        found["delta"] = ({"role": "assistant"} if first else {}) | {"content": delta.text}
        if fields.logprobs:
            found["logprobs"] = _chat_logprobs(service, delta.tokens)
        return found
    prompt = asked.prompts[index // fields.n]
    echoed = prompt.text if fields.echo else ""
    found["text"] = (echoed if first else "") + delta.text
    if fields.logprobs is not None:
        before = prompt_scored(service, running, prompt) if first and fields.echo else []
        found["logprobs"] = _logprobs(service, before, delta.tokens, len(echoed), fields.logprobs)
    return found


def prompt_scored(service: Service, done: Continuation, prompt: PromptText) -> list[Scored]:
    """The prompt's tokens; offsets are into its text."""
    tops = done.prompt_top or ((),) * len(done.prompt)
    offsets = prompt.offsets
    if offsets is None:
        stream, offsets, end = TextStream(service.tokenizer), [], 0
        for token in done.prompt:
            offsets.append(min(end, len(prompt.text)))
            end += len(stream.push(token))
    return [
        Scored(token, logprob, top, offset)
        for token, logprob, top, offset in zip(done.prompt, done.prompt_logprobs, tops, offsets, strict=True)
    ]


def _logprobs(
    service: Service, prompt: Sequence[Scored], new: Sequence[Scored], shift: int, count: int
) -> dict[str, Json]:
    """OpenAI's form for completions: parallel lists. The likeliest are none where `count` is 0."""
    whole = [*prompt, *(Scored(each.id, each.logprob, each.top, each.offset + shift) for each in new)]
    tops = [_by_text(service, each, count) if each.logprob is not None else None for each in whole]
    return {
        "tokens": [service.token_text(each.id) for each in whole],
        "token_logprobs": [_real(each.logprob) for each in whole],
        "top_logprobs": tops if count else None,
        "text_offset": [each.offset for each in whole],
    }


def _by_text(service: Service, scored: Scored, count: int) -> dict[str, float]:
    """text -> log-probability, likeliest first; of tokens with the same text the likeliest counts. With the token."""
    found: dict[str, float] = {}
    assert scored.logprob is not None
    for token, logprob in (*scored.top[:count], (scored.id, scored.logprob)):
        text = service.token_text(token)
        found[text] = max(found.get(text, LEAST_LOGPROB), logprob, LEAST_LOGPROB)
    return found


def _chat_logprobs(service: Service, tokens: Sequence[Scored]) -> dict[str, Json]:
    """OpenAI's form for chats: a list of objects."""

    def one(token: int, logprob: float | None) -> dict[str, Json]:
        data = service.tokenizer.token_bytes(token)
        return {"token": service.token_text(token), "logprob": _real(logprob), "bytes": list(data)}

    def top(likeliest: Top) -> list[dict[str, Json]]:
        return [one(token, logprob) for token, logprob in likeliest]

    return {
        "content": [{**one(each.id, each.logprob), "top_logprobs": top(each.top)} for each in tokens],
        "refusal": None,
    }


def _real(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
