"""Bytes of weights and optimizer: counted, and measured on the very stages that training builds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega.core.config.compose import compose
from mega.core.config.presets import PRESETS
from mega.core.config.resolve import resolve
from mega.core.config.run import RunConfig
from mega.core.estimate.chunks import stage_chunks
from mega.core.estimate.weights import stage_buckets, stage_weights
from mega.core.optim.choose import rule_of
from mega.core.optim.optimizer import Optimizer
from mega.core.parallel.gradients import GradBuffer
from mega.core.parallel.mesh import Mesh
from mega.core.training.wire import build_grads, build_stages


def run_of(preset: str | None, world: int, **flags: object) -> RunConfig:
    typed = {"micro_batch": 1, "device": "cuda", **flags}
    row = PRESETS.get(preset or "", {})
    if row.get("vocab", 1) is None:
        typed["vocab"] = 1000
    return resolve(compose(preset, flags=typed), world)


def built(run: RunConfig, dp: int, stage: int, tensor: int = 0) -> GradBuffer:
    """The buckets of one rank as training makes them, on the meta device."""
    parallel = run.parallel
    last = dp - 1 if run.optimizer.optimizer == "adafactor" else 0  # which holds the vectors
    rank = tensor + last * parallel.tp + stage * parallel.tp * dp
    mesh = Mesh.at(rank, tp=parallel.tp, dp=dp, pp=parallel.pp)
    stages = build_stages(run, mesh, torch.device("meta"))
    return build_grads(run, mesh, stages)


def agree(run: RunConfig, dp: int, stage: int, tensor: int = 0) -> None:
    buffer = built(run, dp, stage, tensor)
    spans = [bucket.span[1] - bucket.span[0] for bucket in buffer.buckets]
    assert [(b.length, b.span) for b in stage_buckets(run, dp, stage_chunks(run)[stage])] == [
        (bucket.weights.numel(), span) for bucket, span in zip(buffer.buckets, spans)
    ]
    optimizer = Optimizer(buffer, rule_of(run.optimizer), 1.0, masters=run.precision.masters)
    counted = stage_weights(run, dp, stage_chunks(run)[stage])
    assert counted.parameters == sum(w.numel() for b in buffer.buckets for w, _, _ in b.offsets)
    # What spans alone keep is an `own` tensor; the whole ones come and go.
    whole = run.parallel.zero
    assert counted.weights == sum((b.own_weights if whole >= 3 else b.weights).nbytes for b in buffer.buckets)
    assert counted.grads == sum((b.own_grads if whole >= 2 else b.grads).nbytes for b in buffer.buckets)
    held = sum(tensor.nbytes for owned in optimizer.shards for tensor in owned.tensors())
    masters = sum(owned.master.nbytes for owned in optimizer.shards if owned.master is not None)
    assert counted.masters == masters
    assert counted.moments == held - masters


ONE_EACH = {
    **{"qwen2.5": "qwen2.5-0.5b", "qwen3": "qwen3-32b", "pythia": "pythia-410m", "gpt-neox": "", "olmo": "olmo2-1b"},
    **{"gemma": "gemma2-2b", "phi": "", "starcoder": "", "smollm": "", "granite": "", "stablelm": "", "roberta": ""},
}
"""Of presets that differ by their sizes alone, or as the layers of others do, one is built."""


@pytest.mark.parametrize(
    "preset", [name for name in PRESETS if not name.startswith(tuple(ONE_EACH)) or name in ONE_EACH.values()]
)
def test_every_preset_is_counted_as_it_is_built(preset: str) -> None:
    layers, heads = PRESETS[preset]["layers"], PRESETS[preset]["heads"]
    pp = next(p for p in (8, 7, 4, 2) if layers % p == 0)
    tp = 8 if heads % 8 == 0 and PRESETS[preset].get("kv_heads", heads) % 8 == 0 else 2
    run = run_of(preset, tp * pp * 4, tp=tp, pp=pp, zero=1, dtype="bf16", sequence_parallel=True)
    for stage in (0, 1, pp - 1):
        agree(run, 4, stage)
    whole = run_of(preset, 1)
    if layers <= 48:
        agree(whole, 1, 0)


@settings(max_examples=60)
@given(
    family=st.sampled_from(["gpt", "llama"]),
    heads=st.sampled_from([2, 4, 6]),
    width=st.integers(1, 9),
    layers=st.sampled_from([2, 4]),
    vocab=st.integers(3, 300),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 3]),
    zero=st.sampled_from([0, 1, 2, 3]),
    dtype=st.sampled_from(["fp32", "bf16", "fp64"]),
    bucket_size=st.sampled_from([1, 500, 40_000_000]),
    extra=st.fixed_dictionaries(
        {},
        optional={
            "tied": st.booleans(),
            "bias": st.booleans(),
            "qk_norm": st.booleans(),
            "qkv_bias": st.booleans(),
            "sequence_parallel": st.booleans(),
            "position": st.sampled_from(["learned", "none"]),
            "norm": st.sampled_from(["layernorm", "rmsnorm"]),
            "activation": st.sampled_from(["gelu", "swiglu", "relu2"]),
            "vocab_multiple": st.sampled_from([1, 7, 128]),
            "embedding_fp32": st.booleans(),
            "masters": st.booleans(),
            "optimizer": st.sampled_from(["sgd", "lamb", "adafactor", "muon"]),
            "sgd_momentum": st.sampled_from([0.0, 0.9]),
            "kv_heads": st.just(2),
        },
    ),
)
def test_any_shape_and_layout(family, heads, width, layers, vocab, tp, pp, dp, zero, dtype, bucket_size, extra):  # type: ignore[no-untyped-def]
    flags = {"hidden": heads * width * 2, "heads": heads, "layers": layers, "vocab": vocab, "seq_length": 16}
    if zero >= 2:
        pp = 1
    flags |= {"family": family, "tp": tp, "pp": pp, "zero": zero, "dtype": dtype, "bucket_size": bucket_size, "ffn": 12}
    if dtype != "bf16":
        extra.pop("embedding_fp32", None), extra.pop("masters", None)
    run = run_of(None, tp * pp * dp, **{**flags, **extra})
    for stage in range(pp):
        for tensor in range(tp):
            agree(run, dp, stage, tensor)
