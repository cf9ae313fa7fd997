"""PUT /api: Megatron-LM's fields, order of checks, error texts and answers."""

from __future__ import annotations

from typing import Any

import pytest

from mega.core.inference.server.options import ServerOptions
from tests.inference.server.conftest import ANSWER, ByteTokenizer, Running, serving
from tests.support.fake_engine import FakeEngine

TOP_K = "top_k must be an integer equal to or greater than 0 and less than or equal to 1000"
TOP_K_RANGE = "top_k must be equal to or greater than 0 and less than or equal to 1000"
TEMPERATURE = "temperature must be a positive number less than or equal to 100.0"
TOKENS = "tokens_to_generate must be an integer greater than 0"
P: dict[str, Any] = {"prompts": ["ab"]}

ALWAYS: list[tuple[Any, str]] = [
    ({}, "prompts argument required"),
    ([], "prompts argument required"),
    ({**P, "max_len": 5}, "max_len is no longer used.  Replace with tokens_to_generate"),
    ({**P, "sentences": ["a"]}, "sentences is no longer used.  Replace with prompts"),
    ({"prompts": "ab"}, "prompts is not a list of strings"),
    ({"prompts": None}, "prompts is not a list of strings"),
    ({"prompts": [5]}, "prompts is not a list of strings"),
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": ["a"] * 129}, "Maximum number of prompts is 128"),
]
"""Bodies that Megatron-LM answers with 400 too, or with a traceback."""

