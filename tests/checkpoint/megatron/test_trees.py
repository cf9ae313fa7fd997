"""Megatron-LM's trees: row orders, names of every time, any tensor and pipeline size, nothing executed."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega.cli import main
from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.megatron import trees
from mega.core.checkpoint.forms.megatron.arguments import vocabulary
from mega.core.checkpoint.own import inspect
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.store import CheckpointStore, locate
from mega.core.config.sections import ModelConfig
from tests.support import foreign_forms
from tests.support.foreign_forms import FORMS, weights_of

SHAPE: dict[str, Any] = {"layers": 4, "vocab": 53, "vocab_multiple": 8, "positions": 10}
GPT, LLAMA = (dataclasses.replace(model, **SHAPE) for model in (foreign_forms.GPT, foreign_forms.LLAMA))
MODELS = {"gpt": GPT, "llama": LLAMA}


def own(directory: Path, model: ModelConfig) -> Path:
    pieces = [
        Piece(f"weights/{name}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        for name, tensor in weights_of(model).items()
    ]
    meta = {"config": {"model": dataclasses.asdict(model)}, "progress": {"step": 7, "consumed": 28}}
    CheckpointStore(directory).save(7, pieces, meta)
    return directory


# Golden vectors, Appendix A.11: for each new row (per head q, k, v) the old row


def order(heads: int, width: int, version: int) -> list[int]:
    rows = {
        part: [row for run in trees.fused_rows(part, heads, heads, width, version) for row in run] for part in "qkv"
    }
    return [
        rows[part][head * width + component] for head in range(heads) for part in "qkv" for component in range(width)
    ]


def test_row_orders_of_the_appendix() -> None:
    assert order(2, 2, 0) == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert order(2, 2, 1) == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert order(2, 2, 2) == list(range(12))


def test_group_packing_of_the_appendix() -> None:
    """a 4, g 2, H 1: q0 q1 k0 v0 q2 q3 k1 v1."""
    names = [""] * 8
    for part in "qkv":
        rows = [row for run in trees.fused_rows(part, 4, 2, 1, 3) for row in run]
        for number, row in enumerate(rows):
            names[row] = f"{part}{number}"
    assert names == ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("style", ["megatron", "megatron-23.06", "mcore", "mcore-local"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (1, 4)])
def test_there_and_back_is_bitwise(tmp_path: Path, model: str, style: Any, tp: int, pp: int) -> None:
    convert(own(tmp_path / "run", MODELS[model]), tmp_path / "tree", style, Layout(tp, pp))
    assert (tmp_path / "tree" / trees.TRACKER).read_text() == "7"
    convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(1, 2), vocab=53)
    before, after = locate(tmp_path / "run"), locate(tmp_path / "back")
    assert list(inspect.diff(before, after)) == []
    assert after.step == 7 and after.meta["progress"] == {"step": 7, "consumed": 28}
    assert after.meta["config"]["model"] == before.meta["config"]["model"]


def test_tree_to_tree(tmp_path: Path) -> None:
    convert(own(tmp_path / "run", LLAMA), tmp_path / "a", "megatron", Layout(2, 1))
    convert(tmp_path / "a", tmp_path / "b", "mcore", Layout(1, 2), vocab=53)
    convert(tmp_path / "b", tmp_path / "back", "mega", Layout(), vocab=53)
    assert list(inspect.diff(locate(tmp_path / "run"), locate(tmp_path / "back"))) == []
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "back", "run"]


def load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def test_the_written_tree_is_what_the_reference_expects(tmp_path: Path) -> None:
    """Keys, shapes, row orders and padding of rank (tp 1, pp 1) of a Llama at tp 2, written out by hand."""
    convert(own(tmp_path / "run", LLAMA), tmp_path / "tree", "megatron", Layout(2, 1))
    content = load(tmp_path / "tree" / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt")
    assert content["checkpoint_version"] == 3.0 and content["iteration"] == 7
    assert content["args"].padded_vocab_size == 64 and content["args"].num_query_groups == 2
    assert content["args"].consumed_train_samples == 28
    w = weights_of(LLAMA)
    tree = content["model"]["language_model"]
    assert set(tree) == {"embedding", "encoder", "output_layer"}
    table = tree["embedding"]["word_embeddings"]["weight"]
    full = w["model.embed_tokens.weight"]
    assert torch.equal(table, torch.cat([full[32:], full[-1:].expand(11, 16)]))
    layer = {k.removeprefix("layers.2."): v for k, v in tree["encoder"].items() if k.startswith("layers.2.")}
    q, k, v = (w[f"model.layers.2.self_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(layer["self_attention.query_key_value.weight"], torch.cat([q[8:], k[4:], v[4:]]))
    gate, up = (w[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(layer["mlp.dense_h_to_4h.weight"], torch.cat([gate[12:], up[12:]]))
    assert torch.equal(layer["mlp.dense_4h_to_h.weight"], w["model.layers.2.mlp.down_proj.weight"][:, 12:])
    assert torch.equal(layer["input_norm.weight"], w["model.layers.2.input_layernorm.weight"])
    assert set(layer) == {
        "input_norm.weight",
        "self_attention.query_key_value.weight",
        "self_attention.dense.weight",
        "post_attention_norm.weight",
        "mlp.dense_h_to_4h.weight",
        "mlp.dense_4h_to_h.weight",
    }


def test_tied_embeddings_are_copied_to_the_last_stage(tmp_path: Path) -> None:
    convert(own(tmp_path / "run", GPT), tmp_path / "legacy", "megatron", Layout(1, 2))
    convert(tmp_path / "run", tmp_path / "core", "mcore", Layout(1, 2))
    last = load(tmp_path / "legacy/iter_0000007/mp_rank_00_001/model_optim_rng.pt")["model"]
    assert last["word_embeddings_for_head"]["weight"].shape == (56, 16)
    last = load(tmp_path / "core/iter_0000007/mp_rank_00_001/model_optim_rng.pt")["model"]
    assert last["output_layer.weight"].shape == (56, 16)
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_bias" in last


class Trees:
    """Hand-made trees in old forms."""

    @staticmethod
    def released(folder: Path, version: int | None) -> None:
        """GPT-345M's form: v1 names, flat row order, no checkpoint_version, not a zip file."""
        w = weights_of(GPT)
        embedding = {
            "word_embeddings": {"weight": torch.cat([w["model.embed_tokens.weight"], torch.zeros(3, 16)])},
            "position_embeddings": {"weight": w["model.embed_positions.weight"]},
        }
        content = {
            "args": foreign_forms.released_arguments(GPT),
            "iteration": 500,
            "model": {
                "language_model": {
                    "embedding": embedding,
                    "transformer": foreign_forms.released_layers(GPT, w, version),
                }
            },
            "rng_state": [{"np_rng_state": np.random.RandomState(0).get_state(), "torch_rng_state": torch.zeros(3)}],
        }
        if version is not None:
            content["checkpoint_version"] = float(version)
        (folder / "release" / "mp_rank_00").mkdir(parents=True)
        torch.save(
            content,
            folder / "release/mp_rank_00/model_optim_rng.pt",
            _use_new_zipfile_serialization=False,
        )
        (folder / trees.TRACKER).write_text("release")


