"""BERT's and T5's trees of Megatron-LM: there and back bitwise with Adam's state, and as written out by hand here."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.megatron import trees
from mega.core.checkpoint.forms.megatron.eras import parameter_place
from mega.core.checkpoint.own import inspect
from mega.core.checkpoint.own.layout import Layout
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import locate
from mega.core.config.sections import ModelConfig
from tests.checkpoint.megatron import test_state
from tests.checkpoint.megatron.test_trees import load
from tests.checkpoint.megatron.test_trees import own as own_weights
from tests.support import foreign_forms
from tests.support.foreign_forms import State, weights_of

GPT = dataclasses.replace(foreign_forms.GPT, vocab=53, vocab_multiple=8, positions=10)
BERT = dataclasses.replace(GPT, family="bert", layers=4)
T5 = dataclasses.replace(GPT, family="t5", layers=2, decoder_layers=6)
MODELS = {
    "bert": BERT,
    "bert-words": dataclasses.replace(BERT, binary_head=False),
    "bert-choice": dataclasses.replace(BERT, head="choice", classes=4, binary_head=True),
    "t5": T5,
}
STYLES = [("megatron-23.06", 1, 1), ("mcore", 2, 2), ("mcore-local", 1, 4)]
LAYERS = "layers.0."


@pytest.mark.parametrize(
    ("model", "style", "tp", "pp"),
    [
        *(("bert", style, tp, pp) for style, tp, pp in STYLES),
        *(("t5", style, tp, pp) for style, tp, pp in STYLES),
        ("bert-words", "megatron-23.06", 2, 2),
        ("bert-choice", "megatron", 1, 2),
    ],
)
def test_there_and_back_is_bitwise(tmp_path: Path, model: str, style: Any, tp: int, pp: int) -> None:
    convert(own_weights(tmp_path / "run", MODELS[model]), tmp_path / "tree", style, Layout(tp, pp))
    convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(1, 2), vocab=53)
    before, after = locate(tmp_path / "run"), locate(tmp_path / "back")
    assert list(inspect.diff(before, after)) == [] and set(before.tensors) == set(after.tensors)
    assert after.meta["config"]["model"] == before.meta["config"]["model"]


@pytest.mark.parametrize(
    ("model", "dtype", "style", "tp", "pp"),
    [
        ("bert", torch.bfloat16, "megatron", 2, 4),
        ("bert", torch.float32, "mcore-local", 2, 2),
        ("t5", torch.float32, "megatron", 2, 4),
        ("t5", torch.bfloat16, "mcore", 1, 1),
    ],
)
def test_state_there_and_back(tmp_path: Path, model: str, dtype: torch.dtype, style: str, tp: int, pp: int) -> None:
    run = test_state.own(tmp_path / "run", MODELS[model], dtype)
    convert(run, tmp_path / "tree", style, Layout(tp, pp))
    convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(), vocab=53)
    before, after = locate(run), locate(tmp_path / "back")
    assert list(inspect.diff(before, after)) == [] and set(before.tensors) == set(after.tensors)
    for key in ("progress", "updates", "schedule"):
        assert after.meta[key] == before.meta[key], key


def test_a_written_bert_is_what_the_reference_expects(tmp_path: Path) -> None:
    """Keys, shapes and rows of the last stage's second tensor rank; what a head has is next to the language model."""
    convert(own_weights(tmp_path / "run", BERT), tmp_path / "tree", "megatron", Layout(2, 2))
    content = load(tmp_path / "tree/iter_0000007/mp_rank_01_001/model_optim_rng.pt")
    w, model = weights_of(BERT), content["model"]
    assert set(model) == {"language_model", "word_embeddings_for_head", "lm_head", "binary_head"}
    assert set(model["language_model"]) == {"encoder", "pooler"}
    assert {name: tuple(each.shape) for name, each in model["lm_head"].items()} == {
        **{"bias": (32,), "dense.weight": (16, 16), "dense.bias": (16,), "norm.weight": (16,), "norm.bias": (16,)}
    }
    bias = w["lm_head.bias"]
    assert torch.equal(model["lm_head"]["bias"], torch.cat([bias[32:], bias[-1:].expand(11)]))
    assert torch.equal(model["language_model"]["pooler"]["dense.weight"], w["pooler.dense.weight"])
    assert torch.equal(model["binary_head"]["weight"], w["binary_head.weight"])
    assert "final_norm.bias" in model["language_model"]["encoder"]
    first = load(tmp_path / "tree/iter_0000007/mp_rank_00_000/model_optim_rng.pt")["model"]["language_model"]
    assert torch.equal(first["embedding"]["tokentype_embeddings"]["weight"], w["model.embed_types.weight"])
    assert content["args"].bert_binary_head and content["args"].padded_vocab_size == 64


