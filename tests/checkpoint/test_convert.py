"""Llama and its relatives from and to Hugging Face and Meta: byte for byte, strict, and nothing executed."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega.core.checkpoint.forms import foreign, huggingface, meta
from mega.core.checkpoint.forms.convert import check_pair, convert
from mega.core.checkpoint.forms.families.decoders import config_from_model, model_from_config
from mega.core.checkpoint.forms.form import FormOptions
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.layout import ONE, Layout
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.checkpoint.own.store import locate
from tests.support.hugging_face import FAMILIES, SIZES, hf_folder
from tests.support.shared import shared


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_there_and_back_is_byte_identical(tmp_path: Path, family: str, tp: int, pp: int) -> None:
    source = hf_folder(tmp_path / "hf", family, torch.bfloat16)
    report = convert(source, tmp_path / "run", layout=Layout(tp, pp))
    assert locate(tmp_path / "run").world == tp * pp
    convert(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert set(before) == set(after)
    assert report.elements == sum(tensor.numel() for tensor in before.values())
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    for name in ("config.json", "generation_config.json"):
        assert json.loads((source / name).read_text()) == json.loads((tmp_path / "back" / name).read_text())
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == b"pieces"


@pytest.mark.parametrize("family", FAMILIES)
def test_our_own_config_opens_in_transformers_and_computes_the_same(tmp_path: Path, family: str) -> None:
    """Without the config that came with the weights: what we write says the same to transformers."""
    transformers = pytest.importorskip("transformers")
    source = hf_folder(tmp_path / "hf", family)
    given = json.loads((source / "config.json").read_text())
    model = model_from_config(given, "config.json")
    convert(source, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back")
    (tmp_path / "back" / "config.json").write_text(json.dumps(config_from_model(model, "float32")))
    ids = torch.randint(0, 102, (2, 17), generator=torch.Generator().manual_seed(1))
    logits = []
    for folder in (source, tmp_path / "back"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.dtype == torch.float32
        with torch.no_grad():
            logits.append(loaded(ids).logits)
    assert torch.equal(*logits)


def test_linear_rope_scaling_both_ways(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", "llama2", rope_scaling={"rope_type": "linear", "factor": 4.0})
    model = model_from_config(json.loads((source / "config.json").read_text()), "config.json")
    assert model.rope_interpolation == 4.0
    assert model_from_config(config_from_model(model, "float32"), "config.json") == model


def test_llama3_rope_scaling_both_ways(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", "llama3.2")
    model = model_from_config(json.loads((source / "config.json").read_text()), "config.json")
    assert (model.rope_scaling, model.rope_scaling_factor, model.rope_original_positions) == ("llama3", 32.0, 32)
    assert model_from_config(config_from_model(model, "float32"), "config.json") == model


def test_gpt2_as_it_was_first_released(tmp_path: Path) -> None:
    """Names without a prefix, the causal mask among the weights, and mutations of what is fused."""
    source = hf_folder(tmp_path / "hf", "gpt2")
    state = {name.removeprefix("transformer."): t for name, t in load_file(source / "model.safetensors").items()}
    mask = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    save_file({**state, **mask}, source / "model.safetensors")
    convert(source, tmp_path / "run", layout=Layout(2, 2))
    convert(tmp_path / "run", tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(state[name.removeprefix("transformer.")], after[name]) for name in after)
    assert len(state) == len(after)
    for name in ("h.1.attn.c_attn.weight", "h.0.attn.c_attn.bias"):
        for changed in ({**state, name: state[name][..., :-1].contiguous()}, {n: state[n] for n in state if n != name}):
            save_file(changed, source / "model.safetensors")
            with pytest.raises(CheckpointError, match=name):
                convert(source, tmp_path / "x")
            assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("form", ["sharded", "bin", "sharded bin"])
def test_other_forms_of_the_same_weights(tmp_path: Path, form: str) -> None:
    source = hf_folder(tmp_path / "hf", "llama3")
    state = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(state)
    halves = [dict.fromkeys(names[::2]), dict.fromkeys(names[1::2])]
    ending = "bin" if "bin" in form else "safetensors"
    stem = "pytorch_model" if ending == "bin" else "model"
    files = [f"{stem}-0000{n}-of-00002.{ending}" for n in (1, 2)] if "sharded" in form else [f"{stem}.{ending}"]
    groups = halves if len(files) == 2 else [dict.fromkeys(names)]
    for file, group in zip(files, groups, strict=True):
        content = {name: state[name].clone() for name in group}
        if ending == "bin":
            torch.save(content, source / file)
        else:
            save_file(content, source / file)
    if len(files) == 2:
        weights = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        (source / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weights}))
    convert(source, tmp_path / "run", "mega", Layout(2, 1))
    convert(tmp_path / "run", tmp_path / "back", "hf")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(state[name], after[name]) for name in state)


def test_large_exports_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    source = hf_folder(tmp_path / "hf", "llama2")
    convert(source, tmp_path / "run")
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 30_000)
    convert(tmp_path / "run", tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (source, tmp_path / "back")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    convert(tmp_path / "back", tmp_path / "again", layout=Layout(1, 2))


def mutations() -> dict[str, Callable[[dict[str, torch.Tensor]], str]]:
    def drop(state: dict[str, torch.Tensor]) -> str:
        del state["model.layers.1.mlp.up_proj.weight"]
        return "model.layers.1.mlp.up_proj.weight"

    def rename(state: dict[str, torch.Tensor]) -> str:
        state["model.final_norm.weight"] = state.pop("model.norm.weight")
        return "model.norm.weight"

    def add(state: dict[str, torch.Tensor]) -> str:
        state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)
        return "model.layers.2.mlp.up_proj.weight"

    def reshape(state: dict[str, torch.Tensor]) -> str:
        state["lm_head.weight"] = state["lm_head.weight"][:-1].clone()
        return "lm_head.weight"

    def transpose(state: dict[str, torch.Tensor]) -> str:
        state["model.layers.0.mlp.down_proj.weight"] = state["model.layers.0.mlp.down_proj.weight"].T.contiguous()
        return "model.layers.0.mlp.down_proj.weight"

    def retype(state: dict[str, torch.Tensor]) -> str:
        state["model.norm.weight"] = state["model.norm.weight"].int()
        return "model.norm.weight"

    return {f.__name__: f for f in (drop, rename, add, reshape, transpose, retype)}


@pytest.mark.parametrize("name", mutations())
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_changed_source_is_refused_by_name(tmp_path: Path, name: str, ending: str) -> None:
    source = hf_folder(tmp_path / "hf", "llama2")
    state = load_file(source / "model.safetensors")
    culprit = mutations()[name](state)
    (source / "model.safetensors").unlink()
    if ending == "bin":
        torch.save(state, source / "pytorch_model.bin")
    else:
        save_file(state, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=culprit.replace(".", r"\.")):
        convert(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", "tied")
    state = load_file(source / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, source / "model.safetensors")
    convert(source, tmp_path / "run")
    state["lm_head.weight"][5, 5] += 1
    save_file(state, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight: differs"):
        convert(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mamba"),
        ("hidden_act", "gelu"),
        ("attention_bias", "yes"),
        ("rope_scaling", {"rope_type": "wave", "factor": 2.0}),
        ("num_hidden_layers", "2"),
        ("vocab_size", 0),
        ("rms_norm_eps", True),
    ],
)
def test_configs_without_a_counterpart(key: str, value: object) -> None:
    config = {**SIZES, "model_type": "llama", key: value}
    with pytest.raises(CheckpointError, match=r"config.json: " + ("rope_scaling: rope_type" if "rope" in key else key)):
        model_from_config(config, "config.json")


def test_refusals_of_the_verb(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", "llama2")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        convert(tmp_path, tmp_path / "x")
    with pytest.raises(ValueError, match="exactly one of the two must be mega"):
        check_pair(source, form_at(source), "meta")
    with pytest.raises(ValueError, match="--tp 3"):
        convert(source, tmp_path / "x", layout=Layout(3, 1))
    convert(source, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        convert(tmp_path / "run", tmp_path / "full")
    assert sorted(os.listdir(tmp_path)) == ["full", "hf", "run"]


# Meta


def test_what_meta_has_not_is_told_of_meta_and_of_the_checkpoint(tmp_path: Path) -> None:
    """Not of Hugging Face, by which Meta's models are understood, nor by flags, of which the verb has none for it."""
    for family, words in (
        ("gpt2", "position learned: Meta's Llama has only rope"),
        ("qwen2", "qkv_bias True: Meta's Llama has only"),
    ):
        run = convert(hf_folder(tmp_path / family, family), tmp_path / f"run-{family}").path.parent
        with pytest.raises(CheckpointError, match=f"^--load-dir {re.escape(str(run))}: {words}"):
            convert(run, tmp_path / "x", "meta")


