"""Functions that a model may call, by the unmodified client of OpenAI's, in the forms of three families' templates."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mega.core.inference.server.options import ServerOptions
from mega.core.inference.server.tools import AnswerReader, Call, Form
from mega.core.text.chat.format import ChatFormat
from tests.inference.server.conftest import ByteTokenizer, Running, serving
from tests.support.fake_engine import FakeEngine

_ENDS = "{{ '<|end|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
_TURN = "{{ message.role + ': ' + message.content }}"
TEMPLATES: dict[Form, str] = {
    "tags": "{%- if tools -%}{{ tools | tojson }} answer in <tool_call></tool_call>{%- endif -%}"
    "{%- for message in messages -%}" + _TURN + "{%- for call in message.tool_calls or [] -%}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{%- endfor -%}" + _ENDS,
    "list": "{%- if tools -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}"
    "{%- for message in messages -%}" + _TURN + "{%- if message.tool_calls -%}[TOOL_CALLS]"
    "{{ message.tool_calls | tojson }}{%- endif -%}" + _ENDS,
    "object": "{%- if tools -%}Environment: ipython {{ tools | tojson }}{%- endif -%}"
    "{%- for message in messages -%}" + _TURN + "{%- for call in message.tool_calls or [] -%}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{%- endfor -%}' + _ENDS,
}
_CALL = '{"name": "add", "arguments": {"a": 7}}'
ANSWERS: dict[Form, str] = {
    "tags": f"So:\n<tool_call>\n{_CALL}\n</tool_call>",
    "list": f"[TOOL_CALLS] [{_CALL}]",
    "object": '{"name": "add", "parameters": {"a": 7}}',
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [7]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=list(TEMPLATES))
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Running, FakeEngine, Form]]:
    tokenizer, form = ByteTokenizer(), request.param
    engine = FakeEngine(list(ANSWERS[form].encode()), 256, vocab=300, longest=2048)
    options = ServerOptions(name="first", served_model_name=("first", "alias"), adapters=())
    with serving(engine, tokenizer, options, ChatFormat(TEMPLATES[form], tokenizer, "the template")) as running:
        yield running, engine, form


def test_the_client_of_openai_calls_a_function_and_goes_on(server: tuple[Running, FakeEngine, Form]) -> None:
    openai = pytest.importorskip("openai", reason="needs the client of OpenAI's")
    running, engine, form = server
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "alias", "tools": [ADD], "messages": [{"role": "user", "content": "7?"}]}
    choice = client.chat.completions.create(**ask).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, call.function.arguments) == ("tool_calls", "add", '{"a": 7}')
    assert choice.message.content == ("So:" if form == "tags" else None)
    streamed = [each.choices[0] for each in client.chat.completions.create(**ask, stream=True)]
    (delta,) = [each.delta.tool_calls[0] for each in streamed if each.delta.tool_calls]
    assert (delta.index, delta.function.name, delta.function.arguments) == (0, "add", '{"a": 7}')
    assert streamed[-1].finish_reason == "tool_calls"
    assert "".join(each.delta.content or "" for each in streamed) == (choice.message.content or "")
    answer = {"role": "tool", "tool_call_id": call.id, "content": "14"}
    client.chat.completions.create(**ask | {"messages": [*ask["messages"], choice.message.model_dump(), answer]})
    prompt = bytes(token for token in engine.seen[-1].prompt if token < 256).decode()
    assert '"a": 7}' in prompt and "tool: 14" in prompt and prompt.endswith("assistant: ")
    engine.answer[:] = [*b"A seven.", 256]  # whatever it would say, it must call
    for forced in ("required", {"type": "function", "function": {"name": "add"}}):
        found = client.chat.completions.create(**ask, tool_choice=forced).choices[0].message
        assert found.tool_calls[0].function.arguments == '{"a": 7}'
    for free in ("auto", "none"):
        assert client.chat.completions.create(**ask, tool_choice=free).choices[0].message.content == "A seven."
    engine.answer[:] = [*ANSWERS[form].encode(), 256]
    assert [each.id for each in client.models.list()] == ["first", "alias"]


def test_what_is_wrong_is_named(server: tuple[Running, FakeEngine, Form]) -> None:
    running, _, _ = server
    ask = {"messages": [{"role": "user", "content": "7?"}]}
    for more, field in (
        ({"tools": [{}]}, "tools"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ):
        reply = running.ask("POST", "/v1/chat/completions", ask | more)
        assert reply.status == 400 and reply.json["error"]["param"] == field and field in reply.json["error"]["message"]


_NAN = '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'
CASES: list[tuple[Form | None, str, str, str, int]] = [
    ("tags", f"hi \n<tool_call>\n{_CALL}\n</tool_call>\n<tool_call>{_CALL}</tool_call>", "hi", "", 2),
    ("tags", "a < b <tool_call> nothing </tool_call> x", "a < b <tool_call> nothing </tool_call> x", "", 0),
    ("tags", f"<tool_call>{_CALL}", "", "", 1),
    ("tags", "<think>\nhm <x> so\n</think>\n\nhello", "hello", "\nhm <x> so\n", 0),
    ("tags", '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "", "", 1),
    ("tags", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', _NAN, "", 0),
    ("list", f"[TOOL_CALLS] [{_CALL},{_CALL}]", "", "", 2),
    ("list", 'fine [TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]add[ARGS]{}', "fine", "", 2),
    ("list", "see [1] and [TOOL", "see [1] and [TOOL", "", 0),
    ("list", "[1] is a note", "[1] is a note", "", 0),
    ("object", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}', "", "", 2),
    ("object", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", "", 1),
    ("object", '{"name": "sub", "parameters": {"a": 1}}', '{"name": "sub", "parameters": {"a": 1}}', "", 0),
    (None, "hello <tool_call>", "hello <tool_call>", "", 0),
]


@pytest.mark.parametrize(("form", "text", "content", "thought", "calls"), CASES)
def test_an_answer_is_read_alike_however_it_comes(
    form: Form | None, text: str, content: str, thought: str, calls: int
) -> None:
    for seed in range(20):
        cut, reader = random.Random(seed), AnswerReader(form, ("add",), reasons=True)
        at, said, thoughts, called = 0, "", "", list[Call]()
        while at <= len(text):
            size = cut.randint(1, 9)
            piece = reader.push(text[at : at + size], end=at + size > len(text))
            said, thoughts, at = said + piece.content, thoughts + piece.reasoning, at + size
            called += piece.calls
        assert (said, thoughts, len(called)) == (content, thought, calls)
        assert all(isinstance(json.loads(each.arguments.encode()), dict) for each in called)
