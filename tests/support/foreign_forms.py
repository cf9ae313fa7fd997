"""Tiny checkpoints of every kind that is read, written out by hand from one set of random weights.

A second opinion on every format: nothing here uses the converters. `content` gives the tensors of each file under the
format's own names, `write` makes the files; between the two a test may change what it likes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mega.core.architecture import inventory
from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.store import CheckpointStore
from mega.core.config.sections import ModelConfig

State = dict[str, torch.Tensor]
Files = dict[str, State]
"""File -> its tensors by the names that the format gives them."""

GPT = ModelConfig(
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=4,
    head_dim=4,
    ffn=24,
    vocab=56,
    positions=12,
    qkv_bias=True,
)
LLAMA = dataclasses.replace(
    GPT,
    family="llama",
    kv_heads=2,
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    qkv_bias=False,
    tied=False,
    position="rope",
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
QWEN2 = dataclasses.replace(LLAMA, qkv_bias=True)
SMALL = dataclasses.replace(
    LLAMA, tied=True, rope_scaling="llama3", rope_scaling_factor=32.0, rope_original_positions=6
)
FAIRSEQ = dataclasses.replace(GPT, position="sinusoidal", position_offset=2, embedding_scale=True, activation="gelu")


def weights_of(model: ModelConfig) -> State:
    """Random fp32 values for every logical tensor."""
    generator = torch.Generator().manual_seed(7)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in inventory(model)}


@dataclass(frozen=True)
class Form:
    """One kind of checkpoint. `path` is what --load-dir names within the folder, `verb` which command reads it."""

    model: ModelConfig
    content: Callable[[State], Files]
    write: Callable[[Path, Files], None]
    verb: str = "convert-llama"
    path: str = "."
    options: tuple[str, ...] = ()

    def make(self, folder: Path, change: Callable[[Files], Any] = lambda files: None) -> Path:
        """Write the checkpoint, changed as wanted, into a new `folder`; what --load-dir should be."""
        files = self.content(weights_of(self.model))
        change(files)
        folder.mkdir(parents=True)
        self.write(folder, files)
        return folder / self.path


def layer_of(name: str) -> tuple[str, str]:
    """("3", "mlp.up_proj.weight") of model.layers.3.mlp.up_proj.weight; ("", name) outside the blocks."""
    if not name.startswith("model.layers."):
        return "", name
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return number, rest


# Hugging Face --------------------------------------------------------------------------------------------------


def hf_config(model: ModelConfig, model_type: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
    }
    if model.rope_scaling == "llama3":
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": model.rope_original_positions,
        }
    return config


def hf_writer(config: Mapping[str, Any]) -> Callable[[Path, Files], None]:
    def write(folder: Path, files: Files) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        for name, state in files.items():
            save = torch.save if name.endswith(".bin") else save_file
            save({key: tensor.contiguous() for key, tensor in state.items()}, folder / name)
        if len(files) > 1:
            index = {"weight_map": {key: name for name, state in files.items() for key in state}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


def two_files(weights: State) -> Files:
    names = sorted(weights)
    return {f"model-0000{n + 1}-of-00002.safetensors": {name: weights[name] for name in names[n::2]} for n in range(2)}


GPT2 = {
    "model.embed_tokens": "wte",
    "model.embed_positions": "wpe",
    "model.norm": "ln_f",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def gpt2(weights: State) -> Files:
    state: State = {}
    for name, tensor in weights.items():
        number, rest = layer_of(name)
        module, _, kind = rest.rpartition(".")
        stem = f"transformer.h.{number}." if number else "transformer."
        if "self_attn.q_proj" in module:
            fused = torch.cat([weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            state[f"{stem}attn.c_attn.{kind}"] = fused.T if fused.dim() == 2 else fused
        elif module in GPT2:
            turned = number and tensor.dim() == 2
            state[f"{stem}{GPT2[module]}.{kind}"] = tensor.T if turned else tensor
    return {"model.safetensors": state}


GPT2_CONFIG = {
    "model_type": "gpt2",
    "n_embd": GPT.hidden,
    "n_layer": GPT.layers,
    "n_head": GPT.heads,
    "n_inner": GPT.ffn,
    "n_positions": GPT.positions,
    "vocab_size": GPT.vocab,
}

# Meta and llama2.c ---------------------------------------------------------------------------------------------

META = {
    "model.embed_tokens": ("tok_embeddings", 1),
    "model.norm": ("norm", None),
    "lm_head": ("output", 0),
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.up_proj": ("feed_forward.w3", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
}


def neighbours(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of heads whose halves turn together, as rows whose neighbours do."""
    return tensor.view(-1, 2, width // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def meta_parts(weights: State, parts: int) -> list[State]:
    made: list[State] = [{} for _ in range(parts)]
    for name, tensor in weights.items():
        number, rest = layer_of(name)
        theirs, dim = META[rest.removesuffix(".weight")]
        if "q_proj" in rest or "k_proj" in rest:
            tensor = neighbours(tensor, 4)
        stem = f"layers.{number}." if number else ""
        for part in range(parts):
            own = tensor if dim is None else tensor.chunk(parts, dim)[part]
            made[part][f"{stem}{theirs}.weight"] = own.clone()
    return made


def meta(weights: State) -> Files:
    return {f"consolidated.0{number}.pth": state for number, state in enumerate(meta_parts(weights, 2))}


PARAMS = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "vocab_size": 56}


