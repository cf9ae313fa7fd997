"""Arguments of Megatron-core's trees that do not say what its model and optimizer are (found with Megatron-LM)."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.megatron.arguments import (
    arguments_of,
    model_from_arguments,
    tokenizer_of,
    unused_by_core,
)
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import locate
from tests.checkpoint.megatron.test_state import GPT, LLAMA, own
from tests.support.core_forms import whole_tensors, write_whole

Content = dict[str, Any]
FORMS = ("mcore-local", "torch_dist")


def changed(tree: Path, change: Callable[[Content], None]) -> Path:
    """A tree whose file of arguments is another, as Megatron writes it: it does not say which rows are tokens."""
    for file in (*tree.rglob("model_optim_rng.pt"), *tree.rglob("common.pt")):
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, weights_only=True)
        del content["args"].true_vocab_size
        change(content)
        torch.save(content, file)
    return tree


def saying(tree: Path, **values: Any) -> Path:
    return changed(tree, lambda content: content["args"].__dict__.update(values))


def model_of(tree: Path, to: Path) -> tuple[dict[str, Any], str]:
    notes = convert(tree, to, "mega").notes
    return locate(to).meta["config"]["model"], " ".join(notes)


UNUSED: list[tuple[str, Any, str, Any]] = [
    ("rotary_seq_len_interpolation_factor", 2, "rope_interpolation", 1.0),
    ("rope_scaling_factor", 4.0, "rope_scaling_factor", 8.0),
    ("openai_gelu", True, "activation", "gelu"),
    ("apply_residual_connection_post_layernorm", True, "post_norm_residual", False),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("argument", "value", "field", "used"), UNUSED)
def test_arguments_that_core_does_not_use(
    tmp_path: Path, form: str, argument: str, value: Any, field: str, used: Any
) -> None:
    """With Megatron-LM core_v0.18.2 its losses are those of a run without the flag, here too."""
    model = dataclasses.replace(GPT, activation="gelu", position="rope")
    convert(own(tmp_path / "run", model, torch.float32), tmp_path / "tree", form, Layout())
    tree = saying(tmp_path / "tree", use_rope_scaling=True, **{argument: value})
    said, notes = model_of(tree, tmp_path / "back")
    assert said[field] == used
    assert f"args.{argument} {value!r}: Megatron-core does not use it" in notes


def test_a_tree_of_ours_means_what_it_says(tmp_path: Path) -> None:
    model = dataclasses.replace(LLAMA, rope_scaling="llama3", rope_scaling_factor=32.0)
    notes = " ".join(convert(own(tmp_path / "run", model, torch.float32), tmp_path / "tree", "mcore").notes)
    assert "args.rope_scaling_factor 32.0: Megatron-core does not use it (up to 0.19): it computes as with 8.0" in notes
    said, notes = model_of(tmp_path / "tree", tmp_path / "back")
    assert said["rope_scaling_factor"] == 32.0 and "does not use it" not in notes
    assert unused_by_core(arguments_of(dataclasses.replace(LLAMA, rope_scaling="llama3"), 1, 1, core=True)) == ()


@pytest.mark.parametrize("form", FORMS)
def test_no_positions_of_core(tmp_path: Path, form: str) -> None:
    """Whose `add_position_embedding` is True by default."""
    model = dataclasses.replace(GPT, position="none")
    convert(own(tmp_path / "run", model, torch.float32), tmp_path / "tree", form, Layout())
    said, _ = model_of(saying(tmp_path / "tree", add_position_embedding=True), tmp_path / "back")
    assert said["position"] == "none"


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_norms_that_count_from_zero(tmp_path: Path, form: str) -> None:
    """--apply-layernorm-1p has another name among core's arguments."""
    run = own(tmp_path / "run", dataclasses.replace(GPT, norm_offset=True), torch.float32)
    convert(run, tmp_path / "tree", form, Layout())
    tree = changed(tmp_path / "tree", lambda content: content["args"].__dict__.pop("apply_layernorm_1p"))
    said, _ = model_of(tree, tmp_path / "back")
    assert said["norm_offset"] is True
    with pytest.raises(CheckpointError, match="layernorm_zero_centered_gamma with RMSNorm"):
        model_from_arguments({**arguments_of(LLAMA, 1, 1), "layernorm_zero_centered_gamma": True}, 64, "tree")


