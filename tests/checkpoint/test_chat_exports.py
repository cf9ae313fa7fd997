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
from mega.core.device import Device
from mega.core.inference.loading.adapters import open_adapters
from mega.core.inference.loading.load import open_model
from mega.core.inference.options import EngineOptions
from mega.core.inference.request import Request, Sampling
from mega.core.inference.start import start_engine
from mega.core.parallel.mesh import Mesh
from mega.core.text.build import build
from mega.core.text.chat.format import chat_format
from mega.core.text.chat.templates import TEMPLATES
from mega.core.text.tokenizer import Tokenizer
from mega.core.text.train import train_bpe
from tests.inference.test_engine import answers, tokens
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


def small_base(place: Path) -> Path:
    """A Llama of Hugging Face's with weights as drawn, whose own end is </s>."""
    transformers = pytest.importorskip("transformers")
    place.mkdir()
    metaspace(place)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=len(transformers.AutoTokenizer.from_pretrained(place)), max_position_embeddings=128,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


def test_an_adapter_converses_in_peft(tmp_path: Path) -> None:
    """Trained on conversations and exported: transformers and peft answer as our engine does, to the turn's end. Five
    templates and whole and merged exports are in tests/battery/chat_exports.py."""
    peft = pytest.importorskip("peft", reason="peft is not installed; it judges an exported adapter")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    asked = {"What is the capital of France?": "Paris.", "Name a fruit": "Apple\nor pear"}
    talks, run, out = (tmp_path / name for name in ("talks.jsonl", "run", "peft"))
    talks.write_text("".join(json.dumps({"prompt": key, "completion": asked[key]}) + "\n" for key in asked))
    base, template = small_base(tmp_path / "base"), tmp_path / "gemma.jinja"
    template.write_text(untagged("gemma"))
    line = (
        f"finetune --load {base} --save {run} --save-interval 100 --chat-data {talks} --chat-template {template} "
        "--seq-length 64 --global-batch 2 --micro-batch 2 --eval-iters 0 --device cpu --lr-warmup-steps 5 "
        "--lora-rank 16 --lora-alpha 32 --steps 50 --lr 1e-2"
    )
    assert main(line.split()) == 0
    assert main(f"convert-llama --load-dir {run} --save-dir {out} --to peft --base {base}".split()) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    how = transformers.GenerationConfig.from_pretrained(out)
    tuned = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), out)
    opened = open_model(base)
    engine = start_engine(
        opened, Mesh(0), Device.choose("cpu"), EngineOptions(), adapters=open_adapters({"a": out}, opened)
    )
    chat = chat_format(str(out / "chat_template.jinja"), build(tokenizer="HuggingFaceTokenizer", tokenizer_model=out))
    assert (out / "chat_template.jinja").read_text() == template.read_text()
    for question, answer in {**asked, "Name a city": None}.items():
        talk = [{"role": "user", "content": question}]
        ids = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ids == list(chat.prompt(talk))
        made = tuned.generate(
            input_ids=torch.tensor([ids]), generation_config=how, max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        request = Request(
            prompt=tuple(ids), tokens=16, sampling=Sampling(temperature=0), stop_ids=chat.ends, adapter="a"
        )
        found = made[0].tolist()[len(ids) :]
        assert tokens(answers(engine, [request])[0]) == found, question
        if answer is not None:
            assert found[-1] in chat.ends and theirs.decode(found[:-1]) == answer, theirs.decode(found)
    assert engine is not None
    engine.close()
