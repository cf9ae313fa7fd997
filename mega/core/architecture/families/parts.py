"""Functions that create parts of an architecture from the options of a resolved model, for several families."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import Any, Literal

from mega.core.architecture.families.mixture import experts
from mega.core.architecture.layer import (
    Activation,
    Attention,
    Branch,
    Dense,
    Experts,
    Layer,
    LongScaling,
    Mixer,
    Norm,
    Rope,
    RopeScaling,
    YarnScaling,
)
from mega.core.architecture.model import Adapters, Architecture, Input, Stack
from mega.core.config.mixture import has_experts
from mega.core.config.sections import GATED, MOST_LAYERS, ModelConfig

CROSS = "encoder_attn"
"""The name of a decoder layer's attention to the memory, as in BART."""


def norm(options: ModelConfig, name: str, width: int | None = None) -> Norm:
    """Return a norm over the residual stream, or over `width` channels."""
    width = options.hidden if width is None else width
    return Norm(name, options.norm, width, options.norm_eps, options.norm_offset, options.norm_placement == "branch")


def rope(options: ModelConfig, number: int = 0) -> Rope | None:
    """Return the rotary positions of layer `number`, or None if the layer does not use rotary positions."""
    if options.position != "rope" or not _holds(options.rope_layers, number):
        return None
    width = int(options.head_dim * options.rope_fraction)
    if options.local_rope_base is not None and window(options, number) is not None:
        return Rope(base=options.local_rope_base, width=width)
    return Rope(
        base=options.rope_base, width=width, interpolation=options.rope_interpolation, scaling=_rope_scaling(options)
    )


