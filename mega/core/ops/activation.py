"""Feed-forward activations on [tokens, f]; the gated one takes [tokens, 2f], gate first."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def activate(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """gelu (erf), gelu_tanh, relu2 (squared ReLU) or swiglu (silu(gate) x up; Shazeer 2020) of x + bias."""
    if bias is not None:
        x = x + bias
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "gelu":
        return F.gelu(x)
    if kind == "relu2":
        return F.relu(x).square()
    assert kind == "swiglu", kind
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
