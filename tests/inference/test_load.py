"""A model opened where it lies, ours or others', is the same model in any layout; nothing is written there."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.forms import direct
from mega.core.checkpoint.forms.companions import tokenizer_kind
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.mapping import Target
from mega.core.checkpoint.own import container, disk
from mega.core.checkpoint.own.store import CheckpointError, locate
from mega.core.device import Device
from mega.core.family import family
from mega.core.inference.generation.generate import logits
from mega.core.inference.loading.load import (
    chat_template_place,
    empty_stage,
    fill,
    load_model,
    load_stages,
    open_model,
)
from mega.core.parallel.collectives import all_gather
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.pipeline import Pipeline
from mega.core.parallel.weight import weights
from mega.core.plan import plan
from mega.core.processes.pool import Pool
from mega.core.text.chat import jinja_process
from mega.core.text.chat.templates import source_of
from tests.support.chat_templates import byte_level
from tests.support.shared import shared

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
IDS = torch.arange(1, 13).view(2, 6)


@pytest.mark.parametrize("form", ["hf", "hf-bin", "gpt2", "meta", "llama2.c/model.bin", "megatron", "mega"])
def test_what_others_wrote_is_read_where_it_lies(form: str, tmp_path: Path) -> None:
    place = GOLDEN / form
    before = sorted(path for path in GOLDEN.rglob("*"))
    opened = open_model(place)
    found = logits(load_model(opened), IDS)
    assert sorted(path for path in GOLDEN.rglob("*")) == before
    if form == "mega":
        assert torch.equal(found, logits(load_model(locate(place)), IDS))
        return
    convert(place, tmp_path / "ours", "mega")
    ours = open_model(tmp_path / "ours")
    assert torch.equal(found, logits(load_model(ours), IDS)) and found.std() > 0
    assert ours.model == opened.model and ours.dtype == opened.dtype and ours.digest != opened.digest


def outputs(groups: Groups, rank: int, place: Path, layout: dict[str, int], sequence: bool) -> torch.Tensor | None:
    """Job of one rank: logits of IDS on the ranks of the last stage."""
    mesh, device, opened = Mesh(rank, **layout, groups=groups), Device.choose("cpu", rank), open_model(place)
    stages = load_stages(opened, mesh, device, dtype=torch.float64, sequence=sequence)
    prompt = family(opened.model).prompt
    assert prompt is not None
    with torch.no_grad():
        found = Pipeline(stages, mesh, device.torch).outputs(plan("forward", mesh.pp.size, 1, 1), [prompt(IDS)])
    return all_gather(found[0].movedim(2, 0), mesh.tp).movedim(0, 2)[..., : opened.model.vocab] if found else None


LAYOUTS: list[tuple[int, dict[str, int], bool]] = [
    (2, {"tp": 2}, True),
    (2, {"pp": 2}, False),
    (4, {"tp": 2, "pp": 2}, False),
]


@pytest.mark.parametrize("form", ["hf", "gpt2"])
def test_stages_of_any_layout_are_filled(pool: Pool, form: str) -> None:
    whole = logits(load_model(open_model(GOLDEN / form), dtype=torch.float64), IDS)
    for world, layout, sequence in LAYOUTS:
        last = pool.run(outputs, GOLDEN / form, layout, sequence, world=world)[-1]
        torch.testing.assert_close(last, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_weight_is_read_and_padding_is_zero(rank: int) -> None:
    """Whatever lay in the memory before."""
    opened = open_model(GOLDEN / "hf")
    stage = empty_stage(opened.model, Mesh.at(rank, tp=2), Device.choose("cpu"), torch.float32)
    for weight in weights(stage):
        weight.data.fill_(torch.nan)
    fill(stage, opened)
    padding = 0
    for weight in weights(stage):
        assert weight.isfinite().all()
        for segment in weight.segments:
            padding -= segment.real(weight.data).numel()
            segment.real(weight.data).zero_()
        padding += weight.numel()
        assert not weight.data.any()
    assert padding


def test_blocks_of_others_weights_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two meet, and what is read is the same; one that fails ends the reading."""
    expected = load_model(open_model(GOLDEN / "hf")).state_dict()
    monkeypatch.setattr(disk, "BLOCK", 256)
    monkeypatch.setattr(container, "BLOCK", 256)
    whole, two, calls = direct.assemble, threading.Barrier(2), iter(range(1_000_000))

    def assemble(*arguments: Any) -> torch.Tensor:
        if next(calls) < 2:
            two.wait(60)
        return whole(*arguments)

    monkeypatch.setattr(direct, "assemble", assemble)
    found = load_model(open_model(GOLDEN / "hf")).state_dict()
    assert found.keys() == expected.keys() and next(calls) > len(found)
    assert all(torch.equal(found[name], expected[name]) for name in found)

    def damaged(target: Target, *arguments: Any) -> torch.Tensor:
        if target.name.endswith("norm.weight"):
            raise CheckpointError(f"{target.name}: is damaged")
        return whole(target, *arguments)

    monkeypatch.setattr(direct, "assemble", damaged)
    with pytest.raises(CheckpointError, match=r"norm\.weight: is damaged"):
        load_model(open_model(GOLDEN / "hf"))


