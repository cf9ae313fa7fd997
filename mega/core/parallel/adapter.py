"""Low-rank adapters (LoRA), which wrap the GEMMs of a linear layer. The layer does not depend on these wrappers.

    forward   h = scale drop(x) A^T;  y += h B^T
    dgrad     dh = dy B;              dx += scale drop(dh A)
    wgrad     dB = dy^T h;            dA = scale dh^T drop(x)

The layer does the communication, so an adapter needs none. x and dy are the operands of the layer's own GEMMs; y and dx
are partial sums that the layer reduces afterwards. Linear layers that are fused into one GEMM (query, key, value) share
their input. The A matrices of these layers are stacked along dim 0, and each layer has a separate B. Source: Hu et al.
2021, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mega.core.architecture.adapters import AdapterSpec
from mega.core.ops.dropout import Dropout
from mega.core.ops.matmuls import Factor
from mega.core.ops.operand import Input
from mega.core.parallel.gemms import Grads, LinearGemms
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.weight import ParameterFactory, Weight


class LowRank(nn.Module):
    """The terms that `AdaptedGemms` adds to the three GEMMs of a layer. A subclass for inference implements only
    `add`."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights whose gradients `wgrad` computes."""
        return ()

    def add(self, x: torch.Tensor, y: torch.Tensor, drop: Dropout | None) -> Any:
        """Add the adapter's output for x [n, in] to y [n, out]. Return the state that `wgrad` needs."""
        raise NotImplementedError

    def dgrad(self, grad: torch.Tensor, grad_x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        """Add the adapter's input gradient for grad [n, out] to grad_x [n, in]. Return the state that `wgrad` needs."""
        raise NotImplementedError

    def wgrad(
        self, x: torch.Tensor, h: torch.Tensor, grad: torch.Tensor, grad_h: torch.Tensor, drop: Dropout | None
    ) -> Grads:
        raise NotImplementedError


class Adapter(LowRank):
    """The adapters of linear layers that are fused into one GEMM.

    parts: for each layer, the columns of y that the layer computes, and its adapter.
    down: the A matrices of all parts, [parts x rank, in]. up: the B matrix of each part, [out, rank].
    dropout: dropout probability for x.
    """

    def __init__(self, factory: ParameterFactory, parts: Sequence[tuple[slice, AdapterSpec]]):
        super().__init__()
        exact = factory.exact
        self.down = exact(*(spec.down for _, spec in parts))
        self.up = nn.ParameterList(exact(spec.up) for _, spec in parts)
        self.columns = [columns for columns, _ in parts]
        first = parts[0][1]
        self.rank, self.scale, self.dropout = first.down.shape[0], first.scale, first.dropout

    @property
    def weights(self) -> tuple[Weight, ...]:
        """A and every B, which must be inputs of the autograd function."""
        return self.down, *self.up  # type: ignore[return-value]

    def add(self, x: torch.Tensor, y: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        """Add scale drop(x) A^T B^T to y [n, out]. Return h [n, parts x rank], which `wgrad` needs."""
        h = self._dropped(x, drop) @ self.down.t()
        h.mul_(self.scale)
        for number, columns in enumerate(self.columns):
            y[:, columns].addmm_(self._part(h, number), self.up[number].t())
        return h

    def dgrad(self, grad: torch.Tensor, grad_x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        """Add scale drop(grad B A) to grad_x [n, in]. Return dh [n, parts x rank]."""
        parts = [grad[:, columns] @ self.up[number] for number, columns in enumerate(self.columns)]
        grad_h = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mul_(self.scale)
        if drop is None:
            grad_x.addmm_(grad_h, self.down)
        else:
            grad_x.add_(self._dropped(grad_h @ self.down, drop))
        return grad_h

    def wgrad(
        self, x: torch.Tensor, h: torch.Tensor, grad: torch.Tensor, grad_h: torch.Tensor, drop: Dropout | None
    ) -> Grads:
        """Return the gradients of A and of every B, with None for each weight whose gradient was added to its
        main_grad."""
        down = self.down.add_wgrad(grad_h, self._dropped(x, drop))
        pairs = enumerate(zip(self.weights[1:], self.columns, strict=True))
        return down, *(up.add_wgrad(grad[:, columns], self._part(h, number)) for number, (up, columns) in pairs)

    def _dropped(self, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        if drop is None:
            return x
        # The dropout kernels need column 0, which in a row-parallel layer only the first tensor rank has.
        # The other ranks use the plain implementation.
        return drop(x) if drop.first else self.down.ops.added(None, x, None, drop)

    def _part(self, h: torch.Tensor, number: int) -> torch.Tensor:
        return h[:, number * self.rank : (number + 1) * self.rank]


@dataclass
class _AdaptedGrad:
    """dy in the formats that the GEMMs of the backward pass need."""

    prepared: Any  # dy, as prepared by the layer's own GEMMs
    grad: torch.Tensor  # dy itself, for the adapter
    h: torch.Tensor  # saved by the adapter's forward pass
    drop: Dropout | None  # the dropout of the forward pass
    grad_h: torch.Tensor | None = None  # set by `dgrad`


class AdaptedGemms(nn.Module):
    """`LinearGemms` that add the output of an adapter to each GEMM."""

    plain = False

    def __init__(self, gemms: LinearGemms, adapter: LowRank):
        super().__init__()
        self.gemms, self.adapter = gemms, adapter

    @property
    def weights(self) -> tuple[Weight, ...]:
        return *self.gemms.weights, *self.adapter.weights

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        return self.gemms.cast(dtype)

    def operands(self, x: torch.Tensor) -> None:
        """Return None, because the adapter needs x itself."""

    def forward(
        self,
        x: Input,
        factor: torch.Tensor,
        bias: torch.Tensor | None = None,
        drop: Dropout | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        assert out is None and isinstance(x, torch.Tensor), "--lora-rank excludes --tp-overlap"
        y, saved = self.gemms.forward(x, factor, bias, drop)
        return y, (saved, self.adapter.add(x, y, drop), drop)

    def prepare(self, grad: torch.Tensor, saved: Any) -> _AdaptedGrad:
        inner, h, drop = saved
        return _AdaptedGrad(self.gemms.prepare(grad, inner), grad, h, drop)

    def dgrad(self, grad: _AdaptedGrad, factor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        assert out is None, "--lora-rank excludes --tp-overlap"
        grad_x = self.gemms.dgrad(grad.prepared, factor)
        grad.grad_h = self.adapter.dgrad(grad.grad, grad_x, grad.drop)
        return grad_x

    def wgrad(self, grad: _AdaptedGrad, x: Input | None) -> Grads:
        assert isinstance(x, torch.Tensor) and grad.grad_h is not None
        layer_grads = self.gemms.wgrad(grad.prepared, x)
        return *layer_grads, *self.adapter.wgrad(x, grad.h, grad.grad, grad.grad_h, grad.drop)

    def by(self, factor: Factor) -> Callable[[torch.Tensor], torch.Tensor]:
        multiply, add = self.gemms.by(factor), self.adapter.add

        def run(x: torch.Tensor) -> torch.Tensor:
            y = multiply(x)
            add(x, y, None)
            return y

        return run


def attach_adapters(module: nn.Module, specs: Mapping[str, AdapterSpec], factory: ParameterFactory) -> None:
    """Wrap the GEMMs of the linear layers of `module` that have adapters.

    specs: name of a linear layer's weight -> its adapter.
    """
    for linear in [each for each in module.modules() if isinstance(each, ColumnLinear | RowLinear)]:
        parts = [
            (slice(segment.offset, segment.offset + segment.shard.local[0]), specs[segment.shard.name])
            for segment in linear.weight.segments
            if segment.shard.name in specs
        ]
        if parts:
            linear.gemms = AdaptedGemms(linear.gemms, Adapter(factory, parts))