def test_a_written_t5_is_what_the_reference_expects(tmp_path: Path) -> None:
    """The decoder's first stage holds the embeddings once more, and its norms have the places of Megatron's names."""
    convert(own_weights(tmp_path / "run", T5), tmp_path / "tree", "megatron", Layout(2, 4))
    w, files = weights_of(T5), "tree/iter_0000007/mp_rank_01_{:03d}/model_optim_rng.pt"
    stages = [load(tmp_path / files.format(stage)) for stage in range(4)]
    assert [set(stage["model"]["language_model"]) for stage in stages] == [
        {"embedding", "encoder"},
        {"embedding", "decoder"},
        {"decoder"},
        {"decoder"},
    ]
    assert stages[0]["args"].pipeline_model_parallel_split_rank == 1
    assert (stages[0]["args"].encoder_num_layers, stages[0]["args"].decoder_num_layers) == (2, 6)
    assert set(stages[3]["model"]) == {"language_model", "lm_head", "word_embeddings_for_head"}
    embedding = stages[1]["model"]["language_model"]["embedding"]
    assert torch.equal(embedding["position_embeddings"]["weight"], w["model.embed_positions.weight"])
    decoder = stages[1]["model"]["language_model"]["decoder"]
    ours = "model.decoder.layers.0."
    for theirs, name in (
        ("input_norm.weight", "input_layernorm.weight"),
        ("post_attention_norm.weight", "encoder_attn_layernorm.weight"),
        ("post_inter_attention_norm.weight", "post_attention_layernorm.weight"),
    ):
        assert torch.equal(decoder[LAYERS + theirs], w[ours + name])
    query, key, value = (w[f"{ours}encoder_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(decoder[LAYERS + "inter_attention.query.weight"], query[8:])
    heads = torch.stack([key.view(4, 4, 16), value.view(4, 4, 16)], 1)  # of each head k, then v
    assert torch.equal(decoder[LAYERS + "inter_attention.key_value.weight"], heads[2:].reshape(16, 16))
    row = w[f"{ours}encoder_attn.o_proj.weight"]
    assert torch.equal(decoder[LAYERS + "inter_attention.dense.weight"], row[:, 8:])
    convert(
        own_weights(tmp_path / "two", dataclasses.replace(T5, decoder_layers=2)), tmp_path / "b", "core", Layout(1, 2)
    )
    last = load(tmp_path / "b/iter_0000007/mp_rank_00_001/model_optim_rng.pt")["model"]
    assert {name for name in last if not name.startswith("decoder.layers")} == {
        *("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"),
        *("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "lm_head.output_layer.bias"),
        *("position_embeddings.weight", "output_layer.bias"),
    }
    assert {"pre_cross_attn_layernorm.weight", "cross_attention.linear_kv.bias", "mlp.linear_fc1.layer_norm_bias"} <= {
        name.removeprefix("decoder." + LAYERS) for name in last
    }


def released(folder: Path, w: State) -> None:
    """The released BERT-345M's form: names of 2019, all queries before all keys, no checkpoint_version."""
    language: dict[str, Any] = {
        "embedding": {
            "word_embeddings": {"weight": torch.cat([w["model.embed_tokens.weight"], torch.zeros(3, 16)])},
            "position_embeddings": {"weight": w["model.embed_positions.weight"]},
            "tokentype_embeddings": {"weight": w["model.embed_types.weight"]},
        },
        "transformer": foreign_forms.released_layers(BERT, w),
        "pooler": {f"dense.{kind}": w[f"pooler.dense.{kind}"] for kind in ("weight", "bias")},
    }
    heads = {"bias": torch.cat([w["lm_head.bias"], torch.zeros(3)])}
    for kind in ("weight", "bias"):
        heads |= {f"dense.{kind}": w[f"lm_head.dense.{kind}"], f"layernorm.{kind}": w[f"lm_head.norm.{kind}"]}
    binary = {kind: w[f"binary_head.{kind}"] for kind in ("weight", "bias")}
    model = {"language_model": language, "lm_head": heads, "binary_head": binary}
    (folder / "release/mp_rank_00").mkdir(parents=True)
    content = {"args": foreign_forms.released_arguments(BERT), "iteration": 500, "model": model}
    torch.save(content, folder / "release/mp_rank_00/model_optim_rng.pt")
    (folder / trees.TRACKER).write_text("release")


def test_the_released_bert(tmp_path: Path) -> None:
    released(tmp_path / "tree", weights_of(BERT))
    convert(tmp_path / "tree", tmp_path / "run", "mega", Layout(2, 2), vocab=53)
    own_weights(tmp_path / "expected", BERT)
    assert list(inspect.diff(locate(tmp_path / "expected"), locate(tmp_path / "run"))) == []


ORDER: dict[Any, str] = {
    # 23.06: its language model's embedding, stacks and pooler, then what the last stage adds
    ("bert", "legacy"): """
        embedding.word_embeddings.weight embedding.position_embeddings.weight embedding.tokentype_embeddings.weight
        encoder.layers.0.input_norm.weight encoder.layers.0.input_norm.bias encoder.layers.10.input_norm.weight
        encoder.final_norm.bias pooler.dense.weight pooler.dense.bias word_embeddings_for_head.weight
        lm_head.bias lm_head.dense.weight lm_head.dense.bias lm_head.norm.weight lm_head.norm.bias
        binary_head.weight binary_head.bias""",
    ("t5", "legacy"): """
        embedding.word_embeddings.weight embedding.position_embeddings.weight encoder.layers.1.mlp.dense_4h_to_h.bias
        encoder.final_norm.weight decoder.layers.0.input_norm.weight
        decoder.layers.0.self_attention.query_key_value.weight decoder.layers.0.self_attention.dense.weight
        decoder.layers.0.post_attention_norm.weight decoder.layers.0.inter_attention.query.weight
        decoder.layers.0.inter_attention.key_value.bias decoder.layers.0.inter_attention.dense.weight
        decoder.layers.0.post_inter_attention_norm.weight decoder.layers.0.mlp.dense_h_to_4h.weight
        decoder.final_norm.weight word_embeddings_for_head.weight lm_head.bias""",
    # named_parameters() of core 0.18.2's BertModel and T5Model
    ("bert", "core-local"): """
        embedding.word_embeddings.weight embedding.position_embeddings.weight embedding.tokentype_embeddings.weight
        encoder.layers.0.input_norm.weight encoder.layers.0.self_attention.dense.weight
        encoder.layers.0.self_attention.query_key_value.weight encoder.layers.0.post_attention_norm.weight
        encoder.final_norm.bias lm_head.dense.weight lm_head.norm.weight output_layer.weight lm_head.bias
        binary_head.weight pooler.dense.weight pooler.dense.bias""",
    ("t5", "core-local"): """
        decoder.layers.0.input_norm.weight decoder.layers.0.self_attention.dense.weight
        decoder.layers.0.self_attention.query_key_value.weight decoder.layers.0.post_attention_norm.weight
        decoder.layers.0.inter_attention.dense.weight decoder.layers.0.inter_attention.query.weight
        decoder.layers.0.inter_attention.key_value.weight decoder.layers.0.post_inter_attention_norm.weight
        decoder.layers.0.mlp.dense_h_to_4h.weight decoder.final_norm.weight output_layer.weight lm_head.bias""",
}


@pytest.mark.parametrize("model", ORDER, ids="-".join)
def test_parameters_are_in_the_order_of_megatrons_modules(model: Any) -> None:
    names = ORDER[model].split()
    assert sorted(reversed(names), key=partial(parameter_place, era=model[1])) == names


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_placement": "post"}, "--norm-placement post: --saver megatron has a BERT with pre only"),
        ({"head_activation": "gelu_tanh"}, "--head-activation gelu_tanh: "),
        ({"token_types": 3}, "--token-types 3: --saver megatron has a BERT with 2 only"),
        ({"head": "none"}, "--head none: --saver megatron has a BERT with a head"),
        ({"family": "t5", "decoder_layers": 2, "kv_heads": 2}, "--kv-heads 2: --saver megatron has a T5 with 4 only"),
        ({"window": 4}, "window 4: Megatron-LM has none"),
    ],
)
def test_what_megatron_does_not_have_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    model: ModelConfig = dataclasses.replace(BERT, **changes)
    with pytest.raises(CheckpointError, match=words):
        convert(own_weights(tmp_path / "run", model), tmp_path / "tree", "megatron", Layout())
    assert not (tmp_path / "tree").exists()


def test_stages_that_cannot_share_a_t5_are_refused(tmp_path: Path) -> None:
    words = "--pp 6: stages cannot share its 2 blocks of the encoder and 6 of the decoder"
    with pytest.raises(ValueError, match=words):
        convert(own_weights(tmp_path / "run", T5), tmp_path / "tree", "megatron", Layout(1, 6))
    convert(tmp_path / "run", tmp_path / "tree", "megatron", Layout())
    path = tmp_path / "tree/iter_0000007/mp_rank_00/model_optim_rng.pt"
    content = load(path)
    content["args"].decoder_num_layers = 5
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"args\.decoder_num_layers 5: the files hold 6 of its blocks"):
        convert(tmp_path / "tree", tmp_path / "back", "mega", Layout(), vocab=53)
