"""Every kind of checkpoint that is read, written by hand: the same weights and the same model come out."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mega.cli import main
from mega.core.checkpoint.forms.companions import tokenizer_kind
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.own.inspect import diff
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import Box, CheckpointError
from mega.core.checkpoint.own.source import OwnSource
from mega.core.checkpoint.own.store import locate
from mega.core.inference.loading.load import load_tokenizer
from mega.core.proof.logits import logits
from tests.support.foreign_forms import FORMS, weights_of
from tests.support.shared import shared


@pytest.mark.parametrize("kind", FORMS)
def test_every_kind_gives_the_weights_that_went_in(tmp_path: Path, kind: str) -> None:
    form = FORMS[kind]
    load = form.make(tmp_path / "source")
    command = [form.verb, "--load-dir", str(load), "--save-dir", str(tmp_path / "run"), "--tp", "2", "--pp", "2"]
    assert main([*command, *form.options]) == 0
    checkpoint = locate(tmp_path / "run")
    assert model_of(checkpoint.meta, "run") == form.model
    source, expected = OwnSource(checkpoint), weights_of(form.model)
    assert set(source.tensors) == {f"weights/{name}" for name in expected}
    for name, tensor in expected.items():
        shape = tuple(tensor.shape)
        assert torch.equal(source.read(f"weights/{name}", Box((0,) * len(shape), shape)), tensor), name


def fairseq_logits(w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """fairseq's decoder, evaluated plainly in float64 on the whole tensors: ids [s] -> [s, vocab]."""
    w = {name: tensor.double() for name, tensor in w.items()}
    length, hidden, heads = len(ids), 16, 4

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (hidden,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["model.embed_tokens.weight"][ids] * math.sqrt(hidden)
    frequencies = torch.exp(torch.arange(hidden // 2).double() * -(math.log(10000) / (hidden // 2 - 1)))
    angles = (torch.arange(length).double() + 2)[:, None] * frequencies
    x = x + torch.cat([angles.sin(), angles.cos()], 1)
    mask = torch.full((length, length), float("-inf")).double().triu(1)
    for layer in range(2):
        stem = f"model.layers.{layer}"
        y = norm(x, f"{stem}.input_layernorm")
        q, k, v = (linear(y, f"{stem}.self_attn.{part}_proj").view(length, heads, -1) for part in "qkv")
        scores = torch.einsum("qhd,khd->hqk", q * (hidden // heads) ** -0.5, k) + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, hidden)
        x = x + linear(mixed, f"{stem}.self_attn.o_proj")
        y = F.gelu(linear(norm(x, f"{stem}.post_attention_layernorm"), f"{stem}.mlp.up_proj"))
        x = x + linear(y, f"{stem}.mlp.down_proj")
    return norm(x, "model.norm") @ w["model.embed_tokens.weight"].T


def test_fairseq_computes_what_its_architecture_says(tmp_path: Path) -> None:
    form = FORMS["fairseq"]
    assert main(["convert-llama", "--load-dir", str(form.make(tmp_path / "a")), "--save-dir", str(tmp_path / "b")]) == 0
    ids = torch.randint(0, 56, (12,), generator=torch.Generator().manual_seed(3))
    found = logits(locate(tmp_path / "b"), ids[None])[0]
    expected = fairseq_logits(weights_of(form.model), ids)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (tmp_path / "b" / "step-0000000" / "dict.txt").exists()


def test_llama2c_and_hugging_face_forms_of_the_trained_model_are_the_same(tmp_path: Path) -> None:
    """Weights byte for byte, and so the logits and tokens of expected.json."""
    for name, load in (("flat", "stories260K/stories260K.bin"), ("hf", "stories260K_hf/config.json")):
        path = shared(load)
        folder = path.parent if name == "hf" else path
        assert main(["convert-llama", "--load-dir", str(folder), "--save-dir", str(tmp_path / name)]) == 0
    flat, hf = locate(tmp_path / "flat"), locate(tmp_path / "hf")
    assert list(diff(flat, hf)) == []
    assert load_tokenizer(hf).kind == "Llama2Tokenizer"
    for case in json.loads(shared("stories260K_hf/expected.json").read_text())["cases"]:
        prompt, expected = case["prompt_ids"], case["greedy_ids"]
        found = logits(flat, torch.tensor([prompt + expected]))[0]
        assert (found[len(prompt) - 1] - torch.tensor(case["last_prompt_position_logits"])).abs().max() < 1e-4
        assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:20], "no llama2.c file"),
        (lambda data: data[:-4], "its sizes"),
        (lambda data: data + b"0000", "its sizes"),
        (lambda data: struct.pack("<i", -5) + data[4:], "dim -5"),
        (lambda data: data[:8] + struct.pack("<i", 1 << 29) + data[12:], "layers in a file"),
        (lambda data: data[:12] + struct.pack("<i", 3) + data[16:], "n_heads 3"),
        (lambda data: struct.pack("<Ii", 0x616B3432, 2) + data[8:], "version 2"),
    ],
)
def test_llama2c_files_that_do_not_fit(tmp_path: Path, change: Callable[[bytes], bytes], words: str) -> None:
    path = FORMS["llama2.c"].make(tmp_path / "source")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"model\.bin.*{words}"):
        convert(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decoder_learned_pos": True}, "decoder_learned_pos True"),
        ({"activation_fn": "relu"}, "activation_fn 'relu'"),
        ({"decoder_attention_heads": 3}, "decoder_attention_heads 3"),
        ({"decoder_layers": 3}, "the files hold 2"),
        ({"dropout": "0.1"}, "dropout '0.1'"),
    ],
)
def test_fairseq_options_without_a_counterpart(tmp_path: Path, options: dict[str, object], words: str) -> None:
    folder = FORMS["fairseq"].make(tmp_path / "source")
    for path in folder.glob("*.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, weights_only=True)
        vars(content["args"]).update(options)
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=words):
        convert(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"vocab.json": b"", "merges.txt": b"", "dict.txt": b""}, "FairseqTokenizer"),
        ({"vocab.json": b"", "merges.txt": b""}, "GPT2BPETokenizer"),
        ({"tokenizer.json": b"", "tokenizer.model": b""}, "HuggingFaceTokenizer"),
        ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "Llama3Tokenizer"),
        ({"tokenizer.model": b"\n\x0e\n\x05<unk>"}, "Llama2Tokenizer"),
        ({"config.json": b"{}"}, None),
    ],
)
def test_the_tokenizer_is_known_by_its_files(files: dict[str, bytes], kind: str | None) -> None:
    assert tokenizer_kind(files) == kind


@pytest.mark.parametrize(("kind", "file"), [("meta", "consolidated.0{}.pth"), ("fairseq", "model-model_part-{}.pt")])
def test_a_part_that_is_there_twice(tmp_path: Path, kind: str, file: str) -> None:
    """Its shapes fit, so it would be read as the rows of another tensor rank."""
    source = Path(shutil.copytree(Path(__file__).parents[1] / "golden" / kind, tmp_path / kind))
    shutil.copy(source / file.format(0), source / file.format(1))
    with pytest.raises(CheckpointError, match=f"{file.format(1)}: holds the same weights as the tensor rank before it"):
        convert(source, tmp_path / "back", "mega", Layout())
