"""BERT: the same weights in Hugging Face's models give the same logits, losses and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mega.core.architecture import inventory, units
from mega.core.batch import MaskedBatch
from mega.core.checkpoint.forms import bert
from mega.core.checkpoint.forms.bert import bert_name
from mega.core.checkpoint.forms.convert import convert
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.data.synthetic import masked_batch
from mega.core.model.bert import BertStage
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.region import ALONE
from mega.core.parallel.weight import ParameterFactory
from mega.core.training.wire import build_stages
from tests.model.test_transformers import gradients, load
from tests.support import hub_families as hub
from tests.support.ranks import CPU, random

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install '.[hf]' in a clone)"
)

VOCAB, LENGTH, ROWS = 97, 24, 4
SIZES: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "ffn": 56, "vocab": VOCAB, "vocab_multiple": 1}
THEIRS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
    "attn_implementation": "eager",
}


KINDS = {"post": "bert", "pre": "megatron-bert"}


def stage_of(dtype: str, **values: Any) -> BertStage:
    flags = {**SIZES, "family": "bert", "positions": 40, "seq_length": 40, "micro_batch": 1, "dtype": dtype}
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "norm_eps": 1e-12, "activation": "gelu", "device": "cpu"}
    (stage,) = build_stages(resolve(compose(flags={**flags, **off, **values}), 1), Mesh.at(0), CPU)
    return stage  # type: ignore[no-any-return]


def their_model(kind: str, stage: BertStage, **values: Any) -> Any:
    """With weights that are not constants anywhere, which `stage` is given too."""
    config = getattr(transformers, kind.split("For")[0] + "Config")(**{**THEIRS, **values})
    theirs = getattr(transformers, kind)(config).to(stage.dtype).train(False)
    theirs.bert.embeddings.word_embeddings.padding_idx = None  # token 0 is our mask, which learns
    with torch.no_grad():
        for number, parameter in enumerate(theirs.parameters()):
            parameter.add_(0.1 * random(*parameter.shape, seed=number).to(stage.dtype))
    load(stage, ours(stage, dict(theirs.named_parameters())))
    return theirs


def ours(stage: BertStage, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {
        tensor.name: bert_name(tensor.name, KINDS[stage.model.norm_placement]) for tensor in inventory(stage.model)
    }
    assert set(names.values()) == {name for name in theirs if not name.startswith("cls.predictions.decoder.")}
    return {mine: theirs[name].detach() for mine, name in names.items()}


def padded_rows() -> tuple[MaskedBatch, dict[str, torch.Tensor]]:
    """A batch, and what transformers takes of it."""
    model = resolve(compose("tiny-bert", flags={"vocab": VOCAB, "micro_batch": 1}), 1).model
    batch = masked_batch(model, LENGTH, torch.arange(ROWS), seed=3)
    seen = (torch.arange(LENGTH) < batch.lengths[:, None]).long()
    assert len(set(batch.lengths.tolist())) > 1
    return batch, {"input_ids": batch.tokens, "attention_mask": seen, "token_type_ids": batch.types}


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize(("kind", "placement"), [("BertForPreTraining", "post"), ("MegatronBertForPreTraining", "pre")])
def test_logits_losses_and_gradients_are_transformers(kind: str, placement: str, dtype: str) -> None:
    """Over rows of several lengths, of which one has no label: divided by masked tokens and by labelled rows."""
    bound = {"fp64": 1e-11, "fp32": 1e-5}[dtype]
    stage = stage_of(dtype, norm_placement=placement)
    theirs = their_model(kind, stage)
    batch, asked = padded_rows()
    found = theirs(**asked)
    logits, real = stage(batch, outputs=True).outputs, asked["attention_mask"].bool()
    assert logits is not None  # at padding they may be anything: it sees itself here, and every token there
    torch.testing.assert_close(logits[real].detach(), found.prediction_logits[real].detach(), rtol=bound, atol=bound)

    chosen = batch.loss_weights.bool()
    words = F.cross_entropy(found.prediction_logits[chosen], batch.labels[chosen])
    pairs = F.cross_entropy(found.seq_relationship_logits, batch.pairs, ignore_index=-1)
    out = stage(batch)
    assert int(out.terms["pair"].weight) == ROWS - 1
    means = {name: term.total / term.weight for name, term in out.terms.items()}
    torch.testing.assert_close(means["lm"], words, rtol=bound, atol=bound)
    torch.testing.assert_close(means["pair"], pairs, rtol=bound, atol=bound)
    guessed = found.seq_relationship_logits.argmax(-1) == batch.pairs
    assert int(out.metrics["pair_accuracy"].total) == int(guessed.sum())

    (words + pairs).backward()
    sum(means.values()).backward()  # type: ignore[union-attr]
    wanted = ours(stage, {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    for name, gradient in gradients(stage).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def test_each_loss_has_its_own_divisor() -> None:
    """What gradients are divided by is what is reported, also where ranks share rows: masked tokens, labelled rows."""
    stage, (batch, _) = stage_of("fp64"), padded_rows()
    parts = [batch.split(index, 2) for index in range(2)]
    for name, term in stage(batch).terms.items():
        assert (
            float(term.weight) == float(batch.weights[name].sum()) == sum(float(p.weights[name].sum()) for p in parts)
        )
    assert float(batch.weights["pair"].sum()) == ROWS - 1 != float(batch.weights["lm"].sum())


def test_classes_are_transformers() -> None:
    stage = stage_of("fp64", norm_placement="post", head="classification", classes=3)
    theirs = their_model("BertForSequenceClassification", stage, num_labels=3)
    batch, asked = padded_rows()
    found = stage(batch, outputs=True).outputs
    assert found is not None and found.shape == (ROWS, 3)
    logits = theirs(**asked).logits
    torch.testing.assert_close(found.detach(), logits.detach(), rtol=1e-11, atol=1e-11)
    term = stage(batch).terms["class"]
    torch.testing.assert_close(
        term.total / term.weight, F.cross_entropy(logits, batch.pairs, ignore_index=-1), rtol=1e-11, atol=1e-11
    )


def test_a_window_reaches_as_far_after_a_token_as_before_it() -> None:
    """Three blocks of 4 columns to either side: a token that changes is felt 9 columns away, and not 10."""
    stage = stage_of("fp64", window=4)
    batch = masked_batch(stage.model, 40, torch.arange(1), seed=3, ragged=False)
    found = []
    for token in (5, 6):
        batch.tokens[0, 20] = token
        found.append(stage(batch, outputs=True).outputs[0])
    felt = (found[0] - found[1]).abs().flatten(1).amax(1) > 0
    assert felt.nonzero().flatten().tolist() == list(range(20 - 9, 20 + 10))


@pytest.mark.parametrize("kind", ["RobertaForMaskedLM", "RobertaForSequenceClassification"])
def test_roberta_is_transformers(tmp_path: Path, kind: str) -> None:
    """From its folder, and into one again: positions begin after the padding's number, and there is one type."""
    values = {**THEIRS, "max_position_embeddings": 42, "type_vocab_size": 1, "pad_token_id": 1, "num_labels": 3}
    theirs = getattr(transformers, kind)(transformers.RobertaConfig(**values)).double().train(False)
    with torch.no_grad():
        for number, parameter in enumerate(theirs.parameters()):
            parameter.add_(0.1 * random(*parameter.shape, seed=number))
    theirs.save_pretrained(tmp_path / "hf")
    opened = hub.opened(tmp_path / "hf")
    assert (opened.model.positions, opened.model.position_offset, opened.model.token_types) == (40, 2, 1)
    stage = BertStage(opened.model, units(opened.model), ParameterFactory({}, torch.float64, CPU), ALONE)
    load(stage, hub.wholes(opened))
    batch, asked = padded_rows()
    asked["input_ids"] = torch.where(asked["attention_mask"].bool(), batch.tokens.clamp(min=2), 1)
    batch = replace(batch, tokens=asked["input_ids"])
    logits = theirs(input_ids=asked["input_ids"], attention_mask=asked["attention_mask"]).logits
    found, real = stage(batch, outputs=True).outputs, asked["attention_mask"].bool()
    assert found is not None
    if kind.endswith("MaskedLM"):
        found, logits = found[real], logits[real]
    torch.testing.assert_close(found[..., : logits.shape[-1]].detach(), logits.detach(), rtol=1e-11, atol=1e-11)
    convert(tmp_path / "hf", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert bert.config_from_model(opened.model, "float64")["model_type"] == "roberta"