def test_rotary_order_of_the_appendix() -> None:
    """Golden vector A.11: 2 heads of width 4."""
    assert [row for run in meta.rotary_rows(2, 4) for row in run] == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 11008), (5120, 13824), (8192, 28672), (4096, 14336), (64, 172)])
def test_feed_forward_widths(hidden: int, ffn: int) -> None:
    found = meta.feed_forward(hidden, ffn)
    width = int(found.get("ffn_dim_multiplier", 1) * int(8 * hidden / 3))
    assert -(-width // found["multiple_of"]) * found["multiple_of"] == ffn


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("family", ["llama2", "llama3", "llama3.2 of Meta", "tied"])
def test_meta_there_and_back(tmp_path: Path, family: str, parts: int) -> None:
    rope = {**FAMILIES["llama3.2"]["rope_parameters"], "original_max_position_embeddings": 8192}
    more = {"rope_parameters": rope, "max_position_embeddings": 131072} if "Meta" in family else {}
    source = hf_folder(tmp_path / "hf", family.partition(" ")[0], **more)
    convert(source, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "meta", "meta", parts=parts)
    assert len(list((tmp_path / "meta").glob("consolidated.*.pth"))) == parts
    convert(tmp_path / "meta", tmp_path / "run2", "mega", Layout(2, 2))
    convert(tmp_path / "run2", tmp_path / "back", "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    if more:
        assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"]["factor"] == 32.0
        params = json.loads((tmp_path / "meta" / "params.json").read_text())
        assert params.pop("rope_scaling_factor") == 32.0  # which Meta's own files of 3.2 do not say
        (tmp_path / "meta" / "params.json").write_text(json.dumps(params))
        assert meta.open_form(tmp_path / "meta", FormOptions(layout=ONE)).model.rope_scaling_factor == 32.0


def meta_logits(state: dict[str, torch.Tensor], params: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Llama in Meta's own convention, evaluated plainly in float64: rotation of neighbouring components."""
    heads, dim = params["n_heads"], params["dim"]
    kv_heads = params.get("n_kv_heads") or heads
    width, length = dim // heads, len(ids)
    weights = {name: tensor.double() for name, tensor in state.items()}
    frequencies = 1.0 / params.get("rope_theta", 10000.0) ** (torch.arange(0, width, 2).double() / width)
    turn = torch.polar(torch.ones(length, width // 2).double(), torch.outer(torch.arange(length).double(), frequencies))

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * weight

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(length, -1, width // 2, 2))
        return torch.view_as_real(pairs * turn[:, None]).reshape(length, -1, width)

    x = weights["tok_embeddings.weight"][ids]
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
    for layer in range(params["n_layers"]):
        w = {key.removeprefix(f"layers.{layer}."): value for key, value in weights.items()}
        y = norm(x, w["attention_norm.weight"])
        q, k, v = ((y @ w[f"attention.{name}.weight"].T).view(length, -1, width) for name in ("wq", "wk", "wv"))
        k, v = rotated(k).repeat_interleave(heads // kv_heads, 1), v.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / width**0.5 + mask
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, -1) @ w["attention.wo.weight"].T
        y = norm(x, w["ffn_norm.weight"])
        gate = torch.nn.functional.silu(y @ w["feed_forward.w1.weight"].T)
        x = x + (gate * (y @ w["feed_forward.w3.weight"].T)) @ w["feed_forward.w2.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


def test_a_real_meta_checkpoint_computes_the_same_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "meta"
    folder.mkdir()
    shutil.copy(shared("llama_meta_random/demo_rand_params.pth"), folder / "consolidated.00.pth")
    shutil.copy(shared("llama_meta_random/demo_config.json"), folder / "params.json")
    convert(folder, tmp_path / "run", layout=Layout(2, 1))
    convert(tmp_path / "run", tmp_path / "hf")
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)
    params = json.loads((folder / "params.json").read_text())
    ids = torch.randint(0, 512, (23,), generator=torch.Generator().manual_seed(2))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").double()
    with torch.no_grad():
        found = model(ids[None]).logits[0]
    assert (found - meta_logits(state, params, ids)).abs().max() < 1e-4


def test_the_trained_stories_model_passes_through_unchanged(tmp_path: Path) -> None:
    """Weights through mega and Meta's form and back: transformers still says the expected tokens."""
    transformers = pytest.importorskip("transformers")
    source = shared("stories260K_hf/config.json").parent
    convert(source, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "meta", "meta")
    convert(tmp_path / "meta", tmp_path / "run2", layout=Layout(4, 1))
    convert(tmp_path / "run2", tmp_path / "hf", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for case in json.loads((source / "expected.json").read_text())["cases"]:
        ids = torch.tensor([case["prompt_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        expected = torch.tensor(case["last_prompt_position_logits"])
        assert (logits - expected).abs().max() < 1e-4
        count = len(case["greedy_ids"])
        made = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert made[0, -count:].tolist() == case["greedy_ids"]


@pytest.mark.parametrize("change", ["drop", "reshape", "part", "replica", "vocab", "kind"])
def test_a_changed_meta_folder_is_refused(tmp_path: Path, change: str) -> None:
    source = hf_folder(tmp_path / "hf", "llama3")
    convert(source, tmp_path / "run")
    folder = tmp_path / "meta"
    convert(tmp_path / "run", folder, "meta", parts=2)
    path = folder / "consolidated.01.pth"
    state: dict[str, Any] = torch.load(path, weights_only=True)
    params = json.loads((folder / "params.json").read_text())
    words = r"1/layers\.1\.attention\.wk"
    if change == "drop":
        del state["layers.1.attention.wk.weight"]
    elif change == "reshape":
        state["layers.1.attention.wk.weight"] = torch.zeros(4, 32)
    elif change == "kind":
        state["layers.1.attention.wk.weight"] = 3
        words = "wk.weight' is int"
    elif change == "replica":
        state["norm.weight"][3] += 1
        words = "1/norm.weight: differs"
    elif change == "vocab":
        params["vocab_size"] = 100
        words = "vocab_size 100"
    torch.save(state, path)
    (folder / "params.json").write_text(json.dumps(params))
    if change == "part":
        (folder / "consolidated.00.pth").unlink()
        words = "parts"
    with pytest.raises(CheckpointError, match=words):
        convert(folder, tmp_path / "x")
    assert not (tmp_path / "x").exists()


# Hostile files


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch executed",))


@pytest.mark.parametrize("how", ["zip", "legacy", "raw", "raw of a newer protocol"])
def test_pickled_code_is_refused_and_named(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = hf_folder(tmp_path / "hf", "llama2")
    (source / "model.safetensors").unlink()
    path = source / "pytorch_model.bin"
    words = "it holds posix.system"
    if "raw" in how:
        path.write_bytes(pickle.dumps({"a": Bomb()}, protocol=4 if "newer" in how else 2))
        words = "not a pickle" if "newer" in how else words
    else:
        torch.save({"a": Bomb()}, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(CheckpointError, match=rf"pytorch_model.bin: {words}"):
        convert(source, tmp_path / "run")
    assert not (tmp_path / "executed").exists()


def header(fields: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        header(b"", length=2**63),
        header(b"{}", length=2**40),
        header(b"\xff"),
        header(b"[" * 100_000),
        header([]),
        header({"a": 3}),
        header({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, b"0000"),
        header({"a": {"dtype": "F32", "shape": [2**61, 2**61], "data_offsets": [0, 4]}}, b"0000"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"0000"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"0000"),
        header({"a": {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]}}, b"0000"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"00000000"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"00000000"),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"0000"),
        header(b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}'),
    ],
)
def test_hostile_safetensors_headers(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        foreign.read_header(path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b", "..", ".hidden", "a\0b", ""])
def test_an_index_may_not_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    source = hf_folder(tmp_path / "hf", "llama2")
    shutil.move(source / "model.safetensors", tmp_path / "secret.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        convert(source, tmp_path / "run")


def test_links_are_followed_only_within_a_hub_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "snapshots" / "abc"
    blobs = tmp_path / "cache" / "blobs"
    source = hf_folder(tmp_path / "hf", "llama2")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(source.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    convert(snapshot, tmp_path / "run")
    (source / "model.safetensors").rename(tmp_path / "elsewhere")
    (source / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside the folder"):
        convert(source, tmp_path / "run2")
