"""What `mega serve` makes of a chat template, or none, and of the template, ends and tokenizer that adapters bring.

The cells of `serve` in RULES of core/text/identity.py; those of other verbs are in tests/cli/test_identity.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mega.core.inference.loading.adapters import open_adapters
from mega.core.inference.loading.identity import check_adapter_tokenizer
from mega.core.inference.loading.load import open_model
from mega.core.text.build import build
from tests.cli.test_identity import STEP, Place, made, ours
from tests.inference.server.test_serve import ask, served
from tests.support.chat_templates import byte_level

SHOUTS = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{{ '</s>' if m.role == 'assistant' else '\n' }}"
SHOUTS += "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Adapters of `text`: a run that converses by llama2; the same as peft's, with another template, without, with
    another tokenizer."""
    found = Place(tmp_path_factory.mktemp("identity"))
    f = found.folder
    lora = ["--lora-rank", 2, "--chat-template", "llama2", "--save", f / "lora", "--save-interval", 1]
    made("finetune", "--load", f / "text", *STEP, *found.talks, *lora)
    made("convert-llama", "--load-dir", f / "lora", "--save-dir", f / "peft", "--to", "peft")
    for name in ("shouts", "bare", "foreign"):
        shutil.copytree(f / "peft", f / name)
    (f / "shouts" / "chat_template.jinja").write_text(SHOUTS)
    (f / "shouts" / "generation_config.json").write_text('{"eos_token_id": [2, 13]}')
    for name in ("tokenizer.json", "tokenizer.model"):
        (f / "foreign" / name).unlink(missing_ok=True)
    byte_level(f / "foreign")
    kept = ("adapter_config.json", "adapter_model.safetensors")
    for path in (f / "bare").iterdir():
        if path.name not in kept:
            path.unlink()
    return found


@contextmanager
def server(model: Path, *flags: object) -> Iterator[tuple[str, str]]:
    """Its address, and what it reported."""
    with served(*map(str, flags), model=str(model)) as (_, url, lines):
        yield url, "".join(lines)


def prompt_tokens(url: str, model: str) -> int:
    talk = [{"role": "user", "content": "Who are you?"}]
    status, found = ask(url, "/v1/chat/completions", model=model, messages=talk, max_tokens=1)
    assert status == 200, found
    return int(found["usage"]["prompt_tokens"])


def length(place: Place, text: str) -> int:
    tokenizer = build(tokenizer="Llama2Tokenizer", tokenizer_model=place.model)
    return len(tokenizer.parse(text).ids)


def test_an_adapter_converses_as_it_was_trained_to(place: Place) -> None:
    """The model has no template; each adapter has its own, or none."""
    f = place.folder
    adapters = [word for name in ("lora", "peft", "shouts", "bare") for word in ("--adapter", f"{name}={f / name}")]
    expected = {
        "lora": length(place, "<s>[INST] Who are you? [/INST]"),
        "peft": length(place, "<s>[INST] Who are you? [/INST]"),
        "shouts": length(place, "USER: Who are you?\nASSISTANT:"),
    }
    assert expected["shouts"] != expected["lora"]
    with server(f / "text", *adapters) as (url, said):
        assert {name: prompt_tokens(url, name) for name in expected} == expected
        for name in ("bare", "text"):
            talk = [{"role": "user", "content": "Who?"}]
            status, found = ask(url, "/v1/chat/completions", model=name, messages=talk)
            assert status == 400 and "no chat template" in found["error"]["message"], found
        for name in ("lora", "peft", "shouts"):
            assert f"--adapter {name}={f / name}: converses by the chat template that came with it" in said, said
        status, health = ask(url, "/health", "GET")
        assert health["chat"] is False and "no chat template" in said
        assert health["adapters"] == {"lora": True, "peft": True, "shouts": True, "bare": False}


def test_a_template_of_the_command_line_is_the_models(place: Place) -> None:
    """It is reported where the model has another, and for an adapter it counts only where that has none."""
    f = place.folder
    adapters = ["--adapter", f"shouts={f / 'shouts'}", "--adapter", f"bare={f / 'bare'}"]
    with server(f / "chat", "--chat-template", "plain") as (url, said):
        assert "--chat-template plain" in said and "has another of its own; leave it out to go by that" in said
        assert prompt_tokens(url, "chat") == length(place, "User: Who are you?\n\nAssistant:")
    with server(f / "text", "--chat-template", "plain", *adapters) as (url, said):
        assert "has another of its own" not in said and "chat by --chat-template" in said
        assert prompt_tokens(url, "text") == prompt_tokens(url, "bare") != prompt_tokens(url, "shouts")


def refused(place: Place, verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    f = place.folder
    more: dict[str, list[Any]] = {"serve": ["--port", 0], "generate": ["--prompt", "a", "--tokens", 1]}
    capsys.readouterr()
    assert ours(verb, "--load", f / "text", "--adapter", f"x={f / 'foreign'}", *more[verb]) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_an_adapter_of_another_tokenizer_is_refused(
    place: Place, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(place, verb, capsys)
    assert f"--adapter x={place.folder / 'foreign'}: came with another tokenizer, HuggingFaceTokenizer of" in said
    assert "give the weights that it was trained on" in said


def test_a_tokenizer_json_made_of_the_models_is_the_same(place: Place) -> None:
    """The kinds differ, the ids do not."""
    f = place.folder
    assert (f / "peft" / "tokenizer.json").exists() and not (f / "text" / "tokenizer.json").exists()
    opened = open_model(f / "text")
    (adapter,) = open_adapters({"peft": f / "peft"}, opened)
    own = opened.tokenizer()
    assert own.kind == "Llama2Tokenizer" and check_adapter_tokenizer("serve", opened, own, adapter) == []


def test_an_adapters_ends_are_its_own(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate` too; and it reports that a run of conversations continues plain text."""
    from mega.core.inference.generation.prompts import GenerationPlan, open_inputs
    from mega.core.inference.options import GenerateOptions

    f = place.folder
    adapters = {name: f / name for name in ("shouts", "bare", "lora")}
    found = open_inputs(GenerationPlan(texts=GenerateOptions(load=f / "text", tokens=1), adapters=adapters)).stop_ids
    assert found == {None: {2}, "shouts": {2, 13}, "bare": {2}, "lora": {2}}
    said = capsys.readouterr().err
    assert f"--adapter lora={f / 'lora'}: was trained on conversations" in said and "shouts" not in said


def test_a_damaged_template_is_reported_and_the_models_own_is_used(place: Place, tmp_path: Path) -> None:
    f = place.folder
    shutil.copytree(f / "shouts", tmp_path / "bad")
    (tmp_path / "bad" / "chat_template.jinja").write_text("{% for m in messages %}")
    with server(f / "chat", "--adapter", f"bad={tmp_path / 'bad'}") as (url, said):
        assert "no chat: --adapter bad=" in said
        talk = [{"role": "user", "content": "Who?"}]
        status, found = ask(url, "/v1/chat/completions", model="bad", messages=talk)
        assert status == 400 and "its chat template" in found["error"]["message"], found
        assert "chat by the model's template" in said and "another" not in said
        assert prompt_tokens(url, "chat") == length(place, "<s>[INST] Who are you? [/INST]")
