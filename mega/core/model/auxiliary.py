"""Auxiliary losses of layers (load balance, router z-loss, ...), with their gradients, reported sums and divisors.

    y = context.auxiliary_loss(loss, x, total, ...)      y is x; in the backward pass
                                                         dx = dy,  d total = scale

The loss is attached to the residual stream, so its backward pass begins when the gradient of x arrives, inside the
layer's backward pass. At this point the layer's weights are unsharded (ZeRO 3) and the layer's recomputed activations
exist, for any pipeline schedule. If the loss were a separate root of the backward pass, its gradient would be computed
before the layer's weights are gathered. `scale` is computed before the forward pass.

Every tensor rank computes the gradient of its local `total`. Reported totals are summed over the tensor ranks once per
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mega.core.architecture.layer import AuxiliaryLoss
from mega.core.batch import Term
from mega.core.ops.autograd import FunctionContext, with_recipe
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Axis


def divisor(
    loss: AuxiliaryLoss, batch: int, seq: int, *, shards: int, tokens: torch.Tensor | None = None
) -> torch.Tensor | float:
    """Return the divisor of one layer's total for a microbatch of [batch, seq] tokens on this rank.

    shards: number of context ranks that share the sequences; each context rank counts its share of the sequences or of
    the microbatch. tokens: number of tokens that are not padding; None for all tokens.
    """
    count = float(batch * seq) if tokens is None else tokens
    return {"tokens": count, "sequences": batch / shards, "microbatches": 1 / shards}[loss.mean_over]


class AuxiliarySums:
    """The losses that the layers of one stage compute for one microbatch.

    scales: name of a loss -> float64 [], the gradient of the loss's totals in the backward pass; None without a
    backward pass. tp: the tensor axis of the mesh. shards: as in `divisor`.

    Recomputed layers compute their losses again, but totals added after `terms` is called are not counted.
    """

    def __init__(self, scales: Mapping[str, torch.Tensor] | None, tp: Axis, shards: int):
        self._scales, self._tp, self._shards = scales, tp, shards
        self._sums: dict[str, torch.Tensor] = {}
        self._first: dict[tuple[int, str], torch.Tensor] = {}
        self._open = True

    def add(
        self,
        loss: AuxiliaryLoss,
        x: torch.Tensor,
        total: torch.Tensor,
        shape: tuple[int, int],
        split: bool,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attach a loss as in `ForwardContext.auxiliary_loss`, for a total that is already computed. shape: (batch,
        seq) of the layer's input. tokens: as in `divisor`."""
        assert total.dim() == 0 and total.dtype in (torch.float32, torch.float64), "totals are summed in fp32 at least"
        if self._open:
            weight = divisor(loss, *shape, shards=self._shards, tokens=tokens) if self._tp.first else 0.0
            # `terms` sums over tensor ranks, so a total computed on all ranks is counted on the first rank only.
            reported = total.detach().double() if split or self._tp.first else torch.zeros_like(total).double()
            weights = weight if isinstance(weight, torch.Tensor) else torch.full_like(reported, weight)
            sums, before = torch.stack([reported, weights]), self._sums.get(loss.name)
            self._sums[loss.name] = sums if before is None else before + sums
        if self._scales is None or not torch.is_grad_enabled():
            return x
        y: torch.Tensor = _AttachLoss.apply(x, total, self._scales[loss.name])  # type: ignore[no-untyped-call]
        recipe = getattr(x, "recipe", None)
        return y if recipe is None else with_recipe(y, recipe)

    @property
    def counting(self) -> bool:
        """Whether this is the first pass through the layers rather than a recomputation."""
        return self._open

    def once(self, key: tuple[int, str], value: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return `value()` on the first call with `key`, and the same tensor on later calls, which are
        recomputations."""
        if key not in self._first:
            self._first[key] = value()
        return self._first[key]

    def terms(self) -> dict[str, Term]:
        """Return totals and divisors over all layers, by loss name. All tensor ranks return the same values."""
        self._open = False
        if not self._sums:
            return {}
        sums = torch.stack(list(self._sums.values()))
        all_reduce(sums, self._tp)
        return {name: Term(*each) for name, each in zip(self._sums, sums, strict=True)}


class _AttachLoss(torch.autograd.Function):
    """The identity function of x. Its backward pass also sets the gradient of `total` to `scale`."""

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
