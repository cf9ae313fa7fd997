"""OpenAI's routes over a socket, with an engine that only pretends; and the unmodified client of OpenAI's."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from mega.core.inference.server.options import ServerOptions
from mega.core.text.chat.format import ChatFormat, chat_format
from tests.inference.server.conftest import ANSWER, ByteTokenizer, Running, serving
from tests.support.fake_engine import FakeEngine


def ask(server: Running, **fields: Any) -> Any:
    reply = server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 100, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def stream(server: Running, path: str, **fields: Any) -> list[Any]:
    reply = server.ask("POST", path, {"stream": True, **fields})
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply
    lines = [line.removeprefix("data: ") for line in reply.body.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion_ends_where_the_model_ends_it(server: Running) -> None:
    found = ask(server)
    assert found["choices"] == [{"index": 0, "finish_reason": "stop", "text": ANSWER, "logprobs": None}]
    count = len(ANSWER.encode()) + 1
    assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}
    assert (found["object"], found["model"]) == ("text_completion", "fake")
    assert ask(server, max_tokens=5)["choices"][0] == {
        "index": 0, "finish_reason": "length", "text": "Hello", "logprobs": None,
    }  # fmt: skip


def test_an_answer_ends_at_any_end_of_the_models(engine: FakeEngine) -> None:
    tokenizer, ends = ByteTokenizer(), frozenset({ord("!"), 299})  # one is no token of the tokenizer's
    options = ServerOptions(name="fake", stop_ids=ends)
    with serving(engine, tokenizer, options, chat_format("plain", tokenizer)) as server:
        assert ask(server)["choices"][0]["text"] == "Hello, wörld"
        assert engine.seen[-1].stop_ids == {ord("!"), 256}
        assert ask(server, ignore_eos=True, max_tokens=16)["choices"][0]["text"] == ANSWER[:15]
        reply = server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        assert reply.json["choices"][0]["message"]["content"] == "Hello, wörld"
        assert server.ask("PUT", "/api", {"prompts": ["Hi"], "tokens_to_generate": 40}).status == 200
        assert engine.seen[-1].stop_ids == {ord("!"), 256}


def test_half_characters_are_not_shown_and_nothing_is_lost(server: Running) -> None:
    chunks = stream(server, "/v1/completions", prompt="Once", max_tokens=100)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == ANSWER and "ö" in texts and not any("\ufffd" in text for text in texts)
    cut = ask(server, max_tokens=9)["choices"][0]  # in the middle of ö
    assert cut["text"] == "Hello, w\ufffd"


@pytest.mark.parametrize(
    ("stops", "text"),
    [("wörld", "Hello, "), (["nothing", "\n"], "Hello, wörld!"), (["ld!\nAnd"], "Hello, wör"), (["zzz"], ANSWER)],
)
def test_a_stop_string_ends_the_answer_before_it_streamed_or_not(server: Running, stops: Any, text: str) -> None:
    whole = ask(server, stop=stops, logprobs=1)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    assert [each for each in whole["logprobs"]["text_offset"] if each > len(text)] == []
    chunks = stream(server, "/v1/completions", prompt="Once", max_tokens=100, stop=stops)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_logprobs_and_echo_are_as_an_evaluation_harness_reads_them(server: Running) -> None:
    prompt = list(b"Once upon")
    found = ask(server, prompt=[prompt], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234)
    scored = found["choices"][0]["logprobs"]
    assert found["choices"][0]["text"] == "Once uponH"
    assert scored["tokens"] == [*"Once upon", "H"] and scored["text_offset"] == list(range(10))
    assert scored["token_logprobs"][0] is None and scored["token_logprobs"][1:9] == [-0.5] * 8
    for token, logprob, top in list(zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"]))[1:]:
        assert max(top, key=top.__getitem__) == token and top[token] == logprob
    alone = ask(server, prompt=[prompt], max_tokens=0, logprobs=1, echo=True)["choices"][0]
    assert alone["text"] == "Once upon" and len(alone["logprobs"]["token_logprobs"]) == 9


def test_several_prompts_and_answers_keep_their_order(server: Running, engine: FakeEngine) -> None:
    found = ask(server, prompt=["a", "bc"], n=2, max_tokens=3, seed=5, echo=True)
    assert [choice["text"] for choice in found["choices"]] == ["aHel", "aHel", "bcHel", "bcHel"]
    assert [request.sampling.seed for request in engine.seen[-4:]] == [5, 6, 7, 8]
    assert found["usage"]["prompt_tokens"] == 3
    chunks = stream(
        server, "/v1/completions", prompt=["a", "bc"], n=2, max_tokens=3, stream_options={"include_usage": True}
    )
    assert chunks.pop()["usage"]["completion_tokens"] == 12
    assert sorted({chunk["choices"][0]["index"] for chunk in chunks}) == [0, 1, 2, 3]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "Missing 'prompt' field"),
    ({"prompt": []}, "must not be empty"),
    ({"prompt": ["a"] * 129}, "at most 128"),
    ({"prompt": [1, "a"]}, "token 'a'"),
    ({"prompt": [[1], "a"]}, "must be a string, strings"),
    ({"prompt": [999]}, "from 0 to 256"),
    ({"prompt": [True]}, "token True"),
    ({"prompt": "x" * 5000}, "maximum context length is 256"),
    ({"max_tokens": 10**12}, "maximum context length is 256"),
    ({"max_tokens": -2}, "max_tokens -2: must be"),
    ({"max_tokens": 0}, "max_tokens 0: needs echo"),
    ({"max_tokens": "5"}, "must be of type integer"),
    ({"n": 0}, "n 0: must be"),
    ({"n": 10**6}, "n 1000000: must be"),
    ({"temperature": -1}, "temperature -1: must be"),
    ({"temperature": True}, "must be of type number"),
    ({"top_p": 0}, "top_p 0.0: must be"),
    ({"top_p_bound": 0.5, "top_p": 0.4}, "top_p_bound"),
    ({"stop": [""]}, "1 to 256 characters"),
    ({"stop": ["a"] * 17}, "at most 16"),
    ({"logprobs": 21}, "logprobs 21"),
    ({"stream_options": {"include_usage": True}}, "needs stream"),
    ({"presence_penalty": 2.5}, "from -2.0 to 2.0"),
    ({"logit_bias": {"x": 1}}, "logit_bias x: must be a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias 101"),
    ({"stop_token_ids": [900]}, "stop_token_ids: token 900"),
    ({"include_stop_str_in_output": True}, "not supported; valid: False"),
    ({"min_tokens": 3}, "min_tokens 3: is not supported; valid: 0"),
    ({"mirostat_tau": 3}, "unknown field"),
    ({"best_of": 2}, "not supported"),
    ({"suffix": "b"}, "not supported"),
    ({"chat_template": "{{ 1 }}"}, "unknown field"),
    ({"user": 5}, "user 5: must be of type string"),
    ({"metadata": "me"}, "must be of type object"),
    ({"seed": 2**65}, "seed"),
    ({"response_format": {"type": "grammar"}}, "response_format: must be"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format: must be"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), BAD, ids=lambda each: str(each)[:40])
def test_a_bad_field_is_refused_by_name(server: Running, fields: dict[str, Any], text: str) -> None:
    reply = server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 4, **fields})
    assert reply.status == 400 and text in reply.json["error"]["message"], reply
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_fields_that_are_for_records_alone_change_nothing(server: Running, engine: FakeEngine) -> None:
    said = {"user": "me", "metadata": {"run": "1"}}
    talk = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/chat/completions", {"messages": talk}),
        ("/v1/chat/completions", {"messages": [{**talk[0], "name": "Ann"}]}),
    ):
        assert server.ask("POST", path, {**body, "max_tokens": 4, "seed": 1, **said}).status == 200
        assert server.ask("POST", path, {**body, "max_tokens": 4, "seed": 1}).status == 200
        assert engine.seen[-1] == engine.seen[-2]
    assert bytes(engine.seen[-1].prompt).decode() == "User: Hi\n\nAssistant:"


def test_a_name_is_refused_where_the_template_may_read_it(engine: FakeEngine) -> None:
    pytest.importorskip("jinja2")
    tokenizer, talk = ByteTokenizer(), [{"role": "user", "content": "Hi", "name": "Ann"}]
    loop = "{%% for m in messages %%}%s{{ m.content }}<|end|>{%% endfor %%}"
    for template, prompt in (
        (loop % "", "Hi"),
        (loop % "{% if m.name is defined %}{{ m['name'] }}{% endif %}", "AnnHi"),
    ):
        chat = ChatFormat(template, tokenizer, "the chat template")
        with serving(engine, tokenizer, ServerOptions(name="fake"), chat) as server:
            reply = server.ask("POST", "/v1/chat/completions", {"messages": talk, "max_tokens": 2})
            assert reply.status == 200, reply
            assert engine.seen[-1].prompt == (*prompt.encode(), 256)


def test_one_model_is_described_by_name(server: Running) -> None:
    for each in server.ask("GET", "/v1/models").json["data"]:
        assert server.ask("GET", f"/v1/models/{each['id']}").json == each
    reply = server.ask("GET", "/v1/models/a/b")
    assert reply.status == 404 and reply.json["error"]["code"] == "model_not_found"


def test_a_model_that_is_not_served_is_404(server: Running) -> None:
    reply = server.ask("POST", "/v1/completions", {"prompt": "Once", "model": "gpt-4"})
    assert reply.status == 404 and reply.json["error"]["code"] == "model_not_found"


def test_a_chat_is_rendered_by_the_servers_template_alone(server: Running, engine: FakeEngine) -> None:
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <|end|>"}]
    reply = server.ask("POST", "/v1/chat/completions", {"messages": talk, "max_tokens": 5, "logprobs": True})
    assert reply.status == 200, reply
    choice = reply.json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    assert choice["logprobs"]["content"][0]["bytes"] == [72]
    prompt = engine.seen[-1].prompt
    assert bytes(prompt).decode() == "System: Be kind.\n\nUser: Hi <|end|>\n\nAssistant:"
    chunks = stream(server, "/v1/chat/completions", messages=talk, max_completion_tokens=5)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "function", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "x", "name": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
        {"chat_template": "{{ messages }}"},
        {"tools": [{}]},
        {"top_logprobs": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"messages": [{"role": "user", "content": "x" * 5000}]},
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_bad_chat_is_refused(server: Running, fields: dict[str, Any]) -> None:
    talk = {"messages": [{"role": "user", "content": "x"}]}
    reply = server.ask("POST", "/v1/chat/completions", {**talk, **fields})
    assert reply.status == 400, reply


def test_what_the_schema_takes_is_taken(server: Running, engine: FakeEngine) -> None:
    """Whole numbers such as 16.0 too; penalties and biases reach the engine, scores of a prompt the client."""
    body = {"prompt": [72.0, 105], "max_tokens": 2.0, "presence_penalty": -1, "frequency_penalty": 0.5, "top_k": -1}
    reply = server.ask("POST", "/v1/completions", {**body, "logit_bias": {"9": 5, "5": -1.5}, "prompt_logprobs": 1})
    assert reply.status == 200, reply
    request = engine.seen[-1]
    assert (request.prompt, request.tokens, request.sampling.top_k) == ((72, 105), 2, 0)
    assert request.sampling.logit_bias == ((5, -1.5), (9, 5.0)) and request.sampling.presence_penalty == -1
    (choice,) = reply.json["choices"]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [None, {"105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"}}]
    assert server.ask("POST", "/detokenize", {"tokens": [72.0]}).json == {"prompt": "H"}
    for body in ({"top_p_decay": 0.5}, {"top_p_bound": 0.5}):
        assert server.ask("POST", "/v1/completions", {"prompt": "a", **body}).status == 200
    reply = server.ask("POST", "/tokenize", {"prompt": None})
    assert reply.status == 400 and "prompt" in reply.json["error"]["message"]


def test_the_tokenizer_is_served_as_a_harness_asks_for_it(server: Running) -> None:
    info = server.ask("GET", "/tokenizer_info").json
    assert info["eos_token"] == "<|end|>"
    assert server.ask("POST", "/tokenize", {"prompt": "ab", "add_special_tokens": False}).json["tokens"] == [97, 98]
    assert server.ask("POST", "/tokenize", {"prompt": info["eos_token"]}).json["tokens"] == [256]
    assert server.ask("POST", "/detokenize", {"tokens": [97, 98]}).json == {"prompt": "ab"}
    assert server.ask("POST", "/detokenize", {"tokens": [97, 9998]}).status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b'"x"',
        b"{",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": 1e999}',
        b"\xff\xfe",
        b"1" * 5000,
        b'{"prompt": "\\ud83d"}',
    ],
    ids=lambda each: repr(each[:12]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_what_is_not_json_is_refused(server: Running, path: str, body: bytes) -> None:
    assert server.ask("POST", path, body).status == 400


def test_a_character_spelt_as_a_pair_of_escapes_is_one(server: Running) -> None:
    bodies = (b'{"prompt": "\\ud83c\\udf88"}', '{"prompt": "\U0001f388"}'.encode())
    escaped, plain = (server.ask("POST", "/tokenize", body) for body in bodies)
    assert escaped.status == 200 and escaped.json == plain.json


def test_an_adapter_is_asked_for_as_a_model(server: Running, engine: FakeEngine) -> None:
    names = [each["id"] for each in server.ask("GET", "/v1/models").json["data"]]
    assert names == ["fake", "poet"]
    for model, adapter in (("poet", "poet"), ("fake", None), (None, None)):
        found = ask(server, max_tokens=1, **({"model": model} if model else {}))
        assert found["model"] == model or model is None
        assert engine.seen[-1].adapter == adapter
    reply = server.ask("POST", "/v1/completions", {"prompt": "a", "model": "other"})
    assert reply.status == 404 and "valid: fake, poet" in reply.json["error"]["message"]


def test_the_page_of_options_and_the_counters(server: Running) -> None:
    paths = server.ask("GET", "/openapi.json").json["paths"]
    chat = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["properties"]["messages"]["items"]["properties"]["role"]["enum"][-1] == "tool"
    for path, method, kind in (("/v1/completions", "post", "text/event-stream"), ("/metrics", "get", "text/plain")):
        assert kind in paths[path][method]["responses"]["200"]["content"]
    wanted = {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/api",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
    }
    assert wanted | {"/health", "/v1/health", "/metrics"} == set(paths)
    fields = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert fields["additionalProperties"] is False and fields["properties"]["max_tokens"]["default"] == 16
    assert server.ask("GET", "/v1/models").status == 200 and ask(server, max_tokens=1)["choices"]
    text = server.ask("GET", "/metrics").body.decode()
    assert 'mega_requests_total{route="/v1/models",status="200"}' in text
    assert "mega_time_to_first_token_seconds_bucket" in text and "mega_sequences_in_flight 0" in text


def test_the_unmodified_client_of_openai(server: Running) -> None:
    openai = pytest.importorskip("openai", reason="needs the client of OpenAI's")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    done = client.completions.create(model="fake", prompt="Once", max_tokens=100, stop=["\n"], seed=1, logprobs=2)
    assert done.choices[0].text == "Hello, wörld!" and done.choices[0].logprobs.tokens[0] == "H"
    talk = [{"role": "user", "content": "Hi"}]
    chunks = client.chat.completions.create(model="fake", messages=talk, stream=True, max_tokens=5)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Hello"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="fake", prompt="Once", temperature=-1)
    assert client.models.list().data[0].id == "fake"


def test_an_answer_matches_its_pattern(server: Running) -> None:
    pytest.importorskip("llguidance", reason="needs the extra serve")
    found = ask(server, response_format={"type": "regex", "pattern": "[0-9]{3}"}, max_tokens=20)["choices"][0]
    assert found["text"].isdigit() and len(found["text"]) == 3 and found["finish_reason"] == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = ask(server, response_format=wanted, max_tokens=100)["choices"][0]["text"]
    assert json.loads(text)["a"] in (1, 2)
    reply = server.ask("POST", "/v1/completions", {"prompt": "a", "response_format": {"type": "regex", "pattern": "("}})
    assert reply.status == 400, reply


def test_a_client_that_vanishes_frees_its_place(server: Running, engine: FakeEngine) -> None:
    engine.seconds, before = 0.01, engine.cancelled
    try:
        for fields in ({}, {"stream": True}):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            body = json.dumps({"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "n": 2, **fields})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            if fields:
                assert connection.getresponse().read(10)
            while len(engine.running) < 2:
                pass
            connection.sock.close() if connection.sock else None
            connection.close()
            deadline = 500
            while engine.running and deadline:
                deadline -= 1
                server.ask("GET", "/health")
        assert engine.cancelled == before + 4 and not engine.running
    finally:
        engine.seconds = 0


class LedTokenizer(ByteTokenizer):
    """A token in front of every text, as Llama's."""

    bos = 256  # type: ignore[assignment]

    def encode(self, text: str) -> list[int]:
        return [256, *text.encode()]


