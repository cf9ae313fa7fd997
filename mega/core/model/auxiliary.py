"""Losses of layers (load balance, router z-loss, ...): how they reach the gradient, the log and the divisor.

    y = context.auxiliary_loss(loss, x, total, ...)      y is x; in the backward pass
                                                         dx = dy,  d total = scale

The loss rides on the stream: its backward pass begins when the gradient of x arrives, inside that of the layer. There
the layer's weights are whole (ZeRO 3) and what it recomputes is at hand, whatever the schedule. A root next to the
stream would run before the layer's weights are gathered. `scale` is known before the forward pass.

Every tensor rank computes the gradient of its own `total`; the totals that are reported are summed over the tensor
ranks once a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mega.core.architecture.layer import AuxiliaryLoss
from mega.core.batch import Term
from mega.core.ops.autograd import FunctionContext, with_recipe
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Axis


def divisor(loss: AuxiliaryLoss, batch: int, seq: int, *, shards: int) -> float:
    """What one layer's total of a microbatch of [batch, seq] tokens on this rank is divided by.

    shards: context ranks that share the sequences; each counts its share of a sequence and of the microbatch.
    """
    return {"tokens": float(batch * seq), "sequences": batch / shards, "microbatches": 1 / shards}[loss.mean_over]


class AuxiliarySums:
    """The losses that the layers of one stage compute of one microbatch.

    scales: name -> float64 [], what totals are multiplied by before the backward pass; None in a forward pass alone.
    tp: the tensor ranks. shards: as of `divisor`.

    Layers that are recomputed compute their losses again; what is added after `terms` is not counted.
    """

    def __init__(self, scales: Mapping[str, torch.Tensor] | None, tp: Axis, shards: int):
        self._scales, self._tp, self._shards = scales, tp, shards
        self._sums: dict[str, torch.Tensor] = {}
        self._first: dict[tuple[int, str], torch.Tensor] = {}
        self._open = True

    def add(
        self, loss: AuxiliaryLoss, x: torch.Tensor, total: torch.Tensor, shape: tuple[int, int], split: bool
    ) -> torch.Tensor:
        """As `ForwardContext.auxiliary_loss`; shape: (batch, seq) that the layer reads."""
        assert total.dim() == 0 and total.dtype in (torch.float32, torch.float64), "totals are summed in fp32 at least"
        if self._open:
            weight = divisor(loss, *shape, shards=self._shards) if self._tp.first else 0.0
            counted = total.detach().double() if split or self._tp.first else torch.zeros_like(total).double()
            found, before = torch.stack([counted, torch.full_like(counted, weight)]), self._sums.get(loss.name)
            self._sums[loss.name] = found if before is None else before + found
        if self._scales is None or not torch.is_grad_enabled():
            return x
        y: torch.Tensor = _Ride.apply(x, total, self._scales[loss.name])  # type: ignore[no-untyped-call]
        recipe = getattr(x, "recipe", None)
        return y if recipe is None else with_recipe(y, recipe)

    @property
    def counting(self) -> bool:
        """Whether this is the first pass through the layers, and not a recomputation."""
        return self._open

    def once(self, key: tuple[int, str], value: Callable[[], torch.Tensor]) -> torch.Tensor:
        """value(), of which a recomputation gets what it was the first time."""
        if key not in self._first:
            self._first[key] = value()
        return self._first[key]

    def terms(self) -> dict[str, Term]:
        """What all layers have found, by name: totals and divisors, the same on every tensor rank."""
        self._open = False
        if not self._sums:
            return {}
        sums = torch.stack(list(self._sums.values()))
        all_reduce(sums, self._tp)
        return {name: Term(*each) for name, each in zip(self._sums, sums, strict=True)}


class _Ride(torch.autograd.Function):
    """x, whose gradient is passed on, and with it the scale of a total as that one's gradient."""

    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[torch.Tensor, torch.dtype]],
        x: torch.Tensor,
        total: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        ctx.state = scale, total.dtype
        return x.view_as(x)

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[torch.Tensor, torch.dtype]], grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        scale, dtype = ctx.state
        return grad, scale.to(dtype), None