QUIRKS: list[tuple[Any, str]] = [
    ({**P, "tokens_to_generate": 1.5}, TOKENS),
    ({**P, "tokens_to_generate": True}, TOKENS),
    ({**P, "tokens_to_generate": -1}, "tokens_to_generate must be an integer greater than or equal to 0"),
    ({**P, "logprobs": 1}, "logprobs must be a boolean value"),
    ({**P, "tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs should be True"),
    ({**P, "temperature": 0}, TEMPERATURE),
    ({**P, "temperature": 100.5}, TEMPERATURE),
    ({**P, "temperature": True}, TEMPERATURE),
    ({**P, "top_k": 1.0}, TOP_K),
    ({**P, "top_k": True}, TOP_K),
    ({**P, "top_k": 1001}, TOP_K_RANGE),
    ({**P, "top_k": -1}, TOP_K_RANGE),
    ({**P, "top_p": 1}, "top_p must be a positive float less than or equal to 1.0"),
    ({**P, "top_p": 0.9, "top_k": 5}, "cannot set both top-k and top-p samplings."),
    ({**P, "top_p": 1.1}, "top_p must be less than or equal to 1.0"),
    ({**P, "top_p_decay": 1}, "top_p_decay must be a positive float less than or equal to 1.0"),
    ({**P, "top_p_decay": 0.5}, "top_p_decay cannot be set without top_p"),
    ({**P, "top_p": 0.9, "top_p_decay": 1.5}, "top_p_decay must be less than or equal to 1.0"),
    ({**P, "top_p_bound": 1}, "top_p_bound must be a positive float less than or equal to top_p"),
    ({**P, "top_p_bound": 0.5}, "top_p_bound cannot be set without top_p"),
    ({**P, "top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound must be greater than 0 and less than top_p"),
    ({**P, "add_BOS": 1}, "add_BOS must be a boolean value"),
    ({"prompts": ["a", ""]}, "Empty prompts require add_BOS=true"),
    ({**P, "stop_on_double_eol": 1}, "stop_on_double_eol must be a boolean value"),
    ({**P, "stop_on_eol": "x"}, "stop_on_eol must be a boolean value"),
    ({**P, "prevent_newline_after_colon": 0}, "prevent_newline_after_colon must be a boolean value"),
    ({**P, "random_seed": "1"}, "random_seed must be integer"),
    ({**P, "random_seed": -1}, "random_seed must be a positive integer"),
    ({**P, "no_log": 3}, "no_log must be a boolean value"),
    ({**P, "beam_width": "2"}, "beam_width must be integer"),
    ({**P, "beam_width": 0}, "beam_width must be an integer > 1"),
    ({"prompts": ["a", "b"], "beam_width": 2}, "When doing beam_search, batch size must be 1"),
    ({**P, "beam_width": 2, "stop_token": "a"}, "stop_token must be an integer"),
    ({**P, "beam_width": 2, "length_penalty": 1}, "length_penalty must be a float"),
    ({**P, "tokens_to_generate": 255}, "Length of prompt + tokens_to_generate longer than allowed"),
    ({**P, "tokens_to_generate": 10**12}, "Length of prompt + tokens_to_generate longer than allowed"),
    ({"prompts": ["x" * 4000]}, "Length of prompt + tokens_to_generate longer than allowed"),
    ({"prompts": ["x" * 50] * 9, "tokens_to_generate": 100}, "Too many tokens.  1350 is greater than 1000"),
    ({**P, "beam_width": 2, "tokens_to_generate": 0, "logprobs": True}, "logprobs has no effect with beam_width"),
    ({"prompts": ["x" * 256], "beam_width": 2}, "context length + tokens_to_generate too large"),
]
"""Bodies that Megatron-LM answers with 200 and the text alone."""


@pytest.fixture(scope="module")
def legacy() -> Any:
    engine = FakeEngine(list(ANSWER.encode()), 256, vocab=300)
    options = ServerOptions(name="fake", max_tokens_to_oom=1000, legacy_status=True)
    with serving(engine, ByteTokenizer(), options) as running:
        yield running


@pytest.mark.parametrize(("body", "text"), [*ALWAYS, *QUIRKS], ids=lambda each: str(each)[:50])
def test_every_bad_value_is_400_with_megatrons_text(server: Running, body: Any, text: str) -> None:
    reply = server.ask("PUT", "/api", body)
    assert (reply.status, reply.json) == (400, text)


@pytest.mark.parametrize(("body", "text"), [*ALWAYS, *QUIRKS], ids=lambda each: str(each)[:50])
def test_legacy_status_answers_as_megatron_does(legacy: Running, body: Any, text: str) -> None:
    if "no effect" in text:  # nothing is refused that Megatron-LM ignores; its own checks come next
        text = "context length + tokens_to_generate too large"
    reply = legacy.ask("PUT", "/api", body)
    assert (reply.status, reply.json) == (400 if (body, text) in ALWAYS else 200, text)


def test_what_megatron_ignores_is_refused_unless_legacy(server: Running, legacy: Running) -> None:
    for extra in ({"foo": 1}, {"stop_token": 5}, {"length_penalty": 2.0}):
        assert server.ask("PUT", "/api", {**P, **extra}).status == 400
        assert isinstance(legacy.ask("PUT", "/api", {**P, "tokens_to_generate": 2, **extra}).json, dict)


def test_the_answer_has_megatrons_form(server: Running) -> None:
    body = {"prompts": ["Hello world", "b"], "tokens_to_generate": 3, "logprobs": True, "top_k": 1}
    found = server.ask("PUT", "/api", body).json
    assert found["text"] == ["Hello worldHel", "bHel"]
    assert found["segments"][1] == ["b", "H", "e", "l"]
    assert [len(each) for each in found["logprobs"]] == [13, 3] and found["logprobs"][1][0] == pytest.approx(
        -0.6931, abs=1e-4
    )
    assert server.ask("PUT", "/api", {**P, "tokens_to_generate": 1}).json["logprobs"] is None
    scored = server.ask("PUT", "/api", {**P, "tokens_to_generate": 0, "logprobs": True}).json
    assert scored == {"text": ["ab"], "segments": [["a", "b"]], "logprobs": [[-0.5]]}
    whole = server.ask("PUT", "/api", {**P, "tokens_to_generate": 100}).json["text"][0]
    assert whole == f"ab{ANSWER}<|end|>"  # the token that ended it is part of Megatron-LM's text


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"stop_on_eol": True}, "Hello, wörld!\n"), ({"stop_on_double_eol": True}, "Hello, wörld!\nAnd on.\n\n")],
)
def test_lines_end_an_answer(server: Running, fields: dict[str, Any], text: str) -> None:
    body = {"prompts": ["a"], "tokens_to_generate": 100, "logprobs": True, **fields}
    found = server.ask("PUT", "/api", body).json
    assert found["text"] == [f"a{text}"] and len(found["logprobs"][0]) == len(found["segments"][0]) - 1


def test_fields_reach_the_engine(server: Running, engine: FakeEngine) -> None:
    body = {
        **P,
        "top_p": 0.9,
        "top_p_decay": 0.5,
        "top_p_bound": 0.1,
        "temperature": 2,
        "random_seed": 7,
        "add_BOS": True,
    }
    assert server.ask("PUT", "/api", {**body, "tokens_to_generate": 2}).status == 200
    how = engine.seen[-1].sampling
    assert (how.top_p, how.top_p_decay, how.top_p_bound, how.temperature, how.seed) == (0.9, 0.5, 0.1, 2, 7)
    assert engine.seen[-1].prompt == (256, 97, 98)
    found = server.ask("PUT", "/api", {**P, "beam_width": 3, "length_penalty": 2.0, "stop_token": 9}).json
    assert (engine.seen[-1].beams, engine.seen[-1].length_penalty, engine.seen[-1].stop_ids) == (3, 2.0, frozenset([9]))
    assert found["scores"] == [0.0, -1.0, -2.0] and len(found["text"]) == 3
    colon = server.ask("PUT", "/api", {**P, "prevent_newline_after_colon": True, "tokens_to_generate": 1})
    allowed = engine.seen[-1].allowed
    assert colon.status == 200 and allowed is not None and allowed(b"a") is None
    mask = allowed(b"a:")
    assert mask is not None and not mask[10] and mask[11]