@pytest.mark.parametrize("version", [None, 1])
def test_the_released_form(tmp_path: Path, version: int | None) -> None:
    Trees.released(tmp_path / "tree", version)
    convert(tmp_path / "tree", tmp_path / "run", "mega", Layout(2, 2), vocab=53)
    own(tmp_path / "expected", GPT)
    found = locate(tmp_path / "run")
    assert found.step == 500
    assert list(inspect.diff(locate(tmp_path / "expected"), found)) == []


def test_without_the_true_vocabulary_padding_stays_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sizes are named as far as anything knows them, straight into another tree too; no row is cut on a guess."""
    Trees.released(tmp_path / "tree", None)
    line = f"reshard --load-dir {tmp_path}/tree --save-dir {tmp_path}"
    assert main(f"{line}/run".split()) == 0
    assert locate(tmp_path / "run").tensors["weights/model.embed_tokens.weight"][0] == (56, 16)
    note = "vocabulary: all 56 rows are kept; how many of them are tokens, and how many padding, is not said"
    told = capsys.readouterr().out
    assert f"{note}; Megatron-LM's softmax counts padding" in told
    (tmp_path / "tree" / "vocab.json").write_text(json.dumps({str(piece): piece for piece in range(53)}))
    assert main(f"{line}/other --saver megatron".split()) == 0
    assert f"{note} ({tmp_path}/tree/vocab.json has 53 pieces); Mega" in capsys.readouterr().out
    assert main(f"{line}/cut --vocab-file {tmp_path}/tree/vocab.json".split()) == 0
    assert "53 of 56 rows are tokens, 3 of padding are left out" in capsys.readouterr().out
    assert locate(tmp_path / "cut").tensors["weights/model.embed_tokens.weight"][0] == (53, 16)


@pytest.mark.parametrize(
    ("values", "given", "known", "words"),
    [
        ({}, None, 64, r"all 64 rows are kept; .* is not said; .*; --true"),
        ({"vocab_size": 52}, None, 64, r"all 64 rows are kept; .*\(args\.vocab_size is 52\)"),
        ({"vocab_size": 64}, None, 64, None),  # a converted Llama
        ({"vocab_size": 64}, 60, 60, "60 of 64 rows are tokens, 4 of padding"),
        ({"vocab_size": 70, "true_vocab_size": "53"}, None, 64, "all 64 rows are kept"),
        ({"true_vocab_size": 53}, None, 53, "53 of 64 rows are tokens, 11 of padding"),
        ({"true_vocab_size": 53}, 53, 53, "53 of 64 rows are tokens, 11 of padding"),
        ({"true_vocab_size": 64}, None, 64, None),
        ({"true_vocab_size": 64}, 60, 60, "60 of 64 rows are tokens, 4 of padding"),  # made of a tree that did not say
        ({}, 64, 64, None),
        ({}, 65, None, "--true-vocab-size 65: the table of tokens has 64 rows"),
        ({"true_vocab_size": 53}, 52, None, r"--true-vocab-size 52: args\.true_vocab_size is 53"),
    ],
)
def test_the_vocabulary_is_known_or_kept(
    tmp_path: Path, values: dict[str, Any], given: int | None, known: int | None, words: str | None
) -> None:
    if known is None:
        with pytest.raises(ValueError, match=words):
            vocabulary(values, 64, given, tmp_path)
        return
    found, notes = vocabulary(values, 64, given, tmp_path)
    assert found == known and len(notes) == (words is not None)
    assert words is None or re.search(words, notes[0])


@pytest.mark.parametrize("content", ["[1]", "{", None])
def test_a_file_that_gives_no_hint_is_no_fault(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree" / "vocab.json"
    if content is None:
        (tmp_path / "elsewhere.json").write_text("{}")
        file.symlink_to(tmp_path / "elsewhere.json")
    else:
        file.write_text(content)
    found, (note,) = vocabulary({}, 64, None, tmp_path / "tree")
    assert found == 64 and "is not said; Mega" in note


def test_what_is_said_on_the_way_to_another_tree_is_said_once(tmp_path: Path) -> None:
    Trees.released(tmp_path / "tree", None)
    report = convert(tmp_path / "tree", tmp_path / "other", "megatron", Layout())
    assert len(report.notes) == len(set(report.notes)) == 4
    back = convert(tmp_path / "other", tmp_path / "run", "mega", Layout(), vocab=53)
    assert "53 of 56 rows" in back.notes[0]


def test_our_own_trees_say_how_many_tokens_they_have(tmp_path: Path) -> None:
    convert(own(tmp_path / "run", GPT), tmp_path / "tree", "megatron", Layout(2, 1))
    report = convert(tmp_path / "tree", tmp_path / "back", "mega", Layout())
    assert "53 of 64 rows" in report.notes[0]
    assert list(inspect.diff(locate(tmp_path / "run"), locate(tmp_path / "back"))) == []


@pytest.mark.parametrize("chunks", [2, 11])
def test_interleaved_chunks_are_put_in_order(tmp_path: Path, chunks: int) -> None:
    """pp 2 x 2 chunks from pp 4: stage s of 4 is chunk s // 2 of rank s % 2. Chunk 10 comes behind chunk 9, not 1."""
    count = 2 * chunks
    model = dataclasses.replace(LLAMA, layers=count)
    convert(own(tmp_path / "run", model), tmp_path / "tree", "megatron", Layout(1, count))
    whole = tmp_path / "tree" / "iter_0000007"
    stages = [load(whole / f"mp_rank_00_{s:03d}" / "model_optim_rng.pt") for s in range(count)]
    folder = tmp_path / "interleaved" / "iter_0000007"
    for rank in range(2):
        content = {key: value for key, value in stages[rank].items() if key != "model"}
        content |= {f"model{chunk}": stages[rank + 2 * chunk]["model"] for chunk in range(chunks)}
        (folder / f"mp_rank_00_{rank:03d}").mkdir(parents=True)
        torch.save(content, folder / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt")
    convert(folder, tmp_path / "back", "mega", Layout(), vocab=53)
    assert list(inspect.diff(locate(tmp_path / "run"), locate(tmp_path / "back"))) == []


def test_classes_of_the_original_are_inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An enum and a loss scaler of Megatron-LM, whose modules do not exist where the file is read."""
    convert(own(tmp_path / "run", LLAMA), tmp_path / "tree", "megatron", Layout())
    path = tmp_path / "tree/iter_0000007/mp_rank_00/model_optim_rng.pt"
    content = load(path)
    with monkeypatch.context() as patch:
        enums, scaler = types.ModuleType("megatron.core.enums"), types.ModuleType("megatron.fp16.loss_scaler")
        kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=enums.__name__)  # type: ignore[misc]
        vars(enums)["ModelType"] = kind
        vars(scaler)["LossScaler"] = type("LossScaler", (), {"__module__": scaler.__name__})
        for name in ("megatron", "megatron.core", "megatron.fp16"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, enums.__name__, enums)
        patch.setitem(sys.modules, scaler.__name__, scaler)
        content["args"].model_type = kind(1)
        content["optimizer"] = {"loss_scaler": scaler.LossScaler()}
        torch.save(content, path)
    convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(), vocab=53, optimizer=False)
    assert list(inspect.diff(locate(tmp_path / "run"), locate(tmp_path / "back"))) == []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch executed",))


@pytest.mark.parametrize("where", ["args", "model", "rng_state"])
def test_pickled_code_is_refused(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    convert(own(tmp_path / "run", LLAMA), tmp_path / "tree", "megatron", Layout())
    path = tmp_path / "tree/iter_0000007/mp_rank_00/model_optim_rng.pt"
    content = load(path)
    content[where] = Bomb()
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"posix.system"):
        convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(), vocab=53)
    assert not (tmp_path / "executed").exists() and not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("drop", "0.0.0/encoder.layers.1.mlp.dense_4h_to_h.weight: is missing"),
        ("add", "0.0.0/pooler.dense.weight .*nothing is made of it"),
        ("rows", "0.0.0/encoder.layers.1.self_attention.query_key_value.weight"),
        ("retype", "encoder.layers.1.mlp.dense_h_to_4h.weight: is torch.float16"),
        ("replica", "1.0.0/encoder.layers.1.input_norm.weight: differs"),
        ("layers", "args.num_layers 3"),
        ("version", "checkpoint_version 7"),
        ("rank", "of \\(tensor, pipeline\\) rank"),
        ("tracker", "says 'garbage'"),
        ("groups", "args.num_query_groups"),
        ("pairs", "args.rotary_interleaved True"),
        ("alibi", "args.position_embedding_type 'alibi'"),
    ],
)
def test_a_changed_tree_is_refused_by_name(tmp_path: Path, change: str, words: str) -> None:
    convert(own(tmp_path / "run", LLAMA), tmp_path / "tree", "megatron", Layout(2, 1))
    folder = tmp_path / "tree/iter_0000007"
    for rank in range(2):
        path = folder / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        content = load(path)
        encoder, layer = content["model"]["language_model"]["encoder"], "layers.1."
        if change == "drop":
            del encoder[layer + "mlp.dense_4h_to_h.weight"]
        elif change == "add":
            content["model"]["language_model"]["pooler"] = {"dense.weight": torch.zeros(3)}
        elif change == "rows":
            fused = encoder[layer + "self_attention.query_key_value.weight"]
            encoder[layer + "self_attention.query_key_value.weight"] = torch.cat([fused, fused[:1]])
        elif change == "retype" and rank == 0:
            encoder[layer + "mlp.dense_h_to_4h.weight"] = encoder[layer + "mlp.dense_h_to_4h.weight"].half()
        elif change == "replica" and rank == 1:
            encoder[layer + "input_norm.weight"] += 1
        elif change == "layers":
            content["args"].num_layers = 3
        elif change == "version":
            content["checkpoint_version"] = 7
        elif change == "groups":
            content["args"].num_query_groups = "2"
        elif change == "pairs":
            content["args"].rotary_interleaved = True
        elif change == "alibi":
            content["args"].position_embedding_type = "alibi"
        torch.save(content, path)
    if change == "rank":
        os.rename(folder / "mp_rank_00", folder / "mp_rank_05")
    if change == "tracker":
        (tmp_path / "tree" / trees.TRACKER).write_text("garbage")
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(), vocab=53)
    assert not (tmp_path / "back").exists()


def test_the_command_line_of_the_2023_tool(tmp_path: Path) -> None:
    """With every flag that it had; and straight from Hugging Face into a tree, as its loader llama2_hf did."""
    convert(own(tmp_path / "run", GPT), tmp_path / "a", "megatron", Layout())
    (tmp_path / "vocab.json").write_text(json.dumps({str(piece): piece for piece in range(53)}))
    flags = "--model-type GPT --loader megatron --saver megatron --max-queue-size 10 --no-checking --megatron-path ."
    layout = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    command = f"reshard {flags} {layout} --load-dir {tmp_path}/a --save-dir {tmp_path}/b".split()
    assert main([*command, "--vocab-file", str(tmp_path / "vocab.json")]) == 0
    assert len(list((tmp_path / "b/iter_0000007").glob("mp_rank_0?_00?"))) == 4
    convert(tmp_path / "b", tmp_path / "back", "mega", Layout(), vocab=53)
    assert list(inspect.diff(locate(tmp_path / "run"), locate(tmp_path / "back"))) == []

    source = FORMS["hf"].make(tmp_path / "hf")
    llama = "reshard --model-type GPT --loader llama2_hf --saver megatron --tokenizer-model x --tp 2"
    assert main([*llama.split(), "--load-dir", str(source), "--save-dir", str(tmp_path / "tree")]) == 0
    wanted = ["--true-vocab-size", "56"]
    assert main(["reshard", "--load-dir", str(tmp_path / "tree"), "--save-dir", str(tmp_path / "own"), *wanted]) == 0
    assert main(["convert-llama", "--load-dir", str(source), "--save-dir", str(tmp_path / "own2")]) == 0
    assert list(inspect.diff(locate(tmp_path / "own"), locate(tmp_path / "own2"))) == []