def test_offsets_are_into_the_text_that_was_sent(engine: FakeEngine) -> None:
    """What the tokenizer puts in front has no characters; a part of a character is where that is."""
    with serving(engine, LedTokenizer(), ServerOptions(name="fake")) as server:
        choice = ask(server, prompt="aé b", max_tokens=1, logprobs=0, echo=True)["choices"][0]
        assert choice["text"] == "aé bH" and choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("default", [False, True])
def test_special_tokens_that_a_prompt_spells(engine: FakeEngine, default: bool) -> None:
    options = ServerOptions(name="fake", parse_special_tokens=default)
    with serving(engine, ByteTokenizer(), options) as server:
        for asked in (None, False, True):
            words = {} if asked is None else {"parse_special_tokens": asked}
            found = ask(server, prompt="a<|end|>b", max_tokens=1, echo=True, logprobs=0, **words)
            parsed = default if asked is None else asked
            assert found["usage"]["prompt_tokens"] == (3 if parsed else 9)
            how = (
                "tokens, by parse_special_tokens" if parsed else "text; parse_special_tokens true makes tokens of them"
            )
            assert found["notes"] == [f"the prompt spells special tokens such as <|end|>, which are {how}"]
            offsets = [0, 1, 8, 9] if parsed else [*range(10)]
            assert found["choices"][0]["logprobs"]["text_offset"] == offsets
        assert "notes" not in ask(server, prompt="a", max_tokens=1)
        chunks = stream(server, "/v1/completions", prompt="<|end|>", max_tokens=2)
        assert [bool(chunk.get("notes")) for chunk in chunks[:2]] == [True, False]


def test_why_a_model_does_not_converse_is_said(engine: FakeEngine) -> None:
    options = ServerOptions(name="fake", no_chat="the chat template: not a Jinja template")
    with serving(engine, ByteTokenizer(), options) as server:
        reply = server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        assert reply.status == 400 and reply.json["error"]["message"].startswith("the chat template: not a Jinja")
