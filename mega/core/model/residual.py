"""The residual stream and its norms. The next norm's kernel also adds a branch's output to the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.architecture.layer import Norm
from mega.core.ops.autograd import with_recipe
from mega.core.ops.dropout import Dropout
from mega.core.ops.norm import NormForm, accurate, weighted
from mega.core.ops.suite import Ops
from mega.core.parallel.collectives import all_reduce_both_ways
from mega.core.parallel.mesh import Axis
from mega.core.parallel.weight import ParameterFactory, Weight

Tensors = Mapping[str, Tensor]
"""Logical tensors of one unit, by name relative to the unit."""


class ResidualState(NamedTuple):
    """The residual stream x and a branch output that has not yet been added. The stream is x + drop(branch + bias)."""

    x: torch.Tensor  # [tokens, h]
    branch: torch.Tensor | None = None  # [tokens, h]
    bias: Weight | None = None  # [h]
    drop: Dropout | None = None

    def sum(self, ops: Ops) -> torch.Tensor:
        return ops.added(*self)


class Normalization(nn.Module):
    """LayerNorm or RMSNorm over the last dimension. The weights are replicated on every rank."""

    def __init__(self, factory: ParameterFactory, norm: Norm, tensors: Tensors):
        super().__init__()
        self.weight = factory(tensors[f"{norm.name}.weight"])
        self.bias = factory(tensors[f"{norm.name}.bias"]) if norm.kind == "layernorm" else None
        self.eps, self.form = norm.eps, NormForm(norm.offset, norm.rounds_last)
        self.ops, self.recompute = factory.ops, factory.recompute

    def forward(self, stream: ResidualState) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream with the pending branch added, and the norm of this sum."""
        x, normed = self.ops.add_norm(*stream, self.weight, self.bias, self.eps, self.form)
        if self.recompute:
            freed = (x.detach(), None, None, None, self.weight.detach(), self.bias, self.eps, self.form)
            with_recipe(normed, lambda: self.ops.add_norm(*freed)[1])
        return x, normed


class ProjectionNorm(nn.Module):
    """One RMSNorm over all heads of all tensor ranks. The weight is sharded in the same way as the heads."""

    def __init__(self, factory: ParameterFactory, norm: Norm, tensors: Tensors, axis: Axis):
        super().__init__()
        assert norm.kind == "rmsnorm", norm
        self.weight = factory(tensors[f"{norm.name}.weight"])
        self.width, self.eps, self.axis = norm.width, norm.eps, axis
        self.form = NormForm(norm.offset, norm.rounds_last)

    def forward(self, stream: ResidualState) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the heads [tokens, heads, d] unchanged, and the normalized heads."""
        x = stream.x
        heads = x.flatten(1).to(accurate(x.dtype))
        squares = all_reduce_both_ways(heads.square().sum(-1, keepdim=True), self.axis)
        normed = heads * torch.rsqrt(squares / self.width + self.eps)
        return x, weighted(normed, self.weight, self.form).view_as(x)


def normalization(factory: ParameterFactory, norm: Norm | None, tensors: Tensors) -> Normalization | None:
    """Create the module of an optional norm."""
    return None if norm is None else Normalization(factory, norm, tensors)