def test_the_tokenizer_comes_with_the_weights() -> None:
    opened = open_model(shared("stories260K_hf/config.json").parent)
    assert opened.tokenizer().kind == "Llama2Tokenizer" and opened.dtype == torch.float32
    assert opened.chat_template() is None and opened.step is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "a {{ template }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "a {{ template }}"})),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "default", "template": "a {{ template }}"}, {"name": "tool_use"}]}),
        ),
    ],
)
def test_the_chat_template_comes_with_the_weights(tmp_path: Path, name: str, content: str) -> None:
    shutil.copytree(GOLDEN / "hf", tmp_path / "hf")
    (tmp_path / "hf" / name).write_text(content)
    opened = open_model(tmp_path / "hf")
    assert opened.chat_template() == "a {{ template }}"
    assert opened.digest != open_model(GOLDEN / "hf").digest


TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("default", "tool_use"),
    [
        ("{{ m }}plain{% for m in messages %}\n  {{ m.content }}{% endfor %}\n", "\n  {{ tools|tojson }}\n\n"),
        ("  {%- set a = 1 %}\n{{ a }} \r\n", "{%- for t in tools %}\n {{ t.function.name }}\n{%- endfor %}\n   "),
        (
            "{% macro m(x) %}{{ x }}{% endmacro %}{{ m('d') }}",
            "\t{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('t') }}\r",
        ),
    ],
)
@pytest.mark.parametrize("place", ["config", "files"])
def test_the_template_for_functions(tmp_path: Path, place: str, default: str, tool_use: str) -> None:
    """Of several templates, the one for functions is used where there are functions, as transformers does; both files
    stay with the weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN / "hf", folder)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    byte_level(folder)
    if place == "config":
        config["chat_template"] = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_bytes(tool_use.encode())
        (folder / "chat_template.jinja").write_bytes(default.encode())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, messages = transformers.AutoTokenizer.from_pretrained(folder), [{"role": "user", "content": "Hi"}]
    convert(folder, tmp_path / "run")
    for source in (folder, tmp_path / "run"):
        template = open_model(source).chat_template()
        assert template is not None
        for tools in (None, TOOLS):
            question = {"ask": "text", "source": template, "variables": {}, "names": [], "marks": ["\ufdd0", "\ufdd1"]}
            found = jinja_process.answer({**question, "messages": messages, "tools": tools})
            assert found["text"] == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    chosen = chat_template_place(open_model(tmp_path / "run"))
    assert chosen is not None and source_of(chosen) == open_model(folder).chat_template()
    convert(tmp_path / "run", tmp_path / "back", to="hf")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back.get_chat_template(tools=TOOLS) == theirs.get_chat_template(tools=TOOLS)


@pytest.mark.parametrize("section", [("data", "chat_data"), ("finetuning", "dpo_data")], ids=str)
def test_what_a_run_trained_by_goes_before_the_template_of_its_base(tmp_path: Path, section: tuple[str, str]) -> None:
    (tmp_path / "chat_template.jinja").write_text("a {{ template }}")
    files = {"chat_template.jinja": tmp_path / "chat_template.jinja"}

    def own(template: str, files: dict[str, Path]) -> str | None:
        config: dict[str, Any] = {"data": {"chat_template": template}}
        config.setdefault(section[0], {})[section[1]] = ["talks.jsonl"]
        return replace(open_model(GOLDEN / "mega"), meta={"config": config}, attachments=files).chat_template()

    assert own("chatml", files) == "chatml"
    assert own("my.jinja", files) == "a {{ template }}", "which the saver attached"
    assert own("my.jinja", {}) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "no such file or directory"),
        ({}, "holds no config.json (Hugging Face)"),
        ({"config.json": {"model_type": "whisper"}}, "model_type 'whisper'"),
        ({"config.json": {"model_type": "llama"}}, "holds neither model.safetensors nor"),
    ],
)
def test_what_is_not_a_model_is_refused_in_one_line(tmp_path: Path, config: dict[str, Any] | None, words: str) -> None:
    place = tmp_path / "place"
    if config is not None:
        place.mkdir()
    for name, content in (config or {}).items():
        (place / name).write_text(json.dumps(content))
    with pytest.raises(ValueError) as refused:
        open_model(place)
    assert str(place) in str(refused.value) and words in str(refused.value) and "\n" not in str(refused.value)


def test_words_of_another_class_are_not_taken_for_gpt2s(tmp_path: Path) -> None:
    """vocab.json and merges.txt say neither which pattern cuts words nor which tokens are added."""
    for name, content in (("vocab.json", "{}"), ("merges.txt", "#version: 0.2\n"), ("config.json", "{}")):
        (tmp_path / name).write_text(content)
    files = {path.name: path for path in tmp_path.iterdir()}
    assert tokenizer_kind(files) == "GPT2BPETokenizer"
    for name, content, why in (
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2TokenizerFast"}, "are of a Qwen2TokenizerFast, which cuts"),
        ("config.json", {"model_type": "qwen3"}, "are of a Qwen2Tokenizer, which cuts texts by rules of its own"),
        ("added_tokens.json", {"<|im_end|>": 50257}, r"have added tokens next to them, such as <\|im_end\|>"),
    ):
        file = tmp_path / f"other-{name}"
        file.write_text(json.dumps(content))
        other = {**files, name: file}
        assert tokenizer_kind(other) is None
        opened = replace(open_model(GOLDEN / "mega"), meta={}, attachments=other)
        with pytest.raises(ValueError, match=f"carries no tokenizer that is read: vocab.json and merges.txt {why}"):
            opened.tokenizer()
