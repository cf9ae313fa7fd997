"""Render chat templates of models in a sandbox, like transformers' `apply_chat_template`. This module runs in a child
process of `untrusted.Confined`, with limits on time and memory. Built-in templates are rendered in the calling process.

A request is {"ask", "source", "variables", "names", "marks", ...}. names: names of control tokens. marks: two
characters that enclose such a name in a message, where the name is ordinary text. The response depends on the value of
"ask":

    read      {"frame": Frame}: the end tokens and framing tokens of the template
    text      {"text", "literal"} of `messages` and `tools`; with the generation prompt if `reply` is set
    turns     {"text", "literal", "turns"}: also the span of each assistant's turn from message `first` on

Source: transformers 5, utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mega.core.text.chat.turns import Rendered, check_renders, find_turns, frame_of
from mega.core.text.special import Span
from mega.core.untrusted import serve

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.parser import Parser

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which conversation files store the assistant's reasoning."""


@lru_cache(maxsize=2)
def _environment() -> Environment:
    from jinja2 import nodes, pass_eval_context
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The Jinja block {% generation %} ... {% endgeneration %}, which encloses the assistant's text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_generated"), [], [], body).set_lineno(line)

        @pass_eval_context
        def _generated(self, context: object, caller: Callable[[], str]) -> str:
            text = caller()
            if _tracked:
                blocks, spans = _tracked[-1]
                begin = sum(map(len, blocks))
                spans.append((begin, begin + len(text)))
            return text

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now, **_plain_types()}
    return environment


def _plain_types() -> dict[str, object]:
    """Return the functions `dict` and `namespace` for use in templates. Neither gives access to names with a leading
    underscore."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class Plain(Namespace):
        """A namespace that rejects names with a leading underscore."""

        def __init__(*given: object, **named: object) -> None:
            namespace, *rest = given
            values = dict(*rest, **named)
            for name in values:
                Plain._check(name)
            Namespace.__init__(namespace, values)

        def __setitem__(self, name: str, value: object) -> None:
            Plain._check(name)
            super().__setitem__(name, value)

        @staticmethod
        def _check(name: object) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")

    class Dictionary:
        def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
            return dict(*given, **named)

        def fromkeys(self, *given: Any) -> dict[Any, Any]:
            return dict.fromkeys(*given)

    return {"dict": Dictionary(), "namespace": Plain}


_tracked: list[tuple[list[str], list[Span]]] = []
"""The text blocks that the current rendering has produced, and the spans of the assistant's text in these blocks."""


def _refuse(message: object) -> None:
    raise ValueError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    from jinja2 import TemplateError

    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise ValueError(f"not a Jinja template ({error})") from None


@contextmanager
def _tracking(blocks: list[str], spans: list[Span]) -> Iterator[None]:
    _tracked.append((blocks, spans))
    try:
        yield
    finally:
        _tracked.pop()


def _aliased(message: Mapping[str, object]) -> dict[str, object]:
    """Return a message as templates expect it: without null values, and with the reasoning under all common keys."""
    values = {key: value for key, value in message.items() if value is not None}
    reasoning = next((values[key] for key in REASONING if key in values), None)
    return values if reasoning is None else {"thinking": reasoning, **values, "reasoning_content": reasoning}


class _Renderer:
    """Renders conversations with one template and constant variables."""

    def __init__(self, question: Mapping[str, Any]) -> None:
        self._template = _compiled(question["source"])
        self._values = {"tools": question.get("tools"), "documents": None, **question["variables"]}
        first, last = question["marks"]
        names = "|".join(map(re.escape, sorted(question["names"], key=len, reverse=True))) or "(?!)"
        self._marks = re.compile(f"{first}({names}){last}|[{first}{last}]")
        self._escaped = "".join(f"\\u{ord(mark):04x}|" for mark in question["marks"]).rstrip("|")
        self.tagged = re.search(r"\{%-?\s*generation\s*-?%\}", question["source"]) is not None

    def __call__(self, messages: Sequence[Mapping[str, object]], reply: bool = False) -> Rendered:
        """Render messages. Errors: ValueError raised by the template, and jinja2's exceptions."""
        blocks: list[str] = []
        spans: list[Span] = []
        values = {**self._values, "messages": [_aliased(each) for each in messages], "add_generation_prompt": reply}
        with _tracking(blocks, spans):
            for block in self._template.generate(**values):
                blocks.append(block)
        raw = "".join(blocks)
        if re.search(self._escaped.replace("\\", "\\\\"), raw):
            raise ValueError("writes a control token of a message's text in an escaped form, so that it cannot be text")
        return self._unmarked(raw, spans)

    def _unmarked(self, raw: str, spans: Sequence[Span]) -> Rendered:
        """Remove the marks from a rendered text, and record the text between a pair of marks as literal. A single mark
        becomes an empty literal span, so that the text before and after the mark does not form a control token."""
        text, literal, position, offsets = "", list[Span](), 0, list[tuple[int, int]]()
        for match in self._marks.finditer(raw):
            text += raw[position : match.start()]
            offsets.append((match.start(), len(text)))
            begin = len(text)
            text += match[1] or ""
            literal.append((begin, len(text)))
            position = match.end()
            offsets.append((position, len(text)))
        text += raw[position:]

        def place(position: int) -> int:
            before, after = next(((a, b) for a, b in reversed(offsets) if a <= position), (0, 0))
            return after + position - before

        return Rendered(text, tuple(literal), tuple((place(a), place(b)) for a, b in spans))


def answer(question: Mapping[str, Any]) -> dict[str, object]:
    """Process a request. Errors: ValueError raised by the template."""
    render, ask = _Renderer(question), question["ask"]
    if ask == "read":
        check_renders(render)
        return {"frame": frame_of(_quietly(render), question["names"])._asdict()}
    rendered = render(question["messages"], question.get("reply", False))
    turns: list[Span] = []
    if ask == "turns":
        turns = list(rendered.tagged if render.tagged else find_turns(render, question, rendered))
    return {"text": rendered.text, "literal": rendered.literal, "turns": turns, "tagged": render.tagged}


def _quietly(render: Callable[..., Rendered]) -> Callable[..., Rendered | None]:
    """Wrap `render` so that it returns None if the template raises an exception."""

    def found(*given: object) -> Rendered | None:
        try:
            return render(*given)
        except Exception:
            return None

    return found


if __name__ == "__main__":
    serve(answer)
