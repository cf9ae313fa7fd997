"""A model that was trained to converse, exported: its template and all ends of a turn go with it, and come back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.architecture import inventory
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.inference.load import open_model
from mega.core.text.build import build
from mega.core.text.chat import chat_format
from mega.core.text.templates import TEMPLATES
from mega.core.text.tokenizer import Tokenizer
from mega.core.text.train import train_bpe
from tests.support.chat_templates import CORPUS, metaspace, untagged
from tests.support.runs import small_run
from tests.support.shared import shared

TALK = [{"role": "user", "content": "What is  it?\n"}]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    vocab, merges = train_bpe(CORPUS, 300, folder / "bpe")
    model = shared("stories260K/tok512.model")
    metaspace(folder)
    return {
        "bpe": build(tokenizer="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges),
        "sentencepiece": build(tokenizer="Llama2Tokenizer", tokenizer_model=model),
        "tokenizer.json": build(tokenizer="HuggingFaceTokenizer", tokenizer_model=folder / "tokenizer.json"),
    }


def says(run: Path, tokenizer: Tokenizer, end: int, template: str, attached: dict[str, Path | bytes]) -> None:
    """A run that was trained on conversations, of a model that answers anything with `end`."""
    kind, values = ("gpt", {"kv_heads": 8}) if tokenizer.kind == "GPT2BPETokenizer" else ("llama", {})
    rows = tokenizer.vocab_size
    model = small_run(kind, layers=1, dtype="fp32", vocab=rows, vocab_multiple=1, positions=64, **values).model
    pieces = []
    for tensor in inventory(model):
        value = torch.ones(tensor.shape) if "norm" in tensor.name else torch.zeros(tensor.shape)
        if tensor.name in ("model.embed_tokens.weight", "lm_head.weight"):
            value += 0.1
            value[end] = 1.0
        pieces.append(Piece(f"weights/{tensor.name}", tensor.shape, (0,) * len(tensor.shape), value))
    data = {"chat_data": ["talks.jsonl"], "chat_template": template}
    config = {"model": dataclasses.asdict(model), "tokenizer": {"tokenizer": tokenizer.kind}, "data": data}
    source = TEMPLATES.get(template, template)
    files = {**tokenizer.files(), "chat_template.jinja": source.encode(), **attached}
    CheckpointStore(run).save(3, pieces, {"config": config}, attachments=files)


@pytest.mark.parametrize(
    ("kind", "template", "end"),
    [
        ("bpe", "plain", "<|endoftext|>"),
        ("sentencepiece", "llama2", "</s>"),
        ("sentencepiece", "plain", "</s>"),
        ("tokenizer.json", "chatml", "<|im_end|>"),
        ("tokenizer.json", "harmony", "<|return|>"),
    ],
)
def test_the_template_and_the_ends_go_with_the_weights(
    tmp_path: Path, tokenizers: dict[str, Tokenizer], kind: str, template: str, end: str
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    tokenizer = tokenizers[kind]
    name = template if template in TEMPLATES else untagged(template)
    file = tmp_path / "t.jinja"
    file.write_text(name)
    chat = chat_format(template if template in TEMPLATES else str(file), tokenizer)
    token = tokenizer.special_tokens()[end]
    base: dict[str, Any] = {"eos_token_id": 2, "bos_token_id": 1}
    attached = {"generation_config.json": json.dumps({**base, "temperature": 0.5}).encode()}
    says(tmp_path / "run", tokenizer, token, name, attached)
    out = tmp_path / "hf"
    assert main(["convert-llama", "--load-dir", str(tmp_path / "run"), "--save-dir", str(out)]) == 0
    assert (out / "chat_template.jinja").read_text() == chat.source
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == chat.source
    asked = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked == list(chat.prompt(TALK))
    for file_name in ("generation_config.json", "config.json"):
        ends = json.loads((out / file_name).read_text())["eos_token_id"]
        assert chat.ends <= set(ends if isinstance(ends, list) else [ends]), file_name
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    made = model.generate(torch.tensor([asked]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert made[0].tolist() == [*asked, token], "it stops at the end of the turn"
    opened = open_model(out)
    assert opened.chat_template() == name and opened.stop_ids() >= chat.ends
    assert chat_format(str(out / "chat_template.jinja"), opened.tokenizer()).prompt(TALK) == tuple(asked)


def test_an_imported_model_says_of_itself_what_it_did(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    """There and back, no file is written anew."""
    says(tmp_path / "run", tokenizers["tokenizer.json"], 5, "chatml", {})
    first, run, second = (tmp_path / name for name in ("first", "own", "second"))
    for load, save in ((tmp_path / "run", first), (first, run), (run, second)):
        assert main(["convert-llama", "--load-dir", str(load), "--save-dir", str(save)]) == 0
    for path in first.iterdir():
        if path.suffix == ".json":
            assert json.loads((second / path.name).read_bytes()) == json.loads(path.read_bytes()), path.name
        elif path.suffix == ".jinja":
            assert (second / path.name).read_bytes() == path.read_bytes()
