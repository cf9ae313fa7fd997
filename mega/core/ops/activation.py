"""Activations of feed-forward layers, for inputs [tokens, f]. Gated activations take [tokens, 2f], with the gate
first."""

from __future__ import annotations

import torch
from torch.nn import functional as F

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu2": "relu2"}
"""Kind of gated activation -> activation of its gate (Shazeer 2020)."""


def gated_kind(activation: str) -> str:
    """Return the kind of gated activation whose gate has the given activation.

    >>> gated_kind("silu")
    'swiglu'
    """
    return next(kind for kind, gate in GATED.items() if gate == activation)


def activate(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """Compute the activation of x + bias. kind: gelu (erf), gelu_tanh, silu, relu, relu2 (squared), or a kind in
    `GATED`, which computes activation(gate) x up."""
    if bias is not None:
        x = x + bias
    if kind in GATED:
        gate, up = x.chunk(2, dim=-1)
        return activate(gate, None, GATED[kind]) * up
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "gelu":
        return F.gelu(x)
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return F.relu(x).square()
    assert kind == "silu", kind
    return F.silu(x)


def activate_weighted(x: torch.Tensor, weights: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute `activate` for x, and multiply each row by its weight in weights [tokens]. The result has the dtype of
    x."""
    active = activate(x, None, kind)
    return (active * weights[:, None]).to(active.dtype)
