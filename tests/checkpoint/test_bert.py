"""BERT from Hugging Face's form into ours and back: every tensor, its heads, and config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.cli import main
from mega.core.checkpoint.forms import bert
from mega.core.checkpoint.forms.bert import model_from_config
from mega.core.checkpoint.forms.huggingface import weights_of
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import locate
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from tests.support.shared import shared

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "type_vocab_size": 3,
}
RUN = {"vocab": 97, "micro_batch": 1, "steps": 1, "lr": 0.1}
KINDS = [
    # (class, head, binary_head, placement, more)
    ("BertForPreTraining", "lm", True, "post", {}),
    ("BertForMaskedLM", "lm", False, "post", {"hidden_act": "gelu_new"}),
    ("BertModel", "none", True, "post", {}),
    ("BertForSequenceClassification", "classification", True, "post", {"num_labels": 5}),
    ("MegatronBertForPreTraining", "lm", True, "pre", {}),
    ("MegatronBertForSequenceClassification", "classification", True, "pre", {}),
]


def there_and_back(folder: Path, tmp: Path, ranks: int = 2) -> tuple[Path, Any]:
    """The folder made of a checkpoint for ranks x ranks that was made of `folder`, and the checkpoint's model."""
    cut = ["--target-tensor-parallel-size", str(ranks), "--target-pipeline-parallel-size", str(ranks)]
    made = ["--load-dir", str(folder), "--save-dir", str(tmp / "own"), *cut]
    assert main(["convert-llama", *made]) == 0
    assert main(["convert-llama", "--load-dir", str(tmp / "own"), "--save-dir", str(tmp / "back"), "--verify"]) == 0
    return tmp / "back", model_of(locate(tmp / "own").meta, "own")


def check_same(folder: Path, back: Path) -> None:
    """All tensors bit for bit, but for buffers and what is there twice; the configuration as it was."""
    theirs, ours = (weights_of(each) for each in (folder, back))
    left_out = {name for name in theirs.tensors if "position_ids" in name or "predictions.decoder" in name}
    assert set(ours.tensors) == set(theirs.tensors) - left_out
    for name, (shape, dtype) in ours.tensors.items():
        assert theirs.tensors[name] == (shape, dtype)
    config, written = (json.loads((each / "config.json").read_text()) for each in (folder, back))
    assert written == config


@pytest.mark.parametrize(("kind", "head", "binary", "placement", "more"), KINDS, ids=[row[0] for row in KINDS])
def test_there_and_back(
    kind: str, head: str, binary: bool, placement: str, more: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind.split("For")[0].removesuffix("Model") + "Config")(**SIZES, **more)
    theirs = getattr(transformers, kind)(config)
    theirs.save_pretrained(tmp_path / "theirs")
    back, model = there_and_back(tmp_path / "theirs", tmp_path)
    assert (model.head, model.binary_head, model.norm_placement) == (head, binary, placement)
    check_same(tmp_path / "theirs", back)
    opened = getattr(transformers, kind).from_pretrained(back)
    for (name, mine), (_, other) in zip(opened.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon 1e-05: is not a known key"),
        ({"problem_type": "regression"}, "problem_type 'regression'"),
        ({"problem_type": "multi_label_classification"}, "problem_type"),
    ],
)
def test_a_key_that_is_not_understood_is_refused(changes: dict[str, Any], words: str) -> None:
    released = {"directionality": "bidi", "pooler_type": "first_token_transform", "num_labels": 2}
    config = {**SIZES, **released, "model_type": "bert", "problem_type": "single_label_classification"}
    model_from_config(config, "config.json")
    with pytest.raises(CheckpointError, match=words):
        model_from_config({**config, **changes}, "config.json")


def test_a_published_classifier_keeps_its_head(tmp_path: Path) -> None:
    """A torch file with buffers, 16 types of tokens, and a classifier besides the pooler."""
    folder = shared("bert_hf_random/config.json").parent
    back, model = there_and_back(folder, tmp_path, ranks=1)
    assert (model.head, model.classes, model.token_types, model.layers) == ("classification", 2, 16, 5)
    check_same(folder, back)


def test_a_config_of_our_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that was trained here has no config.json; one activation of it has no place in theirs."""
    run = "--model tiny-bert --vocab 97 --vocab-multiple 1 --mock-data --steps 1 --lr 1e-3 --micro-batch 2 --device cpu"
    saved = ["--save", str(tmp_path / "own"), "--save-interval", "1", "--eval-iters", "0", "--ops", "reference"]
    assert main(["pretrain", *run.split(), *saved]) == 0
    assert main(["convert-llama", "--load-dir", str(tmp_path / "own"), "--save-dir", str(tmp_path / "hf")]) == 0
    assert "head_activation gelu: Hugging Face's BERT has one activation" in capsys.readouterr().err
    assert main(["convert-llama", "--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "again")]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["MegatronBertForPreTraining"] and config["hidden_act"] == "gelu_new"
    ours, theirs = (locate(tmp_path / each).tensors for each in ("own", "again"))
    weights = {name: value for name, value in ours.items() if name.startswith("weights/")}
    assert weights == dict(theirs)
    refused = ["convert-llama", "--load-dir", str(tmp_path / "own"), "--save-dir", str(tmp_path / "x"), "--to", "meta"]
    assert main(refused) == 2


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_an_activation_that_theirs_does_not_have_is_refused(activation: str) -> None:
    run = resolve(compose("tiny-bert", flags={**RUN, "activation": activation}), 1)
    assert bert.losses(run.model) == ()
    with pytest.raises(CheckpointError, match=f"activation {activation}: Hugging Face's BERT has only"):
        bert.config_from_model(run.model, "float32")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("bert", ("bert.pooler.dense.weight", "cls.seq_relationship.weight")),
        ("bert", ("bert.encoder.layer.0.x", "classifier.weight")),
        ("bert", ("qa_outputs.weight",)),
        ("roberta", ("roberta.encoder.layer.0.x", "classifier.weight")),
    ],
)
def test_a_head_that_is_not_read_is_named(kind: str, names: tuple[str, ...]) -> None:
    """Of pairs alone, of each token, of spans."""
    config = {"model_type": kind, "architectures": ["ItsClass"], "pad_token_id": 1, **SIZES}
    with pytest.raises(CheckpointError, match="ItsClass: its head is not read; valid: ForPreTraining, ForMaskedLM"):
        model_from_config(config, "config.json", names)


@pytest.mark.parametrize("target", ["gguf", "meta"])
def test_a_model_that_is_no_decoder_is_refused_by_its_family(target: str) -> None:
    from mega.core.checkpoint.forms.gguf.families import metadata_of_model
    from mega.core.checkpoint.forms.meta import params_from_model

    for family in ("bert", "t5"):
        model = resolve(compose(f"tiny-{family}", flags=RUN), 1).model
        with pytest.raises(CheckpointError, match=f"family {family}: .* Llama is a left-to-right decoder"):
            (metadata_of_model if target == "gguf" else params_from_model)(model)
