"""Parse and answer requests to /v1/completions and /v1/chat/completions in OpenAI's format, including streams. Only
fields that have an effect are accepted. Log-probabilities and echoed prompts have the format that evaluation harnesses
expect.

Sources: OpenAI's API reference; requests and answers of lm-eval's `local-completions`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from pydantic import Field
from pydantic.config import JsonDict, JsonValue

from mega.core.inference.request import MOST_BIAS, MOST_PENALTY, Request, RequestError
from mega.core.inference.server.client_fields import ClientFields, constraint, resolved
from mega.core.inference.server.fields import BadField, SamplingFields, read
from mega.core.inference.server.limits import MOST_BIASES, MOST_MESSAGES, MOST_PROMPTS, MOST_STOPS, STOP_CHARACTERS
from mega.core.inference.server.service import Service
from mega.core.inference.server.session import Continuation, Delta, Scored, all_whole
from mega.core.inference.server.tools import (
    MARKERS,
    MOST_TOOLS,
    THINK,
    AnswerReader,
    CallRules,
    form_of,
    grammar,
    parsed_messages,
    read_tools,
    thinks,
)
from mega.core.inference.text_stream import TextStream
from mega.core.text.chat.messages import Message
from mega.core.untrusted import Json

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

_TEXT_PART: JsonDict = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CALL: JsonDict = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
_MESSAGE: JsonDict = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]},
        "name": {"type": ["string", "null"], "description": "passed to the chat template"},
        "tool_calls": {"type": "array", "items": _CALL, "description": "only of an assistant; content may be null"},
        "tool_call_id": {"type": "string", "description": "the call that a tool answers"},
        "reasoning_content": {"type": "string", "description": "reasoning of an assistant"},
    },
    "required": ["role"],
    "additionalProperties": False,
}
_IDS: JsonDict = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT: list[JsonValue] = [
    {"type": "string"},
    {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS, "items": {"type": "string"}},
    {**_IDS, "minItems": 1},
    {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS, "items": _IDS},
]
_BIAS: JsonDict = {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS}
_ID_NAME: JsonDict = {"pattern": "^(0|[1-9][0-9]*)$"}
_STOP: JsonDict = {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS}
_FORMAT: list[JsonDict] = [
    {"properties": {"type": {"enum": ["text", "json_object"]}}},
    {"properties": {"type": {"enum": ["regex"]}, "pattern": {"type": "string"}}, "required": ["type", "pattern"]},
    {"properties": {"type": {"enum": ["json_schema"]}, "json_schema": {"type": "object", "required": ["schema"]}}},
]
"""OpenAPI schemas for the values of structured fields."""


class Common(SamplingFields, ClientFields):
    """Request fields of both /v1/completions and /v1/chat/completions."""

    model: str | None = Field(None, description="name of the served model or of an adapter")
    n: int = Field(1, ge=1, le=MOST_PROMPTS, description="number of answers to each prompt")
    stop: str | list[object] | None = Field(
        None,
        description=f"strings that end the answer, at most {MOST_STOPS}",
        json_schema_extra={"anyOf": [_STOP, {"type": "array", "maxItems": MOST_STOPS, "items": _STOP}]},
    )
    stream: bool = Field(False, description="stream the answer as server-sent events")
    stream_options: dict[str, object] | None = Field(
        None,
        description='{"include_usage": true} adds a last event with the token counts',
        json_schema_extra={"properties": {"include_usage": {"type": "boolean"}}, "additionalProperties": False},
    )
    ignore_eos: bool = Field(False, description="do not end the answer at an end-of-document token")
    response_format: dict[str, object] | None = Field(
        None,
        description="format of the answer: text, json_object, json_schema, or regex with its pattern",
        json_schema_extra={"anyOf": [{"type": "object", "required": ["type"], **each} for each in _FORMAT]},
    )
    presence_penalty: float | None = Field(
        None,
        ge=-MOST_PENALTY,
        le=MOST_PENALTY,
        description="subtracted from the logits of tokens that occur in the answer",
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-MOST_PENALTY,
        le=MOST_PENALTY,
        description="subtracted from logits once per occurrence of the token in the answer",
    )
    logit_bias: dict[str, object] | None = Field(
        None,
        description=f"map from token ids to values added to their logits, at most {MOST_BIASES} tokens",
        json_schema_extra={"maxProperties": MOST_BIASES, "additionalProperties": _BIAS, "propertyNames": _ID_NAME},
    )
    stop_token_ids: list[object] | None = Field(
        None, description="additional tokens that end the answer", json_schema_extra={**_IDS, "maxItems": MOST_STOPS}
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="return log-probabilities of each prompt token and of the n most likely tokens"
    )
    skip_special_tokens: Literal[True] | None = Field(None, description="only true: control tokens have no text")
    include_stop_str_in_output: Literal[False] | None = Field(None, description="only false")
    cache_prompt: bool | None = Field(None, description="accepted without effect, because prompts are always cached")
    user: str | None = Field(None, description="name of the end user; accepted without effect on the answer")
    metadata: dict[str, object] | None = Field(
        None, description="records of the client; accepted without effect on the answer"
    )


class Completion(Common):
    """The body of /v1/completions."""

    prompt: str | list[object] = Field(
        description="a text, several texts, token ids, or lists of token ids", json_schema_extra={"anyOf": _PROMPT}
    )
    max_tokens: int = Field(
        16,
        ge=-1,
        le=1 << 62,
        description="maximum number of new tokens; -1 is as many as fit; 0 with echo scores the prompt",
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="return log-probabilities of each token and of the n most likely tokens"
    )
    echo: bool = Field(False, description="return the prompt as part of the answer")
    add_special_tokens: Literal[True] | None = Field(None, description="only true")
    parse_special_tokens: bool | None = Field(
        None, description="names of special tokens in the prompt become tokens; default: the server's flag"
    )
    best_of: int | None = Field(None, ge=1, le=1, description="only 1; use n for several answers")
    suffix: str | None = Field(None, max_length=0, description="only empty")


class Chat(Common):
    """The body of /v1/chat/completions."""

    messages: list[object] = Field(
        description='the conversation: [{"role": "user", "content": "text"}]',
        json_schema_extra={"minItems": 1, "maxItems": MOST_MESSAGES, "items": _MESSAGE},
    )
    max_tokens: int | None = Field(
        None,
        ge=-1,
        le=1 << 62,
        description="maximum number of new tokens; by default, and for -1, as many as fit",
        json_schema_extra={"not": {"const": 0}},
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 62, description="the same as max_tokens")
    logprobs: bool = Field(False, description="return log-probabilities of each token")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="also return the n most likely tokens; needs logprobs"
    )
    tools: list[object] | None = Field(
        None,
        description='functions that the model may call: [{"type": "function", "function": {"name", "parameters"}}]',
        json_schema_extra={"maxItems": MOST_TOOLS, "items": {"type": "object"}},
    )
    tool_choice: str | dict[str, object] | None = Field(
        None, description='none, auto, required, or the function to call: {"type": "function", "function": {"name"}}'
    )
    add_special_tokens: Literal[False] | None = Field(None, description="only false: the chat template adds them")
    add_generation_prompt: Literal[True] | None = Field(None, description="only true")
    continue_final_message: Literal[False] | None = Field(None, description="only false")
    include_reasoning: Literal[True] | None = Field(None, description="only true")
    reasoning_format: Literal["auto", "deepseek"] | None = Field(
        None, description="reasoning is always returned as reasoning_content"
    )
    parallel_tool_calls: bool | None = Field(None, description="false returns only the first call")


class PromptText(NamedTuple):
    """The text of a prompt, which the answer repeats, and a note about the prompt."""

    text: str = ""
    offsets: list[int] | None = None
    """Offset in `text` of each token of the prompt; None if the tokenizer does not report offsets."""
    note: str | None = None
    """A note for the client."""


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request."""

    fields: Completion | Chat
    requests: tuple[Request, ...]
    """Requests to the engine: `n` requests per prompt."""
    prompts: tuple[PromptText, ...]
    stops: tuple[str, ...]
    """Strings that end an answer."""
    ends: frozenset[int]
    """Tokens that end an answer without adding text."""
    usage: bool
    """Whether a stream ends with an event that contains the token counts."""
    calls: CallRules = field(default_factory=CallRules)

    @property
    def chat(self) -> bool:
        return isinstance(self.fields, Chat)

    @property
    def notes(self) -> dict[str, list[str]]:
        """The answer's field `notes`, which contains the notes about the prompts."""
        unique_notes = list(dict.fromkeys(prompt.note for prompt in self.prompts if prompt.note is not None))
        return {"notes": unique_notes} if unique_notes else {}

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in all prompts; each prompt is counted once."""
        return sum(len(request.prompt) for request in self.requests[:: self.fields.n])


# --- requests -----------------------------------------------------------------------------------------------------


async def read_completion(service: Service, body: object) -> ParsedRequest:
    """Parse and check the body of /v1/completions. Errors: BadField."""
    fields = resolved(read(body, Completion))
    if fields.max_tokens == 0 and not fields.echo:
        raise BadField("max_tokens", "max_tokens 0: needs echo, since nothing else would be in the answer")
    if fields.echo and fields.response_format:
        raise BadField("echo", "echo True: excludes response_format, which is about the answer alone")
    adapter, special = service.adapter(fields.model), fields.parse_special_tokens
    special = service.options.parse_special_tokens if special is None else special
    prompts, texts = await _prompts(service, fields.prompt, fields.echo, special)
    tokens = fields.max_tokens if fields.max_tokens >= 0 else max(1, service.longest - max(map(len, prompts)))
    for prompt in prompts:
        service.check_room("max_tokens", prompt, tokens)
    scored = {"logprobs": fields.logprobs, "prompt_logprobs": fields.echo and fields.logprobs is not None}
    ends = service.ends(fields.ignore_eos, adapter)
    return await _asked(service, fields, prompts, texts, tokens, scored, ends)


async def read_chat(service: Service, body: object) -> ParsedRequest:
    """Parse and check the body of /v1/chat/completions. Errors: BadField."""
    fields = resolved(read(body, Chat))
    adapter = service.adapter(fields.model)
    manner = service.manner(adapter)
    if (chat := manner.chat) is None:
        raise BadField("messages", f"{manner.no_chat}; start the server with --chat-template")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadField("top_logprobs", "top_logprobs: needs logprobs True")
    if fields.max_tokens is not None and fields.max_completion_tokens is not None:
        raise BadField("max_tokens", "max_tokens: excludes max_completion_tokens, which means the same")
    tools, form = read_tools(fields.tools, fields.tool_choice), form_of(chat.source)
    if tools.offered and form is None:
        raise BadField("tools", "tools: the model's chat template has no place for functions")
    if tools.forced and fields.response_format:
        raise BadField("tool_choice", "tool_choice: excludes response_format, which is about an answer in words")
    try:
        conversation = parsed_messages(messages(fields.messages, service.characters))
        prompt = await service.off_loop(chat.prompt, conversation, tools.offered)
    except BadField:
        raise
    except ValueError as error:
        raise BadField("messages", f"messages: {' '.join(str(error).split())[:300]}") from None
    token_limit = fields.max_completion_tokens or fields.max_tokens
    if token_limit == 0:
        raise BadField("max_tokens", "max_tokens 0: must be at least 1, or -1 for as many as fit")
    tokens = token_limit if token_limit is not None and token_limit > 0 else max(1, service.longest - len(prompt))
    service.check_room("messages", prompt, tokens)
    scored = {"logprobs": (fields.top_logprobs or 0) if fields.logprobs else None}
    ends = frozenset() if fields.ignore_eos else service.ends(adapter=adapter) | chat.ends
    # A constrained answer cannot contain reasoning, because the constraint applies from the first token.
    masked = bool(tools.forced) or (fields.response_format or {}).get("type", "text") != "text"
    rules = CallRules(
        form=form if tools.offered else None,
        tools=tools,
        markers=_markers(service) if tools.offered else {},
        reasons=thinks(chat.source) and not masked,
        thinking=not masked and service.tokenizer.decode(prompt[-4:]).rstrip().endswith(THINK),
    )
    checked = [service.checked("messages", prompt)]
    return await _asked(service, fields, checked, [PromptText()], tokens, scored, ends, rules)


async def _asked(
    service: Service,
    fields: Completion | Chat,
    prompts: Sequence[tuple[int, ...]],
    texts: Sequence[PromptText],
    tokens: int,
    scored: Mapping[str, Any],
    ends: frozenset[int],
    rules: CallRules | None = None,
) -> ParsedRequest:
    """Build the engine's requests. tokens: maximum number of new tokens. scored: values of the `Request` fields about
    log-probabilities. Errors: BadField."""
    rules = rules or CallRules()
    count = len(prompts) * fields.n
    if count > MOST_PROMPTS:
        raise BadField("n", f"{count} sequences, prompts x n: at most {MOST_PROMPTS} are accepted in a request")
    stops, usage = _stops(fields.stop), _include_usage(fields)
    adapter = service.adapter(fields.model)
    ends |= frozenset(service.checked("stop_token_ids", fields.stop_token_ids or ()))
    if rules.form is not None and (forced := rules.tools.forced):
        masks = await service.calling(grammar(rules.form, forced), ends, count)
    else:
        masks = await service.allowed(fields.response_format, ends, count, constraint(fields))
    if fields.prompt_logprobs is not None:
        if fields.stream:
            raise BadField("prompt_logprobs", "prompt_logprobs: excludes stream true")
        scored = {"logprobs": max(scored.get("logprobs") or 0, fields.prompt_logprobs), "prompt_logprobs": True}
    sampling_fields = {**vars(fields), "logit_bias": _biases(fields.logit_bias)}
    engine_requests: list[Request] = []
    try:
        for index, mask in enumerate(masks):
            engine_requests.append(
                Request(
                    prompt=prompts[index // fields.n],
                    tokens=tokens,
                    sampling=service.sampling(sampling_fields, index),
                    stop_ids=ends,
                    adapter=adapter,
                    allowed=mask,
                    **scored,
                )
            )
    except RequestError as error:
        raise BadField(error.field, str(error)) from None
    return ParsedRequest(fields, tuple(engine_requests), tuple(texts), stops, ends, usage, rules)


def _biases(given: Mapping[str, object] | None) -> tuple[tuple[int, float], ...]:
    """Convert a logit_bias to pairs (id, bias), sorted by id. Errors: BadField."""
    biases: list[tuple[int, float]] = []
    if len(given or {}) > MOST_BIASES:
        raise BadField("logit_bias", f"logit_bias: {len(given or {})} tokens, at most {MOST_BIASES}")
    for token, bias in (given or {}).items():
        if not token.isdecimal() or not isinstance(bias, int | float) or isinstance(bias, bool):
            raise BadField("logit_bias", f"logit_bias {token[:40]}: must be a token id, and its value a number")
        biases.append((int(token[:20]), float(bias)))
    return tuple(sorted(biases))


def _markers(service: Service) -> dict[int, str]:
    """Return a map from id to text of the control tokens that occur in tool calls and that decoding omits."""
    markers = {service.tokenizer.control(name): name for name in MARKERS}
    return {
        token: name for token, name in markers.items() if token is not None and not service.tokenizer.decode([token])
    }


async def _prompts(
    service: Service, given: str | list[object], echo: bool, special: bool
) -> tuple[list[tuple[int, ...]], list[PromptText]]:
    """Return the ids of the prompts and, if `echo` is set, the texts of the prompts. special: whether names of special
    tokens in a text are parsed as these tokens. Errors: BadField."""
    if isinstance(given, list) and not given:
        raise BadField("prompt", "prompt: must not be empty")
    prompts = given if isinstance(given, list) and not isinstance(given[0], int | float) else [given]
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
    """Return a note about names of special tokens in a prompt; None if the prompt contains no such names."""
    if (name := service.special.first_in(text)) is None:
        return None
    treatment = "tokens, by parse_special_tokens" if special else "text; parse_special_tokens true makes tokens of them"
    return f"the prompt spells special tokens such as {name}, which are {treatment}"


def messages(given: Sequence[object], characters: int) -> list[Message]:
    """Check the messages of a conversation. They may contain at most `characters` characters in total. Errors:
    BadField.

    >>> messages([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], 100)
    [{'role': 'user', 'content': 'Hello'}]
    """
    if not given or len(given) > MOST_MESSAGES:
        raise BadField("messages", f"messages: must be 1 to {MOST_MESSAGES}, not {len(given)}")
    conversation: list[Message] = []
    for index, each in enumerate(given):
        label = f"messages[{index}]"
        if isinstance(each, dict):  # clients send earlier answers with null fields
            each = {key: value for key, value in each.items() if value is not None}
        if not isinstance(each, dict) or "role" not in each or set(each) - set(_KEYS):
            raise BadField("messages", f"{label}: must be an object with role and content; valid: {', '.join(_KEYS)}")
        role = {"developer": "system"}.get(str(each["role"]), each["role"])
        if role not in ("system", "user", "assistant", "tool"):
            raise BadField("messages", f"{label}: role must be system, developer, user, assistant or tool")
        texts = {key: each[key] for key in _TEXTS if key in each}
        for key, text in texts.items():
            if not isinstance(text, str):
                raise BadField("messages", f"{label}: {key} must be a string")
        calls = _called(each["tool_calls"], label) if each.get("tool_calls") else []
        if calls and role != "assistant":
            raise BadField("messages", f"{label}: tool_calls are the assistant's, and not of role {role}")
        content = "" if calls and each.get("content") is None else _content(each.get("content"), label)
        conversation.append({"role": role, "content": content, **texts, **({"tool_calls": calls} if calls else {})})
    if sum(len(str(part)) for each in conversation for part in each.values()) > characters:
        raise BadField("messages", f"messages: must be at most {characters} characters together")
    return conversation


_TEXTS = ("name", "tool_call_id", "reasoning_content")
_KEYS = ("role", "content", "tool_calls", *_TEXTS)


def _called(given: object, where: str) -> list[dict[str, object]]:
    """Check the tool calls of an assistant's message. Errors: BadField."""
    calls: list[dict[str, object]] = []
    for call in given if isinstance(given, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        texts = [function.get(key) for key in ("name", "arguments")] if isinstance(function, dict) else [None]
        if not all(isinstance(text, str) for text in texts) or not isinstance(call, dict):
            raise BadField(
                "messages", f'{where}: tool_calls must be [{{"id", "type", "function": {{name, arguments}}}}]'
            )
        calls.append({"id": str(call.get("id", "")), "type": "function", "function": function})
    return calls


def _content(given: object, where: str) -> str:
    """Return the text of a message's content: the string itself, or the concatenated parts of a list of text parts."""
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, list) else []
    whole = (part for part in parts if isinstance(part, dict) and set(part) == {"type", "text"})
    texts = [part["text"] for part in whole if part["type"] == "text"]
    if not texts or len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadField("messages", f"{where}: content must be a string, or parts of type text")
    return "".join(map(str, texts))