def _rope_scaling(options: ModelConfig) -> RopeScaling | YarnScaling | LongScaling | None:
    factor, original, magnitude = (
        options.rope_scaling_factor,
        options.rope_original_positions,
        options.rope_magnitude,
    )
    if options.rope_scaling == "llama3":
        return RopeScaling(factor, options.rope_low_freq_factor, options.rope_high_freq_factor, original)
    if options.rope_scaling == "yarn":
        return YarnScaling(
            factor=factor,
            original=original,
            beta_fast=options.rope_beta_fast,
            beta_slow=options.rope_beta_slow,
            truncate=options.rope_truncate,
            magnitude=max(1.0, 0.1 * log(factor) + 1.0) if magnitude is None else magnitude,
        )
    if options.rope_scaling == "longrope":
        # The default factor of cosines and sines depends on the ratio of the extended to the original number of
        # positions.
        longer = options.positions / original
        if magnitude is None:
            magnitude = sqrt(1 + log(longer) / log(original)) if longer > 1 and original > 1 else 1.0
        factors = {"short": options.rope_short_factors, "long": options.rope_long_factors}
        for kind, numbers in factors.items():
            if len(numbers) != (frequencies := int(options.head_dim * options.rope_fraction) // 2):
                raise ValueError(
                    f"--rope-{kind}-factors: {len(numbers)} numbers; must be {frequencies}, one for each frequency"
                )
        return LongScaling(**factors, original=original, magnitude=magnitude)
    return None


def window(options: ModelConfig, number: int) -> int | None:
    """Return the attention window of layer `number` in tokens, or None if it is unlimited."""
    return options.window if _holds(options.window_layers, number) else None


def _holds(pattern: tuple[int, ...], number: int) -> bool:
    """Whether the repeated pattern selects layer `number`. An empty pattern selects all layers."""
    return not pattern or bool(pattern[number % len(pattern)])


def self_attention(options: ModelConfig, *, causal: bool = True, number: int = 0) -> Attention:
    """Return the self-attention of layer `number`."""
    padding = "masked" if causal else options.memory_padding
    values: dict[str, Any] = {"source": "self", "causal": causal, "padding": padding, "rope": rope(options, number)}
    values |= {"window": window(options, number), "score_multiplier": _score_multiplier(options, number)}
    return _attention(options, name="self_attn", site="attention", **values)


def cross_attention(options: ModelConfig) -> Attention:
    """Return a layer's attention to the memory, with BART's names."""
    plain = {"causal": False, "padding": options.memory_padding, "rope": None, "window": None}
    return _attention(options, name=CROSS, site="cross_attention", source="memory", **plain)


def _score_multiplier(options: ModelConfig, number: int) -> float:
    scale = 1.0 if options.attention_scale is None else options.attention_scale * sqrt(options.head_dim)
    return scale / (number + 1) if options.attention_scale_by_layer else scale


def _attention(options: ModelConfig, *, name: str, **values: Any) -> Attention:
    heads = {"q": options.heads, "k": options.kv_heads}
    norm_heads = heads if options.qk_norm_whole else {"q": 1, "k": 1}
    norms: dict[str, Any] = {
        f"{projection}_norm": norm(options, f"{name}.{projection}_norm", count * options.head_dim)
        if options.qk_norm
        else None
        for projection, count in norm_heads.items()
    }
    return Attention(
        name=name,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        qkv_bias=options.qkv_bias,
        out_bias=options.bias if options.out_bias is None else options.out_bias,
        dropout=options.attention_dropout,
        softcap=options.attention_softcap,
        **norms,
        **values,
    )


def dense(options: ModelConfig) -> Dense:
    """Return the dense feed-forward network of a layer."""
    kind, width = options.activation, options.ffn
    activation: Activation = GATED.get(kind, kind)  # type: ignore[arg-type]
    return Dense(
        name="mlp", site="feed_forward", width=width, activation=activation, gated=kind in GATED, bias=options.bias
    )


def feed_forward_of(options: ModelConfig, number: int) -> Dense | Experts:
    """Return the feed-forward network of layer `number`, dense or a mixture of experts."""
    network = dense(options)
    return experts(options, network) if has_experts(options, number) else network


def branch(
    options: ModelConfig,
    mixer: Mixer,
    before: Norm | None,
    after: Norm | None = None,
    of: Literal["sum", "branch"] = "sum",
) -> Branch:
    return Branch(
        mixer=mixer,
        before=before,
        after=after,
        after_of=of,
        onto="normed" if options.post_norm_residual and before is not None else "stream",
        dropout=options.hidden_dropout,
        multiplier=options.residual_multiplier,
    )


def layer(options: ModelConfig, *, number: int = 0, causal: bool = True, memory: bool = False) -> Layer:
    """Return layer `number`, with self-attention, feed-forward, norms and, if `memory`, attention to another stack's
    tokens."""
    attention = self_attention(options, causal=causal, number=number)
    feed_forward = feed_forward_of(options, number)
    first, second = norm(options, "input_layernorm"), norm(options, "post_attention_layernorm")
    third, last = (norm(options, f"{position}_feedforward_layernorm") for position in ("pre", "post"))
    if options.norm_placement == "post":
        return Layer(branches=(branch(options, attention, None, second), branch(options, feed_forward, None, last)))
    if options.norm_placement == "branch":
        pairs = (attention, None, second, "branch"), (feed_forward, None, last, "branch")
        return Layer(branches=tuple(branch(options, *each) for each in pairs))
    if options.norm_placement == "both":
        double = (attention, first, second, "branch"), (feed_forward, third, last, "branch")
        return Layer(branches=tuple(branch(options, *each) for each in double))
    if options.parallel_branches == "one-norm":
        bare = branch(options, attention, None), branch(options, feed_forward, None)
        return Layer(branches=bare, parallel=True, before=first)
    branches = [branch(options, attention, first), branch(options, feed_forward, second)]
    if memory:
        cross = cross_attention(options)
        branches.insert(1, branch(options, cross, norm(options, f"{cross.name}_layernorm")))
    return Layer(branches=tuple(branches), parallel=options.parallel_branches == "two-norms")


def check_depth(depth: int) -> None:
    """Check the number of layers before layers are built one by one. Errors: ValueError if the number is implausibly
    large."""
    if depth > MOST_LAYERS:
        raise ValueError(f"--layers {depth}: must be at most {MOST_LAYERS}")


def stack(
    options: ModelConfig,
    each: Callable[[int], Layer],
    depth: int,
    *,
    name: str = "model",
    opens: str = "embedding",
    first: int = 0,
) -> Stack:
    """Return a stack of `depth` layers, with a norm after the last layer.

    each: function that creates the layer with a given index in the stack. Equal layers become one object, so that
    comparing layers is fast.
    """
    check_depth(depth)
    unique: dict[Layer, Layer] = {}
    layers = tuple(unique.setdefault(layer, layer) for layer in map(each, range(depth)))
    return Stack(name=name, opens=opens, first=first, layers=layers, norm=norm(options, f"{name}.norm"))


def inputs(options: ModelConfig, *, types: int = 0, normed: bool = False) -> Input:
    return Input(
        vocab=options.vocab,
        vocab_multiple=options.vocab_multiple,
        scale=(options.hidden**0.5 if options.embedding_scale else 1.0) * options.embedding_multiplier,
        rounds_scale=options.embedding_scale_rounded,
        learned_positions=options.positions + options.position_offset if options.position == "learned" else 0,
        learned_from=options.position_offset if options.position == "learned" else 0,
        sinusoid_from=options.position_offset if options.position == "sinusoidal" else None,
        types=types,
        norm=norm(options, "model.embed_norm") if normed else None,
        dropout=options.hidden_dropout,
    )


def architecture(options: ModelConfig, **parts: Any) -> Architecture:
    """Return an architecture with the given parts, and set the fields that all families share."""
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
