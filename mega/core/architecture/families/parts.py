"""Parts of an architecture that several families build alike from the options of a resolved model."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from mega.core.architecture.families.mixture import experts
from mega.core.architecture.layer import (
    Activation,
    Attention,
    Branch,
    Dense,
    Experts,
    Layer,
    Mixer,
    Norm,
    Rope,
    RopeScaling,
)
from mega.core.architecture.model import Adapters, Architecture, Input, Stack
from mega.core.config.mixture import has_experts
from mega.core.config.sections import GATED, MOST_LAYERS, ModelConfig

CROSS = "encoder_attn"
"""What a decoder layer's attention to the memory is called, as in BART."""


def norm(options: ModelConfig, name: str, width: int | None = None) -> Norm:
    """Over the residual stream, or over `width` channels."""
    width = options.hidden if width is None else width
    return Norm(name, options.norm, width, options.norm_eps, options.norm_offset)


def rope(options: ModelConfig) -> Rope | None:
    if options.position != "rope":
        return None
    scaling = None
    if options.rope_scaling != "none":
        scaling = RopeScaling(
            options.rope_scaling_factor,
            options.rope_low_freq_factor,
            options.rope_high_freq_factor,
            options.rope_original_positions,
        )
    return Rope(
        base=options.rope_base,
        width=int(options.head_dim * options.rope_fraction),
        interpolation=options.rope_interpolation,
        scaling=scaling,
    )


def self_attention(options: ModelConfig, *, causal: bool = True) -> Attention:
    """A layer's attention to its own tokens."""
    padding = "masked" if causal else options.memory_padding
    own: dict[str, Any] = {"source": "self", "causal": causal, "padding": padding, "rope": rope(options)}
    return _attention(options, name="self_attn", site="attention", **own)


def cross_attention(options: ModelConfig) -> Attention:
    """A layer's attention to the memory, named as BART's."""
    plain = {"causal": False, "padding": options.memory_padding, "rope": None, "window": None}
    return _attention(options, name=CROSS, site="cross_attention", source="memory", **plain)


def _attention(options: ModelConfig, *, name: str, **values: Any) -> Attention:
    head_dim = options.head_dim
    values = {"window": options.window, **values}
    return Attention(
        name=name,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=head_dim,
        qkv_bias=options.qkv_bias,
        out_bias=options.bias,
        q_norm=norm(options, f"{name}.q_norm", head_dim) if options.qk_norm else None,
        k_norm=norm(options, f"{name}.k_norm", head_dim) if options.qk_norm else None,
        dropout=options.attention_dropout,
        **values,
    )


def dense(options: ModelConfig) -> Dense:
    """A layer's feed-forward network."""
    kind, width = options.activation, options.ffn
    activation: Activation = GATED.get(kind, kind)  # type: ignore[arg-type]
    return Dense(
        name="mlp", site="feed_forward", width=width, activation=activation, gated=kind in GATED, bias=options.bias
    )


def feed_forward_of(options: ModelConfig, number: int) -> Dense | Experts:
    """Of layer `number`: dense, or a mixture of experts."""
    network = dense(options)
    return experts(options, network) if has_experts(options, number) else network


def branch(options: ModelConfig, mixer: Mixer, before: Norm | None, after: Norm | None = None) -> Branch:
    return Branch(
        mixer=mixer,
        before=before,
        after=after,
        after_of="sum",
        onto="normed" if options.post_norm_residual and before is not None else "stream",
        dropout=options.hidden_dropout,
    )


def layer(options: ModelConfig, *, number: int = 0, causal: bool = True, memory: bool = False) -> Layer:
    """Self-attention and feed-forward, each with its norm before or after it; between them, with `memory`, attention to
    another stack's tokens. number: the layer's, which says whether it has experts."""
    attention, feed_forward = self_attention(options, causal=causal), feed_forward_of(options, number)
    first, second = norm(options, "input_layernorm"), norm(options, "post_attention_layernorm")
    if options.norm_placement == "post":
        last = norm(options, "post_feedforward_layernorm")
        return Layer(branches=(branch(options, attention, None, second), branch(options, feed_forward, None, last)))
    branches = [branch(options, attention, first), branch(options, feed_forward, second)]
    if memory:
        cross = cross_attention(options)
        branches.insert(1, branch(options, cross, norm(options, f"{cross.name}_layernorm")))
    return Layer(branches=tuple(branches))


def check_depth(depth: int) -> None:
    """Errors: ValueError where layers are more than any model has: they are built one by one."""
    if depth > MOST_LAYERS:
        raise ValueError(f"--layers {depth}: must be at most {MOST_LAYERS}")


def stack(
    options: ModelConfig,
    each: Layer | Sequence[Layer],
    depth: int,
    *,
    name: str = "model",
    opens: str = "embedding",
    first: int = 0,
) -> Stack:
    """`depth` layers, equal or these, and a norm after the last."""
    check_depth(depth)
    layers = (each,) * depth if isinstance(each, Layer) else tuple(each)
    return Stack(name=name, opens=opens, first=first, layers=layers, norm=norm(options, f"{name}.norm"))


def inputs(options: ModelConfig, *, types: int = 0, normed: bool = False) -> Input:
    return Input(
        vocab=options.vocab,
        vocab_multiple=options.vocab_multiple,
        scale=options.hidden**0.5 if options.embedding_scale else 1.0,
        learned_positions=options.positions if options.position == "learned" else 0,
        sinusoid_from=options.position_offset if options.position == "sinusoidal" else None,
        types=types,
        norm=norm(options, "model.embed_norm") if normed else None,
        dropout=options.hidden_dropout,
    )


def architecture(options: ModelConfig, **parts: Any) -> Architecture:
    """With what all families take from the options alike."""
    adapters = None
    if options.lora_rank:
        targets, dropout = options.lora_targets, options.lora_dropout
        adapters = Adapters(rank=options.lora_rank, alpha=options.lora_alpha, targets=targets, dropout=dropout)
    return Architecture(
        family=options.family,
        hidden=options.hidden,
        positions=options.positions,
        init_std=options.init_std,
        out_std=options.init_std / sqrt(2.0 * options.layers),
        adapters=adapters,
        **parts,
    )