def _stops(given: str | Sequence[object] | None) -> tuple[str, ...]:
    strings = () if given is None else (given,) if isinstance(given, str) else given
    if len(strings) > MOST_STOPS:
        raise BadField("stop", f"stop: {len(strings)} strings, at most {MOST_STOPS}")
    stops: list[str] = []
    for stop in strings:
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


# --- answers ------------------------------------------------------------------------------------------------------


async def start(service: Service, asked: ParsedRequest) -> list[Continuation]:
    """Add the sequences to the engine. Errors: BadField, QueueFull, EngineLost."""
    return await service.continuations(asked.requests, stops=asked.stops, end_ids=asked.ends)


async def answer(service: Service, asked: ParsedRequest) -> dict[str, Json]:
    """Return the complete answer. Errors: the errors of `start`; AnswerFailed."""
    running = await start(service, asked)
    await all_whole(running)
    choices = [{**_choice(service, asked, index, each), **cited(each)} for index, each in enumerate(running)]
    return {**_head(service, asked, _id(asked)), "choices": choices, "usage": _usage(asked, running), **asked.notes}


async def events(
    service: Service, asked: ParsedRequest, running: Sequence[Continuation]
) -> AsyncGenerator[dict[str, Json], None]:
    """Yield the chunks of a streamed answer; the chunks of several sequences are interleaved."""
    head = _head(service, asked, _id(asked), chunk=True)
    merged: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(maxsize=256)

    async def forward(index: int, each: Continuation) -> None:
        try:
            async with aclosing(each.deltas()) as deltas:
                async for delta in deltas:
                    await merged.put((index, delta))
        except Exception as error:
            await merged.put((index, error))

    readers = [asked.calls.reader() for _ in running]
    tasks = [asyncio.create_task(forward(index, each)) for index, each in enumerate(running)]
    first = [True] * len(running)
    unfinished = len(running)
    try:
        while unfinished:
            index, delta = await merged.get()
            if isinstance(delta, Exception):
                raise delta
            notes = asked.notes if all(first) else {}
            if asked.chat:
                choice = _chat_chunk(service, asked, index, delta, first[index], readers[index])
            else:
                choice = _chunk(service, asked, index, running[index], delta, first[index])
            choice |= {} if delta.finish is None else cited(running[index])
            yield {**head, "choices": [choice], **notes}
            first[index] = False
            unfinished -= delta.finish is not None
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


