"""Fields of vLLM's and llama.cpp's clients: those with an effect, and those that are accepted with one value only."""

from __future__ import annotations

from typing import Any

import pytest

from mega.core.inference.server.client_fields import ClientFields, resolved
from mega.core.inference.server.fields import BadField, read
from mega.core.inference.server.openai_api import Chat, Completion
from tests.inference.server.conftest import Running
from tests.support.fake_engine import FakeEngine

OFF: dict[str, Any] = {
    **dict.fromkeys(("use_beam_search", "return_tokens_as_token_ids", "return_token_ids", "store"), False),
    **dict.fromkeys(("timings_per_token", "return_progress", "return_tokens"), False),
    **dict.fromkeys(("min_tokens", "priority", "mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier"), 0),
    **dict.fromkeys(("n_keep", "min_keep", "n_probs"), 0),
    **{"repeat_last_n": -1, "id_slot": -1, "length_penalty": 1.0, "typical_p": 1.0},
    **{
        "spaces_between_special_tokens": True,
        "service_tier": "auto",
        "prompt_cache_key": "a",
        "safety_identifier": "b",
    },
}
"""Fields without effect -> the value that asks for nothing."""
TALK = [{"role": "user", "content": "Hello"}]


def test_every_field_has_an_effect_or_one_value() -> None:
    effects = {"n_predict", "repeat_penalty", "guided_json", "json_schema", "guided_regex", "guided_choice"}
    assert set(ClientFields.model_fields) == effects | set(OFF)


def test_values_that_ask_for_nothing_are_accepted_and_others_are_named(server: Running) -> None:
    assert server.ask("POST", "/v1/completions", {"prompt": "a", **OFF, "add_special_tokens": True}).status == 200
    extra: dict[str, Any] = {
        "add_special_tokens": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    extra |= {"include_reasoning": True, "reasoning_format": "auto"}
    assert server.ask("POST", "/v1/chat/completions", {"messages": TALK, **OFF, **extra}).status == 200
    for name, value in {**OFF, "add_special_tokens": True}.items():
        if isinstance(value, str):
            continue
        other = not value if isinstance(value, bool) else value + 1
        reply = server.ask("POST", "/v1/completions", {"prompt": "a", name: other})
        assert reply.status == 400 and reply.json["error"]["param"] == name
        assert "is not supported; valid: " in reply.json["error"]["message"], name


def test_other_names_of_fields(server: Running, engine: FakeEngine) -> None:
    body = {"prompt": "abc", "n_predict": 7, "repeat_penalty": 1.5}
    assert server.ask("POST", "/v1/completions", body).status == 200
    assert (engine.seen[-1].tokens, engine.seen[-1].sampling.repetition_penalty) == (7, 1.5)
    for fields in ({"max_tokens": -1}, {"n_predict": -1}):
        assert server.ask("POST", "/v1/completions", {"prompt": "abc", **fields}).status == 200
        assert engine.seen[-1].tokens == engine.limits.longest - 3
        assert server.ask("POST", "/v1/chat/completions", {"messages": TALK, **fields}).status == 200
        assert engine.seen[-1].tokens == engine.limits.longest - len(engine.seen[-1].prompt)
    reply = server.ask("POST", "/v1/completions", {"prompt": "a", "n_predict": 7, "max_tokens": 7})
    assert reply.status == 400 and "excludes max_tokens" in reply.json["error"]["message"]
    reply = server.ask("POST", "/v1/chat/completions", {"messages": TALK, "max_tokens": 0})
    assert reply.status == 400 and reply.json["error"]["param"] == "max_tokens"


def test_constraints_become_a_response_format() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    for name in ("guided_json", "json_schema"):
        assert resolved(read({"prompt": "a", name: schema}, Completion)).response_format == wanted
    regex = resolved(read({"messages": TALK, "guided_regex": "[a-c]+"}, Chat)).response_format
    assert regex == {"type": "regex", "pattern": "[a-c]+"}
    choice = resolved(read({"prompt": "a", "guided_choice": ["a.b", "yes (no)"]}, Completion)).response_format
    assert choice == {"type": "regex", "pattern": r"a\.b|yes \(no\)"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 3]}, "guided_choice"),
        ({"guided_choice": ["a"] * 129}, "guided_choice"),
    ],
)
def test_constraints_that_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadField) as error:
        resolved(read({"prompt": "a", **fields}, Completion))
    assert error.value.field == field


def test_an_invalid_constraint_is_named_as_it_was_sent(server: Running) -> None:
    pytest.importorskip("llguidance")
    wrong: dict[str, Any] = {"type": "nothing"}
    regex = {"type": "regex", "pattern": "("}
    for name, value in (
        ("guided_regex", "("),
        ("guided_json", wrong),
        ("json_schema", wrong),
        ("response_format", regex),
    ):
        reply = server.ask("POST", "/v1/completions", {"prompt": "a", name: value})
        assert reply.status == 400 and reply.json["error"]["param"] == name, reply.json
        assert reply.json["error"]["message"].startswith(f"{name}: ")
