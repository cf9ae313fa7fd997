"""Functions that a model may call, and what it thinks before it answers: from a request to a prompt, and from an
answer's text to calls. The form in which a model calls is read off its chat template.

    tags       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them       Qwen, Hermes
    list       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}     Mistral
    object     {"name": ..., "parameters": {...}}, the whole answer, several parted by ;          Llama 3

It knows no engine and no route. Source: OpenAI's API reference; the templates of these models.
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
"""As OpenAI has it."""

Form = Literal["tags", "list", "object"]

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LIST, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_PYTHON = "<|python_tag|>"
THINK, _THOUGHT = "<think>", "</think>"
MARKERS = (_LIST, _ARGS, _PYTHON)
"""Control tokens of calls."""


class Call(NamedTuple):
    """One call. arguments: a JSON object as text, as OpenAI has it."""

    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Json]:
        """index: its number within a streamed answer. The id is as long as Mistral's template has it."""
        place: dict[str, Json] = {} if index is None else {"index": index}
        said: dict[str, Json] = {"name": self.name, "arguments": self.arguments}
        return {**place, "id": uuid.uuid4().hex[:9], "type": "function", "function": said}


@dataclass(frozen=True)
class Tools:
    """The functions of a request, and which of them must be called. choice: a name, or none, auto or required."""

    described: tuple[dict[str, object], ...] = ()
    choice: str = "auto"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_function(each)["name"] for each in self.described)

    @property
    def forced(self) -> tuple[dict[str, object], ...]:
        """The functions of which one must be called; none where the model may answer in words."""
        if self.choice in ("none", "auto"):
            return ()
        return tuple(each for each in self.described if self.choice in ("required", _function(each)["name"]))

    @property
    def offered(self) -> list[dict[str, object]] | None:
        """What the template is given."""
        return None if self.choice == "none" or not self.described else [dict(each) for each in self.described]


def _function(tool: Mapping[str, object]) -> dict[str, str]:
    found = tool["function"]
    assert isinstance(found, dict)
    return found


def read_tools(tools: Sequence[object] | None, choice: object) -> Tools:
    """Errors: BadField naming `tools` or `tool_choice`."""
    listed = list(tools or ())
    if len(listed) > MOST_TOOLS:
        raise BadField("tools", f"tools: {len(listed)} functions, at most {MOST_TOOLS}")
    described: list[dict[str, object]] = []
    for index, each in enumerate(listed):
        where = f"tools[{index}]"
        known = isinstance(each, dict) and each.get("type") == "function" and not set(each) - {"type", "function"}
        function = each.get("function") if isinstance(each, dict) and known else None
        if not isinstance(function, dict) or set(function) - {"name", "description", "parameters", "strict"}:
            rule = 'must be {"type": "function", "function": {"name", "description", "parameters"}}'
            raise BadField("tools", f"{where}: {rule}")
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadField("tools", f"{where}: name must be 1 to 64 letters, digits, dots, - or _")
        if not isinstance(function.get("description"), str | None) or not isinstance(schema, dict | None):
            raise BadField("tools", f"{where}: description must be a string, and parameters a JSON schema")
        kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
        described.append({"type": "function", "function": {"parameters": {"type": "object"}, **kept}})
    names = [_function(each)["name"] for each in described]
    if len(set(names)) < len(names):
        raise BadField("tools", "tools: two functions have one name")
    return Tools(tuple(described), _choice(choice, names))


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
    """How a model calls functions, by its chat template; None where that does not say.

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
    """Whether a model's template has a place for what it thinks."""
    return _THOUGHT in template


def grammar(form: Form, tools: Sequence[Mapping[str, object]]) -> str:
    """One call of one of these functions, as a grammar of llguidance."""
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
    """How the text of an answer is read. form: None where no function may be called. markers: control tokens by id that
    a call consists of, and that decoding leaves out. reasons, thinking: as of `AnswerReader`."""

    form: Form | None = None
    tools: Tools = field(default_factory=Tools)
    markers: Mapping[int, str] = field(default_factory=dict)
    reasons: bool = False
    thinking: bool = False

    def reader(self) -> AnswerReader:
        return AnswerReader(self.form, self.tools.names, self.thinking, self.reasons)

    def marked(self, text: str, tokens: Sequence[Scored], begin: int) -> str:
        """A text with its markers by name. begin: where it begins in the answer, as offsets of tokens count."""
        for each in reversed(tokens):
            if (name := self.markers.get(each.id)) is not None:
                at = min(max(each.offset - begin, 0), len(text))
                text = text[:at] + name + text[at:]
        return text


def parsed_messages(given: Sequence[Message]) -> list[Message]:
    """Messages as templates read them: a call's arguments are an object. Errors: BadField."""
    found: list[Message] = []
    for message in given:
        calls = message.get("tool_calls")
        if calls is not None:
            message = {**message, "tool_calls": [_parsed_call(call) for call in calls]}
        found.append(message)
    return found