REFUSED: dict[str, tuple[Any, str]] = {
    "use_mup": (True, r"args\.use_mup True \(valid: False, None\)"),
    "glu_linear_offset": (1.0, r"args\.glu_linear_offset 1\.0"),
    "activation_func_clamp_value": (7.0, r"args\.activation_func_clamp_value 7\.0"),
    "optimizer": ("sgd", r"args\.optimizer 'sgd': only Adam's state is read; give --no-load-optim"),
    "apply_wd_to_qk_layernorm": (True, r"args\.apply_wd_to_qk_layernorm: .* do not decay; give --no-load-optim"),
    "decoupled_lr": (1e-3, r"args\.decoupled_lr: embedding and head .*; give --no-load-optim"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("argument", REFUSED)
def test_what_is_computed_otherwise_is_refused(tmp_path: Path, form: str, argument: str) -> None:
    convert(own(tmp_path / "run", LLAMA, torch.float32), tmp_path / "tree", form, Layout())
    value, words = REFUSED[argument]
    tree = saying(tmp_path / "tree", **{argument: value})
    with pytest.raises(CheckpointError, match=words):
        convert(tree, tmp_path / "back", "mega")
    if "--no-load-optim" in words:
        convert(tree, tmp_path / "back", "mega", optimizer=False)


def without_updates(content: Content) -> None:
    inner = content["optimizer"]["optimizer"]
    for group in inner["param_groups"]:
        del group["step"]
    inner.get("state", {}).clear()


@pytest.mark.parametrize("form", FORMS)
def test_a_state_without_updates_says_so(tmp_path: Path, form: str) -> None:
    convert(own(tmp_path / "run", LLAMA, torch.bfloat16), tmp_path / "tree", form, Layout())
    tree = changed(tmp_path / "tree", without_updates)
    with pytest.raises(CheckpointError, match=r"no update has been made yet .*; give --no-load-optim"):
        convert(tree, tmp_path / "back", "mega")


def test_the_form_that_core_saves_wrong_says_so(tmp_path: Path) -> None:
    """Fully reshardable, of buckets with padding: Megatron-LM core_v0.18.2 resumes it with other losses itself."""
    run = own(tmp_path / "run", LLAMA, torch.bfloat16)
    convert(run, tmp_path / "tree", "torch_dist", Layout(), distributed=True)
    folder = tmp_path / "tree" / "iter_0000007"
    tensors, others = whole_tensors(folder)
    name = "optimizer.state.param.embedding.word_embeddings.weight"
    write_whole(folder, {**tensors, name: tensors[name].roll(1)}, others)
    with pytest.raises(CheckpointError, match=r"it is not the weight, as core 0\.18 saves this form"):
        convert(tmp_path / "tree", tmp_path / "back", "mega")


def test_the_tokenizer_of_a_checkpoint_is_named() -> None:
    files = {"vocab_file": "a/vocab.txt", "merge_file": None, "tokenizer_model": 7}
    for kind, advice in (
        ("BertWordPieceTokenizer", "give these to the runs"),
        ("BertWordPieceCase", "give these to the runs"),
        ("TikTokenizer", "mega has no such type"),
    ):
        state, (note,) = tokenizer_of({"tokenizer_type": kind, **files})
        assert state == {"megatron_tokenizer": kind} and advice in note
        assert f"trained with --tokenizer-type {kind} --vocab-file a/vocab.txt;" in note
    assert tokenizer_of({"tokenizer_type": "NullTokenizer", **files}) == tokenizer_of({}) == ({}, ())
