"""Layers that read neighbours against Megatron-LM 23.06's model: outputs, losses, gradients, who feels which chunk."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mega.core.architecture import inventory
from mega.core.batch import NeighbourBatch
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.training.wire import build_stages
from tests.support.ranks import CPU, fill, random
from tests.support.shared import shared

Weights = dict[str, torch.Tensor]

UNDROPPED = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "retro_encoder_hidden_dropout": 0.0,
    "retro_encoder_attention_dropout": 0.0,
}
SMALL: dict[str, Any] = {
    **UNDROPPED,
    "retriever": True,
    "retro_chunk_length": 4,
    "retro_rope": False,
    "layers": 12,
    "hidden": 16,
    "heads": 2,
    "ffn": 32,
    "vocab": 40,
    "vocab_multiple": 1,
    "seq_length": 12,
    "micro_batch": 2,
    "activation": "gelu",
    "dtype": "fp32",
    "device": "cpu",
}
MODULES = {
    "self_attn.o_proj": "self_attention.dense",
    "inter_attn.q_proj": "inter_attention.query",
    "inter_attn.o_proj": "inter_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "model.embed_tokens": "embedding.word_embeddings",
    "model.embed_positions": "embedding.position_embeddings",
    "model.norm": "encoder.final_layernorm",
}


def run_of(**values: Any) -> RunConfig:
    return resolve(compose(flags={**SMALL, **values}), 1)


@cache
def golden() -> Weights:
    return load_file(shared("golden/retro/retro_learned.safetensors"))


def of_megatron(found: Weights, kind: str) -> Weights:
    """Weights or gradients of the golden model by our names."""
    return {tensor.name: _theirs(found, kind, tensor.name) for tensor in inventory(run_of().model)}


def _theirs(found: Weights, kind: str, name: str) -> torch.Tensor:
    module, _, which = name.rpartition(".")
    start, _, inner = module.rpartition("layers.")
    number, _, module = inner.partition(".")
    if not start:
        return found[f"{kind}.language_model.{MODULES[name.rpartition('.')[0]]}.{which}"]
    prefix = f"{kind}.language_model.{start.replace('model.', 'encoder.')}layers.{number}."
    reads = f"{prefix}inter_attention.query.weight" in found
    norms = {"post_attention_layernorm": "post_inter_attention_layernorm"} if reads else {}
    module = {**MODULES, **norms, "inter_attn_layernorm": "post_attention_layernorm"}.get(module, module)
    attention, _, part = module.partition(".")
    if part[:1] in "qkv" and part.endswith("_proj"):
        fused, parts = ("query_key_value", "qkv") if attention == "self_attn" else ("key_value", "kv")
        whole = found[f"{prefix}{'self' if attention == 'self_attn' else 'inter'}_attention.{fused}.{which}"]
        heads = whole.view(2, len(parts), 8, *whole.shape[1:])  # per head q, k and v
        return heads[:, parts.index(part[0])].flatten(0, 1)
    return found[f"{prefix}{module}.{which}"]


def stage_of(run: RunConfig, wholes: Weights) -> Any:
    (stage,) = build_stages(run, Mesh.at(0), CPU)
    for weight in weights(stage):
        fill(weight, wholes)
    return stage


def golden_batch(**changes: Any) -> NeighbourBatch:
    found = golden()
    text = found["tokens"]
    return NeighbourBatch(
        tokens=text[:, :-1],
        labels=text[:, 1:],
        loss_weights=torch.ones(2, 12),
        positions=torch.arange(12).expand(2, 12),
        samples=torch.arange(2),
        **{"neighbours": found["neighbor_tokens"], **changes},
    )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours.detach() - theirs).abs().max()) <= 1e-6 * max(1.0, float(theirs.abs().max()))


def by_rows(name: str, theirs: torch.Tensor) -> torch.Tensor:
    """An output of Megatron-LM, [s, b, h] or [r, k b l, h], with its rows as ours are. Its neighbours, of which only
    the set matters, come last one first."""
    if name.startswith("layer."):
        return theirs.transpose(0, 1)
    return theirs.view(8, 2, 2, 3, 16).flip(1).permute(2, 3, 1, 0, 4)


def test_the_model_of_2023_layer_by_layer() -> None:
    found = golden()
    stage = stage_of(run_of(), of_megatron(found, "weight"))
    seen: dict[str, torch.Tensor] = {}

    def watch(name: str, module: Any) -> None:
        module.register_forward_hook(lambda _, __, out: seen.__setitem__(name, out.sum(stage.ops)))

    encoder = stage.layers[5].branches[1].mixer.encoder
    for prefix, layers in (("", stage.layers), ("retriever.", encoder)):
        for number, layer in enumerate(layers):
            watch(f"{prefix}layer.{number + 1}.out", layer)
    close(stage(golden_batch(), outputs=True).outputs, found["logits"])
    assert len(seen) == 14
    for name, ours in seen.items():
        close(ours, by_rows(name, found[name]).reshape(ours.shape))


def test_loss_and_gradients_of_2023() -> None:
    found = golden()
    stage, wholes = stage_of(run_of(), of_megatron(found, "weight")), of_megatron(found, "grad")
    total = stage(golden_batch()).terms["lm"].total / 24
    assert total.item() == pytest.approx(float(found["token_loss"].mean()), rel=1e-6)
    total.backward()
    judged = 0
    for weight in weights(stage):
        assert weight.grad is not None
        for segment in weight.segments:
            close(segment.real(weight.grad), wholes[segment.shard.name])
            judged += 1
    assert judged == len(wholes)


def felt(stage: Any, batch: NeighbourBatch, changed: NeighbourBatch) -> torch.Tensor:
    """bool [s]: where the logits of the first row change."""
    with torch.no_grad():
        before, after = (stage(each, outputs=True).outputs[0] for each in (batch, changed))
    moved: torch.Tensor = (before - after).abs().amax(1) > 1e-7
    return moved


def test_who_feels_which_neighbours() -> None:
    stage, batch = stage_of(run_of(), of_megatron(golden(), "weight")), golden_batch()
    for chunk in range(3):
        neighbours = batch.neighbours.clone()
        neighbours[:, chunk] = (neighbours[:, chunk] + 7) % 40
        positions = felt(stage, batch, replace(batch, neighbours=neighbours)).nonzero().flatten().tolist()
        assert positions == list(range(4 * chunk + 3, 12))


@pytest.mark.parametrize(("rope", "moves"), [(False, False), (True, True)])
def test_a_neighbour_is_a_set_of_tokens_without_its_positions(rope: bool, moves: bool) -> None:
    """The fork's recipe has rotary positions only, of which its neighbours have none."""
    run = run_of(position="rope", rope_fraction=0.5, retro_rope=rope, dtype="fp64")
    stage = stage_of(run, random_weights(run))
    batch = golden_batch()
    shuffled = replace(batch, neighbours=batch.neighbours.flip(3))
    assert bool(felt(stage, batch, shuffled).any()) == moves
    assert not felt(stage, batch, replace(batch, neighbours=batch.neighbours.flip(2))).any()