def cited(done: Continuation) -> dict[str, Json]:
    """Return the answer's field that lists the neighbours that the model has read."""
    return {"neighbours": [dict(each._asdict()) for each in done.cited]} if done.cited else {}


def _usage(asked: ParsedRequest, running: Sequence[Continuation]) -> dict[str, int]:
    new = sum(len(each.ids) for each in running)
    return {"prompt_tokens": asked.prompt_tokens, "completion_tokens": new, "total_tokens": asked.prompt_tokens + new}


def _choice(service: Service, asked: ParsedRequest, index: int, done: Continuation) -> dict[str, Json]:
    choice: dict[str, Json] = {"index": index, "finish_reason": done.finish}
    fields = asked.fields
    if fields.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(service, done, fields.prompt_logprobs)
    if isinstance(fields, Chat):
        piece = asked.calls.reader().push(asked.calls.marked(done.text, done.scored, 0), end=True)
        calls = piece.calls[:1] if fields.parallel_tool_calls is False else piece.calls
        message: dict[str, Json] = {"role": "assistant", "content": piece.content or (None if calls else "")}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning.strip("\n")
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
            choice["finish_reason"] = "tool_calls" if done.finish == "stop" else done.finish
        choice["message"] = message
        choice["logprobs"] = _chat_logprobs(service, done.scored, fields.top_logprobs or 0) if fields.logprobs else None
        return choice
    prompt = asked.prompts[index // fields.n]
    echoed = prompt.text if fields.echo else ""
    choice["text"] = echoed + done.text
    choice["logprobs"] = None
    if fields.logprobs is not None:
        before = prompt_scored(service, done, prompt) if fields.echo else []
        choice["logprobs"] = _logprobs(service, before, done.scored, len(echoed), fields.logprobs)
    return choice


def _chunk(
    service: Service, asked: ParsedRequest, index: int, running: Continuation, delta: Delta, first: bool
) -> dict[str, Json]:
    choice: dict[str, Json] = {"index": index, "finish_reason": delta.finish, "logprobs": None}
    fields = asked.fields
    assert isinstance(fields, Completion)
    prompt = asked.prompts[index // fields.n]
    echoed = prompt.text if fields.echo else ""
    choice["text"] = (echoed if first else "") + delta.text
    if fields.logprobs is not None:
        before = prompt_scored(service, running, prompt) if first and fields.echo else []
        choice["logprobs"] = _logprobs(service, before, delta.tokens, len(echoed), fields.logprobs)
    return choice


def _chat_chunk(
    service: Service, asked: ParsedRequest, index: int, delta: Delta, first: bool, reader: AnswerReader
) -> dict[str, Json]:
    """Return a chunk of a streamed chat. A tool call is sent as one chunk when the call is complete."""
    choice: dict[str, Json] = {"index": index, "finish_reason": delta.finish, "logprobs": None}
    fields = asked.fields
    assert isinstance(fields, Chat)
    calls_before = reader.called
    marked = asked.calls.marked(delta.text, delta.tokens, reader.read)
    reader.read += len(delta.text)
    piece = reader.push(marked, end=delta.finish is not None)
    calls = piece.calls[: max(0, 1 - calls_before)] if fields.parallel_tool_calls is False else piece.calls
    message_delta: dict[str, Json] = {"role": "assistant"} if first else {}
    message_delta |= {"content": piece.content} if piece.content or not (calls or piece.reasoning) else {}
    message_delta |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    if calls:
        message_delta["tool_calls"] = [call.as_json(calls_before + at) for at, call in enumerate(calls)]
    choice["delta"] = message_delta
    if delta.finish == "stop" and reader.called:
        choice["finish_reason"] = "tool_calls"
    if fields.logprobs:
        choice["logprobs"] = _chat_logprobs(service, delta.tokens, fields.top_logprobs or 0)
    return choice


def _prompt_logprobs(service: Service, done: Continuation, count: int) -> list[Json]:
    """Return log-probabilities of the prompt in vLLM's format: for each token, a map from id to log-probability that
    contains the token itself and the most likely tokens; None for the first token."""
    entries: list[Json] = []
    tops = done.prompt_top or ((),) * len(done.prompt)
    for token, logprob, top in zip(done.prompt, done.prompt_logprobs, tops, strict=True):
        if logprob is None:
            entries.append(None)
            continue
        ranked = {one: (each, rank) for rank, (one, each) in enumerate(top[:count], 1)}
        entries.append(
            {
                str(one): {"logprob": _real(each), "rank": rank, "decoded_token": service.token_text(one)}
                for one, (each, rank) in {token: (logprob, None), **ranked}.items()
            }
        )
    return entries


def prompt_scored(service: Service, done: Continuation, prompt: PromptText) -> list[Scored]:
    """Return the tokens of a prompt with their scores; offsets refer to the prompt's text."""
    tops = done.prompt_top or ((),) * len(done.prompt)
    stream, end, scored = TextStream(service.tokenizer), 0, list[Scored]()
    passed: list[str] = []  # names of tokens without text, which a prompt may contain
    for at, (token, logprob, top) in enumerate(zip(done.prompt, done.prompt_logprobs, tops, strict=True)):
        bare, listed = stream.without_space((token, *(each for each, _ in top))), service.token_bytes(token)
        offset = end + stream.begin(token)
        if prompt.offsets is not None:
            offset = prompt.offsets[at]
            in_text = prompt.text.startswith(service.token_text(token, bare), offset)
            bare = bare if in_text else frozenset()
        elif listed:
            gap = _removed(prompt.text, offset, service.token_text(token, bare), passed)
            offset, end = offset + gap, end + gap
        passed = [] if listed else [*passed, service.token_text(token)]
        end += len(stream.push(token))
        scored.append(Scored(token, logprob, top, min(offset, len(prompt.text)), bare))
    return scored


def _removed(text: str, offset: int, token: str, passed: Sequence[str]) -> int:
    """Return the number of characters between `offset` and the next occurrence of `token` if these are spaces, which
    some tokenizers remove, and names in `passed`; else 0.

    >>> [_removed("a  </s> b", 1, " b", ["</s>"]), _removed("a   b", 1, " c", [])]
    [6, 0]
    """
    if token.startswith("bytes:\\x"):  # part of a character, so only spaces before it can be recognised
        rest = text[offset:]
        return 0 if token.startswith("bytes:\\x20") else len(rest) - len(rest.lstrip(" "))
    at = text.find(token, offset)
    between = text[offset : max(at, offset)]
    for name in passed:
        between = between.replace(name, "", 1)
    return 0 if at < 0 or between.strip() else at - offset


def _logprobs(
    service: Service, prompt: Sequence[Scored], new: Sequence[Scored], shift: int, count: int
) -> dict[str, Json]:
    """Return log-probabilities as parallel lists, in OpenAI's format for completions. top_logprobs is null if `count`
    is 0."""
    whole = [*prompt, *(replace(each, offset=each.offset + shift) for each in new)]
    tops = [_by_text(service, each, count) if each.logprob is not None else None for each in whole]
    return {
        "tokens": [service.token_text(each.id, each.bare) for each in whole],
        "token_logprobs": [_real(each.logprob) for each in whole],
        "top_logprobs": tops if count else None,
        "text_offset": [each.offset for each in whole],
    }


def _by_text(service: Service, scored: Scored, count: int) -> dict[str, float]:
    """Return a map from text to log-probability for the `count` most likely tokens and the token itself. Tokens with
    the same text share one entry, which has their highest log-probability."""
    by_text: dict[str, float] = {}
    assert scored.logprob is not None
    for token, logprob in (*scored.top[:count], (scored.id, scored.logprob)):
        text = service.token_text(token, scored.bare)
        by_text[text] = max(by_text.get(text, LEAST_LOGPROB), logprob, LEAST_LOGPROB)
    return by_text


def _chat_logprobs(service: Service, tokens: Sequence[Scored], count: int) -> dict[str, Json]:
    """Return log-probabilities as a list of objects, in OpenAI's format for chats."""

    def one(token: int, logprob: float | None, bare: frozenset[int]) -> dict[str, Json]:
        data = service.token_bytes(token, bare)
        return {"token": service.token_text(token, bare), "logprob": _real(logprob), "bytes": list(data)}

    def top(scored: Scored) -> list[dict[str, Json]]:
        return [one(token, logprob, scored.bare) for token, logprob in scored.top[:count]]

    return {
        "content": [{**one(each.id, each.logprob, each.bare), "top_logprobs": top(each)} for each in tokens],
        "refusal": None,
    }


def _real(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
