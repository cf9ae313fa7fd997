"""A family whose layers differ: windows, rotary bases, widths, norms on both sides, parallel branches. All values.

The first layer sees 5 tokens and has norms on both sides of its branches (Gemma 3), the second sees all at another
rotary base, without a gate and with another width, the third runs its branches in parallel without positions (GPT-J).
It is a decoder, so stage, batch and head are GPT's: what is new is one function from options to an architecture.
"""

from __future__ import annotations

from dataclasses import replace

from mega.core import architecture, family
from mega.core.architecture import Architecture
from mega.core.architecture.families import parts
from mega.core.architecture.families.decoder import decoder
from mega.core.architecture.layer import Branch, Layer, Rope
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.sections import ModelConfig

NAME = "toy-layers"


def build(options: ModelConfig) -> Architecture:
    """Layers of three kinds, in turn."""
    plain = decoder(options)
    (stack,) = plain.stacks
    kinds = _local(options), _wide(options), _parallel(options)
    layers = tuple(kinds[number % len(kinds)] for number in range(len(stack.layers)))
    return replace(plain, stacks=(replace(stack, layers=layers),))


def _local(options: ModelConfig) -> Layer:
    """x + after(f(before(x))), a window, a small rotary base."""
    attention = replace(parts.self_attention(options), window=5, rope=Rope(base=100.0, width=4))
    named = zip(("attention", "feed_forward"), (attention, parts.dense(options)), strict=True)
    branches = (
        Branch(
            mixer=mixer,
            before=parts.norm(options, f"pre_{name}_layernorm"),
            after=parts.norm(options, f"post_{name}_layernorm"),
            after_of="branch",
            onto="stream",
            dropout=options.hidden_dropout,
        )
        for name, mixer in named
    )
    return Layer(branches=tuple(branches))


def _wide(options: ModelConfig) -> Layer:
    """No window, a large rotary base, a feed-forward network of another width without a gate."""
    attention = replace(parts.self_attention(options), rope=Rope(base=1e6, width=2))
    dense = replace(parts.dense(options), width=80, gated=False, activation="relu2", bias=True)
    norms = (parts.norm(options, name) for name in ("input_layernorm", "post_attention_layernorm"))
    return Layer(branches=tuple(parts.branch(options, *each) for each in zip((attention, dense), norms, strict=True)))


def _parallel(options: ModelConfig) -> Layer:
    """Both branches read the norm of the layer's input; no positions."""
    attention = replace(parts.self_attention(options), rope=None)
    norms = (parts.norm(options, name) for name in ("input_layernorm", "post_attention_layernorm"))
    mixers = attention, parts.dense(options)
    branches = tuple(parts.branch(options, *each) for each in zip(mixers, norms, strict=True))
    return Layer(branches=branches, parallel=True)


def register() -> None:
    """Make the family known to this process."""
    family.register(NAME, family.FAMILIES["gpt"], build, {"norm": "rmsnorm", "activation": "swiglu", "bias": False})


def unregister() -> None:
    for known in (family.FAMILIES, architecture.FAMILIES, FAMILY_DEFAULTS):
        known.pop(NAME, None)
    architecture.architecture.cache_clear()