def random_weights(run: RunConfig) -> Weights:
    return {tensor.name: 0.3 * random(*tensor.shape, seed=n) for n, tensor in enumerate(inventory(run.model))}


def test_a_neighbour_that_is_missing_is_not_read() -> None:
    run = run_of(dtype="fp64")
    stage, batch = stage_of(run, random_weights(run)), golden_batch()
    found = torch.ones(2, 3, 2, dtype=torch.bool)
    found[0, 0, 1] = found[0, 1] = False
    batch = replace(batch, found=found)
    changed = batch.neighbours.clone()
    changed[0, 0, 1] = changed[0, 1] = 5
    assert not felt(stage, batch, replace(batch, neighbours=changed)).any()
    none = replace(batch, found=torch.zeros_like(found))
    sizes = {name: value for name, value in SMALL.items() if not name.startswith("retro")}
    plain = resolve(compose(flags={**sizes, "dtype": "fp64", "retriever": False}), 1)
    without = stage_of(plain, random_weights(run))
    with torch.no_grad():
        assert torch.equal(stage(none, outputs=True).outputs, without(none, outputs=True).outputs)


def test_the_gate() -> None:
    run = run_of(dtype="fp64", retro_gate=0.0)
    stage, batch = stage_of(run, random_weights(run)), golden_batch()
    assert not felt(stage, batch, replace(batch, neighbours=(batch.neighbours + 1) % 40)).any()
