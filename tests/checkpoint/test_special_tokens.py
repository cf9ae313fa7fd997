"""A Hugging Face export of one's own vocabulary: its special tokens are the tokenizer's, and generate stops at them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.architecture import inventory
from mega.core.checkpoint.forms.families.decoders import model_from_config
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.sections import ModelConfig
from mega.core.text.build import build
from mega.core.text.tokenizer import Tokenizer
from mega.core.text.train import train_bpe, train_sentencepiece
from tests.support.runs import small_run

LINES = ["The cat sat on the mat.", "def f(x):\n    return  x + 1", "\u00c4pfel, 12 and \u00e9  "] * 20

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt", {"kv_heads": 8}),
    "llama": ("llama", {}),
    "qwen2": ("llama", {"qkv_bias": True}),
    "qwen3": ("llama", {"qk_norm": True}),
    "mistral": ("llama", {}),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    vocab, merges = train_bpe(LINES, 300, folder / "bpe")
    model, _ = train_sentencepiece(LINES, 32, folder / "sp", normalization="nmt_nfkc")
    return {
        "bpe": build(tokenizer="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges),
        "sentencepiece": build(tokenizer="GPTSentencePieceTokenizer", tokenizer_model=model),
        "null": build(tokenizer="NullTokenizer", vocab_size=40),
    }


def small(family: str, vocab: int) -> ModelConfig:
    kind, values = MODELS[family]
    return small_run(kind, layers=1, dtype="fp32", vocab=vocab, vocab_multiple=1, **values).model


def says_eod(run: Path, model: ModelConfig, tokenizer: Tokenizer | None, more: dict[str, Path | bytes]) -> None:
    """A checkpoint of a model that answers anything with the end of the document: blocks that add nothing."""
    pieces = []
    for tensor in inventory(model):
        value = torch.zeros(tensor.shape)
        if "norm" in tensor.name:
            value += 1
        if tensor.name in ("model.embed_tokens.weight", "lm_head.weight"):
            value += 0.1
            value[-1 if tokenizer is None or tokenizer.eod is None else tokenizer.eod] = 1.0
        pieces.append(Piece(f"weights/{tensor.name}", tensor.shape, (0,) * len(tensor.shape), value))
    size = tokenizer.vocab_size - 1 if tokenizer is not None and not tokenizer.files() else None
    section = {"tokenizer": None if tokenizer is None else tokenizer.kind, "vocab_size": size}
    meta = {"config": {"model": dataclasses.asdict(model), "tokenizer": section}}
    files = {} if tokenizer is None else tokenizer.files()
    CheckpointStore(run).save(3, pieces, meta, attachments={**files, **more})


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gpt2", "bpe"), ("llama", "sentencepiece"), ("qwen2", "bpe"), ("qwen3", "null"), ("mistral", "bpe")],
)
def test_generate_stops_at_the_end_of_a_document(
    tmp_path: Path, tokenizers: dict[str, Tokenizer], family: str, kind: str
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers[kind]
    attached: dict[str, Path | bytes] = {}
    model = small(family, tokenizer.vocab_size)
    if family == "mistral":  # only weights that came from one are exported as one; this one says no special tokens
        config = {"model_type": "mistral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": tokenizer.vocab_size}
        config |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 16, "sliding_window": None}
        attached["config.json"] = json.dumps(config).encode()
        model = model_from_config(config, "config.json")
    says_eod(tmp_path / "run", model, tokenizer, attached)
    out = tmp_path / "hf"
    assert main(["convert-llama", "--load-dir", str(tmp_path / "run"), "--save-dir", str(out)]) == 0
    begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    config, generation = (
        transformers.AutoConfig.from_pretrained(out),
        transformers.GenerationConfig.from_pretrained(out),
    )
    assert config.model_type == family
    for found in (config, generation):
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (begin, tokenizer.eod, tokenizer.pad)
    made = transformers.AutoModelForCausalLM.from_pretrained(out).generate(
        torch.tensor([[3]]), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert made[0].tolist() == [3, tokenizer.eod]
    if kind == "bpe":
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        assert (len(theirs), theirs.eos_token_id) == (tokenizer.vocab_size, tokenizer.eod)
        if family != "qwen2":  # transformers cuts a qwen2's texts by rules of its own, whatever tokenizer.json says
            assert all(theirs(line)["input_ids"] == tokenizer.encode(line) for line in LINES[:3])


def test_an_unknown_tokenizer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No number is made up, neither by us nor by the defaults of transformers."""
    transformers = pytest.importorskip("transformers")
    says_eod(tmp_path / "run", small("gpt2", 40), None, {})
    assert main(["convert-llama", "--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "hf")]) == 0
    assert "names no token that ends a text, so transformers' generate does not stop" in capsys.readouterr().err
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