def write_meta(folder: Path, files: Files) -> None:
    (folder / "params.json").write_text(json.dumps(PARAMS))
    for name, state in files.items():
        torch.save(state, folder / name)


def llama2c(order: str) -> Callable[[State], Files]:
    """The tensors in the order of the file; norms first in version 1, in which `order` is "norms"."""
    kinds = ["attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn_norm"]
    kinds += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]

    def content(weights: State) -> Files:
        (state,) = meta_parts(weights, 1)
        blocks = [f"layers.{layer}.{kind}.weight" for kind in kinds for layer in range(2)]
        if order == "norms":
            norms = [name for name in blocks if "norm" in name]
            names = [*norms, "norm.weight", "tok_embeddings.weight", *(name for name in blocks if name not in norms)]
        else:
            names = ["tok_embeddings.weight", *blocks, "norm.weight", "tables"]
            state["tables"] = torch.zeros(2, 12, 2)
        names += ["output.weight"] * ("output.weight" in state)
        return {"model.bin": {name: state[name] for name in names}}

    return content


def llama2c_writer(version: int, model: ModelConfig) -> Callable[[Path, Files], None]:
    def write(folder: Path, files: Files) -> None:
        vocab = 56 if model.tied or version else -56
        head = struct.pack("<7i", 16, 24, 2, 4, 2, vocab, 12)
        if version:
            head = (struct.pack("<Ii", 0x616B3432, version) + head + bytes([model.tied])).ljust(256, b"\0")
        flat = (tensor.flatten().view(torch.uint8) for tensor in files["model.bin"].values())
        body = b"".join(tensor.numpy().tobytes() for tensor in flat)
        (folder / "model.bin").write_bytes(head + body)

    return write


def llama2c_training(weights: State) -> Files:
    (state,) = meta_parts(weights, 1)
    state["output.weight"] = state["tok_embeddings.weight"]
    return {"ckpt.pt": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}}


def write_llama2c_training(folder: Path, files: Files) -> None:
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 56, "max_seq_len": 12}
    content = {"model": files["ckpt.pt"], "model_args": sizes, "iter_num": 3, "best_val_loss": torch.tensor(1.0)}
    torch.save(content, folder / "ckpt.pt")


# Megatron-LM ---------------------------------------------------------------------------------------------------