def _parsed_call(call: Mapping[str, object]) -> dict[str, object]:
    function = call.get("function")
    assert isinstance(function, dict)
    arguments = function.get("arguments")
    try:
        read = parse_json(arguments, "arguments") if isinstance(arguments, str) and arguments.strip() else {}
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise BadField("messages", f"messages: arguments of {function.get('name')} must be a JSON object as a string")
    return {**call, "function": {**function, "arguments": read}}


# --- what is answered ---------------------------------------------------------------------------------------------


class AnswerPiece(NamedTuple):
    """New text of an answer: said, thought, or whole calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass
class AnswerReader:
    """The text of an answer as it comes -> what is said, thought and called. What may still become a call or a tag is
    kept back. form: None where no function may be called. names: of those that may. thinking: whether the prompt ends
    within what the model thinks. reasons: whether it may think at all. called: calls so far; read: characters, as their
    reader counts them.

    >>> reader = AnswerReader("tags", ("add",))
    >>> reader.push("Let us see. <tool"), reader.push('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ... # doctest: +NORMALIZE_WHITESPACE
    (AnswerPiece(content='Let us see. ', reasoning='', calls=()),
     AnswerPiece(content='', reasoning='', calls=(Call(name='add', arguments='{"a": 1}'),)))
    """

    form: Form | None = None
    names: tuple[str, ...] = ()
    thinking: bool = False
    reasons: bool = False
    called: int = 0
    read: int = 0
    _held: str = field(default="", init=False)
    _begun: bool = field(default=False, init=False)
    _after: bool = field(default=False, init=False)

    def push(self, text: str, *, end: bool = False) -> AnswerPiece:
        """end: nothing follows."""
        self._held += text
        content, reasoning, calls = "", "", list[Call]()
        if self.reasons and not self._begun and not self.thinking:
            start = self._held.lstrip()
            if start.startswith(THINK):
                self.thinking, self._held = True, start[len(THINK) :]
            elif THINK.startswith(start) and not end:
                return AnswerPiece()
        if self.thinking:
            thought, closed, rest = self._held.partition(_THOUGHT)
            kept = 0 if closed or end else _overlap(thought, _THOUGHT)
            reasoning = thought[: len(thought) - kept]
            if not closed:
                self._held = thought[len(thought) - kept :]
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
            before, opened, rest = self._held.partition(_OPEN)
            inner, closed, after = rest.partition(_CLOSE)
            if not opened:
                kept = 0 if end else _overlap(before, _OPEN)
                kept += 0 if end else _blank(before[: len(before) - kept])
                content += before[: len(before) - kept]
                self._held = before[len(before) - kept :]
                break
            if not closed and not end:
                said = before.rstrip()
                content += said
                self._held = before[len(said) :] + opened + rest
                break
            found = _calls(inner, self.names)
            if not found:  # words, after all
                content += before + opened + inner + closed
            else:
                content += before.rstrip()
                calls += found
            self._held = after.lstrip() if found else after
            if not closed:
                break
        return content

    def _whole(self, calls: list[Call], end: bool) -> str:
        """Of forms in which a call ends with the answer."""
        before, marked, rest = self._held.partition(_LIST if self.form == "list" else _PYTHON)
        bare = not marked and before.lstrip()[:1] in ("[", "{")
        if not end and (marked or bare or not before.strip()):
            said = before.rstrip() if marked else ""
            self._held = self._held[len(said) :]
            return said
        if not end:
            kept = _overlap(before, _LIST if self.form == "list" else _PYTHON)
            kept += _blank(before[: len(before) - kept])
            self._held = before[len(before) - kept :]
            return before[: len(before) - kept]
        text, self._held = self._held, ""
        found = _calls(rest if marked else before, self.names) if marked or bare else []
        calls += found
        return (before.rstrip() if marked else "") if found else text.replace(_PYTHON, "").replace(_LIST, "")


def _calls(text: str, names: Sequence[str]) -> list[Call]:
    """The calls that a text consists of; none where it is anything else, or names another function."""
    text = text.strip()
    if _ARGS in text:
        parts = [part.partition(_ARGS) for part in text.split(_LIST) if part]
        found = [{"name": name.strip(), "arguments": arguments} for name, _, arguments in parts]
        text = json.dumps([{**each, "arguments": _read(each["arguments"])} for each in found])
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
    """Whether it has no half of a character, which no answer can hold but by its number."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _objects(text: str) -> Iterator[dict[str, Json]]:
    """JSON objects, or one list of them, with blanks or semicolons between; nothing where the text is not that."""
    decoder, at, found = json.JSONDecoder(parse_constant=_number), 0, list[Json]()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        found += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in " \n\r\t;":
            at += 1
    if all(isinstance(each, dict) for each in found):
        yield from (each for each in found if isinstance(each, dict))


def _read(text: str) -> Json:
    try:
        return parse_json(text, "arguments")
    except ValueError:
        return None


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that begin `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def _blank(text: str) -> int:
    """Blanks at the end, which a call that follows swallows."""
    return len(text) - len(text.rstrip())
