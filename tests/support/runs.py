"""Small runs for tests of the parallel rooms: models of a few thousand weights that still use every feature."""

from __future__ import annotations

from typing import Any

from mega.core.config.resolve import resolve
from mega.core.config.run import Options, RunConfig, updated

SHAPE: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 509,  # no tensor axis divides it
    "vocab_multiple": 2,
    "seq_length": 16,
    "micro_batch": 1,
    "global_batch": 8,
    "lr": 1e-2,
    "dtype": "fp64",
    "bucket_size": 3000,  # several buckets
    "device": "cpu",
}

MODELS: dict[str, dict[str, Any]] = {
    # learned positions, LayerNorm, biases, tied
    "gpt": {},
    # rotary, RMSNorm, gated, no biases, untied
    "llama": {
        "family": "llama",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "bias": False,
        "tied": False,
        "ffn": 48,
    },
    # what else GPT's config can hold: norms of heads, residual after the norm, part of the head rotates, untied
    "gpt-odd": {
        "qk_norm": True,
        "post_norm_residual": True,
        "position": "rope",
        "rope_fraction": 0.5,
        "rope_interpolation": 2.0,
        "norm_offset": True,
        "activation": "gelu",
        "tied": False,
    },
    # Qwen's values: biases of query, key and value only, norms of heads, tied, and a window
    "qwen": {
        "family": "llama",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "bias": False,
        "qkv_bias": True,
        "qk_norm": True,
        "ffn": 48,
        "window": 7,
    },
    # an encoder and a deeper decoder, whose texts differ in length
    "t5": {"family": "t5", "sample_kind": "t5", "layers": 2, "decoder_layers": 3, "decoder_seq_length": 12},
    # both directions, two losses; norms before each branch, and after it
    "bert": {"family": "bert", "sample_kind": "bert"},
    "bert-window": {"family": "bert", "sample_kind": "bert", "window": 5},
    "bert-post": {"family": "bert", "sample_kind": "bert", "norm_placement": "post", "activation": "gelu"},
}


def small_run(model: str = "gpt", world: int = 1, **values: Any) -> RunConfig:
    """The resolved run of one of `MODELS` on `world` ranks, with options replaced by field name."""
    return resolve(small_options(model, **values), world)


def small_options(model: str = "gpt", **values: Any) -> Options:
    """The same as typed."""
    return updated(Options(), {**SHAPE, **MODELS[model], **values})