LEGACY = {
    "model.embed_tokens": ("embedding.word_embeddings", 0),
    "model.embed_positions": ("embedding.position_embeddings", None),
    "model.norm": ("encoder.final_norm", None),
    "lm_head": ("output_layer", 0),
    "input_layernorm": ("input_norm", None),
    "self_attn.o_proj": ("self_attention.dense", 1),
    "post_attention_layernorm": ("post_attention_norm", None),
    "mlp.up_proj": ("mlp.dense_h_to_4h", 0),
    "mlp.down_proj": ("mlp.dense_4h_to_h", 1),
}
CORE = {
    "embedding.word_embeddings": "embedding.word_embeddings",
    "embedding.position_embeddings": "embedding.position_embeddings",
    "encoder.final_norm": "decoder.final_layernorm",
    "output_layer": "output_layer",
    "input_norm": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_norm": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


def megatron_rank(model: ModelConfig, weights: State, tp: int, rank: int, blocks: range, ends: str) -> State:
    """One rank's tensors by legacy names. ends: "first", "last" or both words, for what lies outside the blocks."""
    assert model.heads and model.kv_heads
    state: State = {}
    share = model.kv_heads // tp
    for name, tensor in weights.items():
        number, rest = layer_of(name)
        module, _, kind = rest.rpartition(".")
        stem = f"encoder.layers.{int(number) - blocks.start}." if number else ""
        if number and int(number) not in blocks:
            continue
        if not number and ("first" if "embed" in module else "last") not in ends:
            continue
        if "self_attn.q_proj" in module:
            q, k, v = (weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv")
            groups = zip(q.chunk(model.kv_heads), k.chunk(model.kv_heads), v.chunk(model.kv_heads), strict=True)
            fused = [torch.cat(group) for group in groups][rank * share : (rank + 1) * share]
            state[f"{stem}self_attention.query_key_value.{kind}"] = torch.cat(fused)
        elif "mlp.gate_proj" in module:
            up = weights[name.replace("gate", "up")]
            halves = [part.chunk(tp)[rank] for part in (tensor, up)]
            state[f"{stem}mlp.dense_h_to_4h.{kind}"] = torch.cat(halves)
        elif module in LEGACY and not ("up_proj" in module and model.activation == "swiglu"):
            theirs, dim = LEGACY[module]
            cut = dim is not None and not (dim == 1 and tensor.dim() == 1)
            state[f"{stem}{theirs}.{kind}"] = tensor.chunk(tp, dim or 0)[rank].clone() if cut else tensor.clone()
    if model.tied and "last" in ends and "first" not in ends:
        state["word_embeddings_for_head.weight"] = weights["model.embed_tokens.weight"].chunk(tp)[rank].clone()
    return state


def core_name(name: str) -> str:
    for legacy, core in CORE.items():
        if f"{legacy}." in name:
            name = name.replace(f"{legacy}.", f"{core}." if not core.endswith("_") else core)
            break
    return name.replace("encoder.layers", "decoder.layers")


def arguments(model: ModelConfig, tp: int, pp: int) -> argparse.Namespace:
    return argparse.Namespace(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        kv_channels=model.head_dim,
        group_query_attention=model.kv_heads != model.heads,
        num_query_groups=model.kv_heads,
        max_position_embeddings=model.positions,
        position_embedding_type="rope" if model.position == "rope" else "learned_absolute",
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        swiglu=model.activation == "swiglu",
        add_bias_linear=model.bias,
        untie_embeddings_and_output_weights=not model.tied,
        make_vocab_size_divisible_by=model.vocab_multiple,
        padded_vocab_size=model.vocab,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        consumed_train_samples=28,
    )


def legacy(weights: State) -> Files:
    return {
        f"iter_0000007/mp_rank_{rank:02d}_{stage:03d}/model_optim_rng.pt": megatron_rank(
            GPT, weights, 2, rank, range(stage, stage + 1), ("first", "last")[stage]
        )
        for rank in range(2)
        for stage in range(2)
    }


def write_legacy(folder: Path, files: Files) -> None:
    for name, state in files.items():
        tree: dict[str, Any] = {}
        for key, tensor in state.items():
            branch = tree if key.startswith("word_embeddings_for") else tree.setdefault("language_model", {})
            if not key.startswith("word_embeddings_for"):
                first, _, key = key.partition(".")
                branch = branch.setdefault(first, {})
            if not key.startswith(("layers.", "final_")) and "." in key:
                first, _, key = key.rpartition(".")
                branch = branch.setdefault(first, {})
            branch[key] = tensor
        _save_megatron(folder / name, tree, GPT, 2, 2)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def _save_megatron(path: Path, tree: dict[str, Any], model: ModelConfig, tp: int, pp: int) -> None:
    path.parent.mkdir(parents=True)
    content = {"args": arguments(model, tp, pp), "checkpoint_version": 3.0, "iteration": 7, "model": tree}
    torch.save(content, path)


def core(weights: State) -> Files:
    made = {}
    for rank in range(2):
        state = megatron_rank(LLAMA, weights, 2, rank, range(2), "first last")
        made[f"iter_0000007/mp_rank_{rank:02d}/model_optim_rng.pt"] = {core_name(key): t for key, t in state.items()}
    return made


def write_core(folder: Path, files: Files) -> None:
    for name, state in files.items():
        _save_megatron(folder / name, dict(state), LLAMA, 2, 1)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def released(weights: State) -> Files:
    """The archive of GPT-345M: names of 2019, all queries before all keys before all values."""
    state = megatron_rank(GPT, weights, 1, 0, range(2), "first last")
    made: State = {}
    for key, tensor in state.items():
        if "query_key_value" in key:
            tensor = tensor.unflatten(0, (4, 3, 4)).transpose(0, 1).flatten(0, 2).contiguous()
        old = key.replace("encoder.", "transformer.").replace("self_attention.", "attention.")
        made[old.replace("_norm.", "_layernorm.")] = tensor
    return {"release/mp_rank_00/model_optim_rng.pt": made}


def released_arguments(model: ModelConfig) -> argparse.Namespace:
    """All that the arguments of 2019 say of a model."""
    return argparse.Namespace(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        max_position_embeddings=model.positions,
        ffn_hidden_size=model.ffn,
        make_vocab_size_divisible_by=model.vocab_multiple,
    )


def released_layers(model: ModelConfig, weights: State, version: int | None = None) -> State:
    """The blocks and the last norm by the names of 2019: all queries before all keys before all values, but by turns in
    version 1."""
    assert model.layers is not None
    made: State = {}
    for layer in range(model.layers):
        for kind in ("weight", "bias"):
            ours, theirs = f"model.layers.{layer}.", f"layers.{layer}."
            parts = [weights[f"{ours}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            fused = torch.stack(parts, 1).flatten(0, 1) if version == 1 else torch.cat(parts)
            made[f"{theirs}attention.query_key_value.{kind}"] = fused
            for old, new in (
                ("input_layernorm", "input_layernorm"),
                ("attention.dense", "self_attn.o_proj"),
                ("post_attention_layernorm", "post_attention_layernorm"),
                ("mlp.dense_h_to_4h", "mlp.up_proj"),
                ("mlp.dense_4h_to_h", "mlp.down_proj"),
            ):
                made[f"{theirs}{old}.{kind}"] = weights[f"{ours}{new}.{kind}"]
    return made | {f"final_layernorm.{kind}": weights[f"model.norm.{kind}"] for kind in ("weight", "bias")}


def write_released(folder: Path, files: Files) -> None:
    for name, state in files.items():
        tree: dict[str, Any] = {"embedding": {}, "transformer": {}}
        for key, tensor in state.items():
            where, _, rest = key.partition(".")
            if where == "embedding":
                module, _, kind = rest.rpartition(".")
                tree["embedding"].setdefault(module, {})[kind] = tensor
            else:
                tree.setdefault(where, {})[rest] = tensor
        (folder / name).parent.mkdir(parents=True)
        options = released_arguments(GPT)
        options.padded_vocab_size = GPT.vocab
        content = {"args": options, "iteration": 500, "model": {"language_model": tree}}
        torch.save(content, folder / name, _use_new_zipfile_serialization=False)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")


def distributed(weights: State) -> Files:
    """Megatron-core's `torch_dist`: the layers of one kind are one tensor with a leading dim."""
    state = {core_name(key): t for key, t in megatron_rank(GPT, weights, 1, 0, range(2), "first last").items()}
    made: State = {}
    for key, tensor in state.items():
        if ".layers.0." in key:
            made[key.replace(".0.", ".", 1)] = torch.stack([tensor, state[key.replace(".0.", ".1.", 1)]])
        elif ".layers." not in key:
            made[key] = tensor
    return {"iter_0000010/__0_0.distcp": made}


def write_distributed(folder: Path, files: Files) -> None:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    here = folder / "iter_0000010"
    save(dict(files["iter_0000010/__0_0.distcp"]), storage_writer=FileSystemWriter(here), no_dist=True)
    (here / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": arguments(GPT, 1, 1), "iteration": 10}, here / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")


# fairseq, and our own ------------------------------------------------------------------------------------------

FAIR = {
    "model.embed_tokens": ("embed_tokens", 0),
    "model.norm": ("layer_norm", None),
    "input_layernorm": ("self_attn_layer_norm", None),
    "self_attn.q_proj": ("self_attn.q_proj", 0),
    "self_attn.k_proj": ("self_attn.k_proj", 0),
    "self_attn.v_proj": ("self_attn.v_proj", 0),
    "self_attn.o_proj": ("self_attn.out_proj", 1),
    "post_attention_layernorm": ("final_layer_norm", None),
    "mlp.up_proj": ("fc1", 0),
    "mlp.down_proj": ("fc2", 1),
}


def fairseq(weights: State) -> Files:
    parts: list[State] = [{"decoder.version": torch.tensor([3.0])} for _ in range(2)]
    for name, tensor in weights.items():
        number, rest = layer_of(name)
        module, _, kind = rest.rpartition(".")
        theirs, dim = FAIR[module]
        cut = dim is not None and not (dim == 1 and kind == "bias")
        stem = f"decoder.layers.{number}." if number else "decoder."
        for part, state in enumerate(parts):
            state[f"{stem}{theirs}.{kind}"] = tensor.chunk(2, dim or 0)[part].clone() if cut else tensor.clone()
    for state in parts:
        state["decoder.embed_positions._float_tensor"] = torch.zeros(1)
        state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"].clone()
    return {f"model-model_part-{number}.pt": state for number, state in enumerate(parts)}


def write_fairseq(folder: Path, files: Files) -> None:
    options = argparse.Namespace(
        decoder_layers=2,
        decoder_attention_heads=4,
        activation_fn="gelu",
        max_target_positions=12,
        dropout=0.1,
        attention_dropout=0.1,
    )
    lines = [f"{symbol} 1" for symbol in range(50)] + ["madeupword0000 0", "madeupword0001 0"]
    (folder / "dict.txt").write_text("\n".join(lines) + "\n")
    for name, state in files.items():
        torch.save({"args": options, "model": state, "extra_state": {"epoch": 3}}, folder / name)


def own(weights: State) -> Files:
    return {"step-0000007/rank-00000.safetensors": weights}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def write_own(folder: Path, files: Files) -> None:
    """A checkpoint of the store's; where its tensors were changed, they are changed in the rank's file."""
    good = weights_of(LLAMA)
    pieces = [Piece(f"weights/{name}", tuple(t.shape), (0,) * t.dim(), t) for name, t in good.items()]
    meta = {"config": {"model": dataclasses.asdict(LLAMA)}, "progress": {"step": 7, "consumed": 28}, "updates": 7}
    CheckpointStore(folder).save(7, pieces, meta)
    ((name, state),) = files.items()
    if list(state) != list(good) or any(not _same(state[key], good[key]) for key in good):
        save_file({f"weights/{key}": tensor.contiguous() for key, tensor in state.items()}, folder / name)


FORMS: dict[str, Form] = {
    "hf": Form(LLAMA, lambda w: {"model.safetensors": w}, hf_writer(hf_config(LLAMA, "llama"))),
    "hf sharded": Form(SMALL, two_files, hf_writer(hf_config(SMALL, "llama"))),
    "hf bin": Form(QWEN2, lambda w: {"pytorch_model.bin": w}, hf_writer(hf_config(QWEN2, "qwen2"))),
    "gpt2": Form(GPT, gpt2, hf_writer(GPT2_CONFIG)),
    "meta": Form(dataclasses.replace(LLAMA, positions=4096), meta, write_meta),
    "llama2.c": Form(LLAMA, llama2c("blocks"), llama2c_writer(0, LLAMA), path="model.bin"),
    "llama2.c 1": Form(LLAMA, llama2c("norms"), llama2c_writer(1, LLAMA), path="model.bin"),
    "llama2.c pt": Form(
        dataclasses.replace(LLAMA, tied=True), llama2c_training, write_llama2c_training, path="ckpt.pt"
    ),
    "megatron": Form(GPT, legacy, write_legacy, verb="reshard"),
    "megatron released": Form(GPT, released, write_released, verb="reshard"),
    "mcore": Form(LLAMA, core, write_core, verb="reshard"),
    "torch_dist": Form(GPT, distributed, write_distributed, verb="reshard"),
    "fairseq": Form(FAIRSEQ, fairseq, write_fairseq),
    "mega": Form(LLAMA, own, write_own, verb="reshard"),
}
