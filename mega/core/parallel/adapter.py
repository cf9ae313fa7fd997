"""The low-rank product that an adapter adds to a linear layer, within the layer's own passes.

    forward   h = scale drop(x) A^T;  y += h B^T
    dgrad     dh = dy B;              dx += scale drop(dh A)
    wgrad     dB = dy^T h;            dA = scale dh^T drop(x)

The layer owns the exchanges: x and dy are what its own GEMMs take, y and dx are sums that it still has to exchange. So
an adapter costs no message. Several linears that are one GEMM (query, key, value) have one input and one A below
another; each has a B of its own. Source: Hu et al. 2021, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from mega.core.inventory import Tensor
from mega.core.inventory.adapters import AdapterSpec
from mega.core.ops.dropout import Dropout
from mega.core.parallel.weight import ParameterFactory, Weight

Grads = tuple[torch.Tensor | None, ...]
"""Of A and of every B, None where they have gone into buckets."""


class Adapter(nn.Module):
    """The adapters of linears that are one GEMM. parts: each one's columns of y.

    down: A, [parts rank, in]; up: every B, [out, rank]. dropout: of x.
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
        """A, then every B: what autograd must know of."""
        return self.down, *self.up  # type: ignore[return-value]

    def add(self, x: torch.Tensor, y: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        """Add to y [n, out] what x [n, in] makes; h [n, parts rank], which `backward` is given."""
        h = self._dropped(x, drop) @ self.down.t()
        h.mul_(self.scale)
        for number, columns in enumerate(self.columns):
            y[:, columns].addmm_(self._part(h, number), self.up[number].t())
        return h

    def dgrad(self, grad: torch.Tensor, grad_x: torch.Tensor | None, drop: Dropout | None) -> torch.Tensor:
        """Add to grad_x [n, in] what grad [n, out] makes; dh [n, parts rank]."""
        parts = [grad[:, columns] @ self.up[number] for number, columns in enumerate(self.columns)]
        grad_h = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mul_(self.scale)
        if grad_x is not None and drop is None:
            grad_x.addmm_(grad_h, self.down)
        elif grad_x is not None:
            grad_x.add_(self._dropped(grad_h @ self.down, drop))
        return grad_h

    def wgrad(
        self, x: torch.Tensor, h: torch.Tensor, grad: torch.Tensor, grad_h: torch.Tensor, drop: Dropout | None
    ) -> Grads:
        """The gradients of A and of every B, into their buckets where they have some."""
        down = self.down.add_wgrad(grad_h, self._dropped(x, drop))
        pairs = enumerate(zip(self.weights[1:], self.columns, strict=True))
        return down, *(up.add_wgrad(grad[:, columns], self._part(h, number)) for number, (up, columns) in pairs)

    def _dropped(self, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        if drop is None:
            return x
        # Kernels drop whole tokens; some columns of them, on a tensor rank that is not the first, the plain way.
        return drop(x) if drop.first else self.down.ops.added(None, x, None, drop)

    def _part(self, h: torch.Tensor, number: int) -> torch.Tensor:
        return h[:, number * self.rank : (number + 1) * self.rank]


def adapter_of(factory: ParameterFactory, tensors: Sequence[Tensor], weight: Weight) -> Adapter | None:
    """The adapters of the linears that are stacked in `weight`, if any has one."""
    parts = []
    for tensor, segment in zip(tensors, weight.segments, strict=True):
        if tensor.name in factory.adapters:
            rows = slice(segment.offset, segment.offset + segment.shard.local[0])
            parts.append((rows, factory.adapters[tensor.name]))
    return Adapter(factory, parts) if parts else None


def of_columns(drop: Dropout | None, index: int, width: int) -> Dropout | None:
    """Dropout of a rank's columns, the `index`-th run of `width`."""
    return None if drop is None else replace(drop, first=index * width)
