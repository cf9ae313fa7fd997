"""Implement function calling and reasoning: pass the tools of a request to the chat template, and parse calls and
reasoning in the answer. The model's chat template determines the format of calls.

    tags       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times       Qwen, Hermes
    list       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}     Mistral
    object     {"name": ..., "parameters": {...}} as the complete answer, several separated by ;  Llama 3

This module depends on neither the engine nor the routes. Sources: OpenAI's API reference; the models' chat templates.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mega.core.inference.server.fields import BadField
from mega.core.inference.server.session import Scored
from mega.core.text.chat.messages import Message
from mega.core.untrusted import Json, parse_json

MOST_TOOLS = 128
"""Maximum number of tools in a request, as in OpenAI's API."""

Form = Literal["tags", "list", "object"]

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LIST, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_PYTHON = "<|python_tag|>"
THINK, _THOUGHT = "<think>", "</think>"
MARKERS = (_LIST, _ARGS, _PYTHON)
"""Control tokens that occur in calls."""


class Call(NamedTuple):
    """A function call. arguments: the text of a JSON object, as in OpenAI's API."""

    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Json]:
        """Return the call in OpenAI's format. index: index of the call within a streamed answer. The id has 9
        characters, the length that Mistral's template requires."""
        position: dict[str, Json] = {} if index is None else {"index": index}
        function: dict[str, Json] = {"name": self.name, "arguments": self.arguments}
        return {**position, "id": uuid.uuid4().hex[:9], "type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The functions that a request defines. choice: "none", "auto", "required", or the name of the function that must
    be called."""

    described: tuple[dict[str, object], ...] = ()
    choice: str = "auto"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_function(each)["name"] for each in self.described)

    @property
    def forced(self) -> tuple[dict[str, object], ...]:
        """Functions, one of which must be called; empty if the model may answer with text."""
        if self.choice in ("none", "auto"):
            return ()
        return tuple(each for each in self.described if self.choice in ("required", _function(each)["name"]))

    @property
    def offered(self) -> list[dict[str, object]] | None:
        """The functions to pass to the template; None if no function may be called."""
        return None if self.choice == "none" or not self.described else [dict(each) for each in self.described]


def _function(tool: Mapping[str, object]) -> dict[str, str]:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


def read_tools(tools: Sequence[object] | None, choice: object) -> Tools:
    """Check the fields `tools` and `tool_choice` of a request. Errors: BadField naming the field."""
    tool_list = list(tools or ())
    if len(tool_list) > MOST_TOOLS:
        raise BadField("tools", f"tools: {len(tool_list)} functions, at most {MOST_TOOLS}")
    descriptions: list[dict[str, object]] = []
    for index, each in enumerate(tool_list):
        label = f"tools[{index}]"
        well_formed = isinstance(each, dict) and each.get("type") == "function" and not set(each) - {"type", "function"}
        function = each.get("function") if isinstance(each, dict) and well_formed else None
        if not isinstance(function, dict) or set(function) - {"name", "description", "parameters", "strict"}:
            rule = 'must be {"type": "function", "function": {"name", "description", "parameters"}}'
            raise BadField("tools", f"{label}: {rule}")
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadField("tools", f"{label}: name must be 1 to 64 letters, digits, dots, - or _")
        if not isinstance(function.get("description"), str | None) or not isinstance(schema, dict | None):
            raise BadField("tools", f"{label}: description must be a string, and parameters a JSON schema")
        function_fields = {key: value for key, value in function.items() if value is not None and key != "strict"}
        descriptions.append({"type": "function", "function": {"parameters": {"type": "object"}, **function_fields}})
    names = [_function(each)["name"] for each in descriptions]
    if len(set(names)) < len(names):
        raise BadField("tools", "tools: two functions have one name")
    return Tools(tuple(descriptions), _choice(choice, names))


def _choice(given: object, names: Sequence[str]) -> str:
    rule = 'none, auto, required or {"type": "function", "function": {"name": a name of tools}}'
    name = given
    if isinstance(given, dict) and given.get("type") == "function" and isinstance(given.get("function"), dict):
        name = given["function"].get("name")
        if name not in names:
            raise BadField("tool_choice", f"tool_choice: must be {rule}")
    elif given is not None and given not in ("none", "auto", "required"):
        raise BadField("tool_choice", f"tool_choice: must be {rule}")
    if name in ("auto", "required") and not names:
        raise BadField("tool_choice", f"tool_choice {name}: needs tools")
    return str(name) if name is not None else "auto"


def form_of(template: str) -> Form | None:
    """Return the format of calls in a chat template; None if the template does not support calls.

    >>> form_of("{{ '<tool_call>' }}"), form_of("[TOOL_CALLS]"), form_of("{{ message.content }}")
    ('tags', 'list', None)
    """
    if "tools" not in template and _OPEN not in template and _LIST not in template:
        return None
    if _OPEN in template:
        return "tags"
    if _LIST in template:
        return "list"
    return "object" if '"parameters"' in template or "ipython" in template else None


def thinks(template: str) -> bool:
    """Whether a chat template contains the tag for reasoning."""
    return _THOUGHT in template


def grammar(form: Form, tools: Sequence[Mapping[str, object]]) -> str:
    """Return a grammar for llguidance that accepts one call of any of the given functions."""
    key = "parameters" if form == "object" else "arguments"
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, key: each["parameters"]},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for each in (_function(tool) for tool in tools)
    ]
    schema = json.dumps({"anyOf": kinds, "x-guidance": {"whitespace_flexible": False}})
    frame = {"tags": (f'"{_OPEN}\\n"', f'"\\n{_CLOSE}"'), "list": ('"["', '"]"'), "object": ("", "")}[form]
    return f"start: {frame[0]} call {frame[1]}\ncall: %json {schema}\n"


@dataclass(frozen=True)
class CallRules:
    """Rules for parsing the text of an answer."""

    form: Form | None = None
    """Format of calls; None if no function may be called."""
    tools: Tools = field(default_factory=Tools)
    markers: Mapping[int, str] = field(default_factory=dict)
    """Control tokens that occur in calls and that decoding omits: id -> text."""
    reasons: bool = False
    """Whether the answer may begin with reasoning."""
    thinking: bool = False
    """Whether the prompt ends within reasoning that the answer continues."""

    def reader(self) -> AnswerReader:
        return AnswerReader(self.form, self.tools.names, self.thinking, self.reasons)

    def marked(self, text: str, tokens: Sequence[Scored], begin: int) -> str:
        """Insert the text of control tokens (see `markers`) into `text`. begin: offset of `text` in the answer, in the
        same units as the tokens' offsets."""
        for each in reversed(tokens):
            if (name := self.markers.get(each.id)) is not None:
                at = min(max(each.offset - begin, 0), len(text))
                text = text[:at] + name + text[at:]
        return text


def parsed_messages(given: Sequence[Message]) -> list[Message]:
    """Convert the arguments of calls in messages from JSON strings to objects, as templates expect. Errors:
    BadField."""
    parsed: list[Message] = []
    for message in given:
        calls = message.get("tool_calls")
        if calls is not None:
            message = {**message, "tool_calls": [_parsed_call(call) for call in calls]}
        parsed.append(message)
    return parsed


def _parsed_call(call: Mapping[str, object]) -> dict[str, object]:
    function = call.get("function")
    assert isinstance(function, dict)
    arguments = function.get("arguments")
    try:
        parsed_arguments = (
            parse_json(arguments, "arguments") if isinstance(arguments, str) and arguments.strip() else {}
        )
    except ValueError:
        parsed_arguments = None
    if not isinstance(parsed_arguments, dict):
        raise BadField("messages", f"messages: arguments of {function.get('name')} must be a JSON object as a string")
    return {**call, "function": {**function, "arguments": parsed_arguments}}


# --- the answer ---------------------------------------------------------------------------------------------------


class AnswerPiece(NamedTuple):
    """The new content, new reasoning and newly completed calls of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass
class AnswerReader:
    """Splits the text of an answer, while it is generated, into content, reasoning and calls. Text that may be part of
    an incomplete call or tag is withheld.

    >>> reader = AnswerReader("tags", ("add",))
    >>> reader.push("Let us see. <tool"), reader.push('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ... # doctest: +NORMALIZE_WHITESPACE
    (AnswerPiece(content='Let us see.', reasoning='', calls=()),
     AnswerPiece(content='', reasoning='', calls=(Call(name='add', arguments='{"a": 1}'),)))
    """

    form: Form | None = None
    """Format of calls; None if no function may be called."""
    names: tuple[str, ...] = ()
    """Functions that may be called."""
    thinking: bool = False
    """Whether the text received so far ends within reasoning."""
    reasons: bool = False
    """Whether the answer may begin with reasoning."""
    called: int = 0
    """Number of calls returned so far."""
    read: int = 0
    """Number of characters received so far, maintained by the caller."""
    _held: str = field(default="", init=False)
    _begun: bool = field(default=False, init=False)
    _after: bool = field(default=False, init=False)

    def push(self, text: str, *, end: bool = False) -> AnswerPiece:
        """Add text, and return the content, reasoning and calls that further text cannot change. end: whether the
        answer is complete."""
        self._held += text
        content, reasoning, calls = "", "", list[Call]()
        if self.reasons and not self._begun and not self.thinking:
            start = self._held.lstrip()
            if start.startswith(THINK):
                self.thinking, self._held = True, start[len(THINK) :]
            elif THINK.startswith(start) and not end:
                return AnswerPiece()
        if self.thinking:
            reasoning_text, closed, rest = self._held.partition(_THOUGHT)
            held_back = 0 if closed or end else _overlap(reasoning_text, _THOUGHT)
            reasoning = reasoning_text[: len(reasoning_text) - held_back]
            if not closed:
                self._held = reasoning_text[len(reasoning_text) - held_back :]
                return AnswerPiece(reasoning=reasoning)
            self.thinking, self._after, self._held = False, True, rest
        if self._after:
            self._held = self._held.lstrip("\n")
            self._after = not self._held
        self._begun = self._begun or bool(self._held.strip())
        if self.form is None:
            content, self._held = self._held, ""
        elif self.form == "tags":
            content = self._tagged(calls, end)
        else:
            content = self._whole(calls, end)
        self.called += len(calls)
        return AnswerPiece(content, reasoning, tuple(calls))

    def _tagged(self, calls: list[Call], end: bool) -> str:
        content = ""
        while True:
            before, open_tag, rest = self._held.partition(_OPEN)
            inner, close_tag, after = rest.partition(_CLOSE)
            if not open_tag:
                held_back = 0 if end else _overlap(before, _OPEN)
                held_back += 0 if end else _blank(before[: len(before) - held_back])
                content += before[: len(before) - held_back]
                self._held = before[len(before) - held_back :]
                break
            if not close_tag and not end:
                content_before = before.rstrip()
                content += content_before
                self._held = before[len(content_before) :] + open_tag + rest
                break
            tag_calls = _calls(inner, self.names)
            if not tag_calls:  # the tag is content, not a call
                content += before + open_tag + inner + close_tag
            else:
                content += before.rstrip()
                calls += tag_calls
            self._held = after.lstrip() if tag_calls else after
            if not close_tag:
                break
        return content

    def _whole(self, calls: list[Call], end: bool) -> str:
        """For the formats list and object, whose calls extend to the end of the answer, return the content before the
        first call."""
        before, marked, rest = self._held.partition(_LIST if self.form == "list" else _PYTHON)
        bare = not marked and before.lstrip()[:1] in ("[", "{")
        if not end and (marked or bare or not before.strip()):
            content_before = before.rstrip() if marked else ""
            self._held = self._held[len(content_before) :]
            return content_before
        if not end:
            held_back = _overlap(before, _LIST if self.form == "list" else _PYTHON)
            held_back += _blank(before[: len(before) - held_back])
            self._held = before[len(before) - held_back :]
            return before[: len(before) - held_back]
        text, self._held = self._held, ""
        answer_calls = _calls(rest if marked else before, self.names) if marked or bare else []
        calls += answer_calls
        return (before.rstrip() if marked else "") if answer_calls else text.replace(_PYTHON, "").replace(_LIST, "")


def _calls(text: str, names: Sequence[str]) -> list[Call]:
    """Parse calls. Return [] if the text contains anything else, or if a call names an unknown function."""
    text = text.strip()
    if _ARGS in text:
        parts = [part.partition(_ARGS) for part in text.split(_LIST) if part]
        segments = [{"name": name.strip(), "arguments": arguments} for name, _, arguments in parts]
        text = json.dumps([{**each, "arguments": _read(each["arguments"])} for each in segments])
    objects = list(_objects(text))
    calls: list[Call] = []
    for each in objects:
        arguments = each.get("arguments", each.get("parameters", {}))
        name = each.get("name")
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            return []
        text = json.dumps(arguments, ensure_ascii=False)
        calls.append(Call(name, text if _is_text(text) else json.dumps(arguments)))
    return calls


def _is_text(text: str) -> bool:
    """Whether the text contains no lone surrogate, which UTF-8 cannot encode."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _objects(text: str) -> Iterator[dict[str, Json]]:
    """Parse JSON objects or lists of objects, separated by white space or semicolons. Yield nothing if the text
    contains anything else."""
    decoder, at, values = json.JSONDecoder(parse_constant=_number), 0, list[Json]()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        values += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in " \n\r\t;":
            at += 1
    if all(isinstance(each, dict) for each in values):
        yield from (each for each in values if isinstance(each, dict))


def _read(text: str) -> Json:
    try:
        return parse_json(text, "arguments")
    except ValueError:
        return None


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def _blank(text: str) -> int:
    """Return the number of white-space characters at the end of `text`; they are dropped before a call."""
    return len(text) - len(text.rstrip())
