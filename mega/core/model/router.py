"""The router of a mixture: which experts each token passes, what is dropped, which losses that gives, and what a step
counts.

Rules that look at a whole microbatch (sinkhorn, capacity, balance) see the tokens of all ranks that share it, so that
they decide as one rank would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from mega.core.architecture.families.mixture import BALANCE_LOSSES, Z_LOSS
from mega.core.architecture.layer import Experts
from mega.core.model.forward import ForwardContext
from mega.core.model.mixers import LayerPlace
from mega.core.model.residual import Tensors
from mega.core.ops import routing
from mega.core.parallel.collectives import all_gather, all_reduce, local_shard
from mega.core.parallel.mesh import Axis
from mega.core.parallel.weight import ParameterFactory

SEQUENCE, MICROBATCH, GLOBAL = (BALANCE_LOSSES[over][0] for over in ("sequence", "microbatch", "global"))

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class RoutedTokens(NamedTuple):
    """x: [t, h], on which the losses ride. chosen: int64 [t, k]. probabilities: [t, k]. kept: bool [t, k], which
    choices are not dropped; None: all. limit: rows that an expert takes at most."""

    x: torch.Tensor
    chosen: torch.Tensor
    probabilities: torch.Tensor
    kept: torch.Tensor | None
    limit: int | None


class ExpertRouter(nn.Module):
    """load: float64 [experts + 1], choices of each expert and those that were dropped, of our tokens in this step."""

    def __init__(self, factory: ParameterFactory, value: Experts, tensors: Tensors, place: LayerPlace):
        super().__init__()
        self.value, self.layer, self.cp, self.data = value, place.layer, place.cp, place.experts.tokens
        self.gate = factory(tensors[f"{value.name}.gate.weight"])
        self.gate_bias = factory(tensors[f"{value.name}.gate.bias"]) if value.router.bias else None
        correction = f"{value.name}.gate.e_score_correction_bias"
        self.balance = factory(tensors[correction]) if correction in tensors else None
        self.load = torch.zeros(value.count + 1, dtype=torch.float64, device=self.gate.device)
        self._running = torch.zeros(value.count, dtype=torch.float64, device=self.gate.device)
        self._microbatches = 0
        self.quantiles = torch.zeros_like(self.load)
        """Of `quantile`: the sum of what the microbatches of this step say, and how many there were."""

    def start_step(self) -> None:
        """Nothing is counted yet."""
        self.load.zero_()
        self._running.zero_()
        self.quantiles.zero_()
        self._microbatches = 0

    def forward(self, x: torch.Tensor, context: ForwardContext) -> RoutedTokens:
        logits = self._logits(x, context)
        chosen, probabilities = self._route(logits, context)
        x, limit, kept = self._losses(x, logits, context), None, None
        if self.value.capacity is not None and self.training:
            limit, kept = self._capacity(chosen, probabilities, context)
        self._count(chosen, kept, context)
        return RoutedTokens(x, chosen, probabilities, kept, limit)

    def _logits(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        router = self.value.router
        if router.jitter and self.training:
            x = context.jitter(x, router.jitter, self.layer, f"{self.value.site}_jitter")
        dtype = x.dtype if router.dtype is None else DTYPES[router.dtype]
        bias = None if self.gate_bias is None else self.gate_bias.to(dtype)
        return F.linear(x.to(dtype), self.gate.to(dtype), bias)

    def _route(self, logits: torch.Tensor, context: ForwardContext) -> routing.Routing:
        router, k = self.value.router, self.value.chosen
        if router.choice == "quantile" and self.training:
            self._add_quantile(logits, context)
        if router.choice != "sinkhorn" or not self.training:
            return routing.route(logits, router, k, self.balance)
        # The matrix is that of the whole microbatch.
        whole = routing.sinkhorn(routing.accurate(_whole(logits.detach(), _sharing(context, self.cp))))
        own = _own_part(whole, _sharing(context, self.cp))
        return routing.route(logits, router, k, matrix=own)

    def _losses(self, x: torch.Tensor, logits: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if not self.training:  # a held-out set judges the text alone
            return x
        router = self.value.router
        totals: dict[str, Callable[[], torch.Tensor]] = {
            SEQUENCE: lambda: self._balance(logits, context, sequences=True),
            MICROBATCH: lambda: self._balance(logits, context),
            GLOBAL: lambda: self._balance(logits, context, running=True),
            Z_LOSS: lambda: routing.z_total(logits),
        }
        for loss in router.losses:
            x = context.auxiliary_loss(loss, x, totals[loss.name], split=context.sequence)
        return x

    def _balance(
        self, logits: torch.Tensor, context: ForwardContext, *, sequences: bool = False, running: bool = False
    ) -> torch.Tensor:
        """Of each of the rows, added up, or of all tokens of the microbatch; `running`: against the mean load of the
        microbatches so far, of all data ranks."""
        own, k = routing.load_scores(logits, self.value.router.score), self.value.chosen
        first = context.tp.index * len(own) if context.sequence else 0
        row = (first + torch.arange(len(own), device=own.device)) // context.seq
        batch = context.batch
        counts = routing.choice_counts(own, k, row, batch)
        sums = own.new_zeros(batch, own.shape[1]).index_add(0, row, own)
        tokens = float(context.seq * self.cp.size)
        if not sequences:
            counts, sums, tokens = counts.sum(0), sums.sum(0), tokens * batch
        for axis in _sharing(context, self.cp):
            all_reduce(counts, axis)
        if running:
            counts, tokens = self._running_mean(counts, context), tokens * (self.data.size // self.cp.size)
        return routing.imbalance(counts, sums, k, tokens)

    def _running_mean(self, counts: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """counts of our microbatch -> those of all data ranks, in the mean over the microbatches of this step."""

        def mean() -> torch.Tensor:
            everywhere = counts.double() / self.cp.size
            all_reduce(everywhere, self.data)
            self._running += everywhere
            self._microbatches += 1
            return (self._running / self._microbatches).to(counts.dtype)

        assert context.auxiliary is not None
        return context.auxiliary.once((self.layer, GLOBAL), mean)

    def _capacity(
        self, chosen: torch.Tensor, probabilities: torch.Tensor, context: ForwardContext
    ) -> tuple[int, torch.Tensor]:
        """How many tokens an expert takes, and which choices of our tokens it keeps."""
        value, of = self.value, self.value.capacity
        assert of is not None
        numbers, axes = context.token_numbers(self.cp.size, chosen.device), _sharing(context, self.cp)
        which, weights, numbers = (_whole(one, axes) for one in (chosen, probabilities.detach(), numbers))
        limit = routing.capacity(len(which), value.chosen, value.count, of.factor)
        kept = routing.kept_choices(which, weights, numbers, limit, of.policy)
        return limit, _own_part(kept, axes)

    def _add_quantile(self, logits: torch.Tensor, context: ForwardContext) -> None:
        """What the logits of the microbatch say of the thresholds; once."""
        assert self.balance is not None
        if context.auxiliary is not None and context.auxiliary.counting and not logits.is_meta:
            whole = _whole(logits.detach(), _sharing(context, self.cp))
            self.quantiles[:-1] += routing.quantile(whole, self.balance, self.value.chosen)
            self.quantiles[-1] += 1

    def _count(self, chosen: torch.Tensor, kept: torch.Tensor | None, context: ForwardContext) -> None:
        """Add to the load of this step; what is recomputed has been counted."""
        if context.auxiliary is None or not context.auxiliary.counting or not self.training or chosen.is_meta:
            return
        flat = chosen.flatten()
        self.load.index_add_(0, flat, torch.ones_like(flat, dtype=self.load.dtype))
        if kept is not None:
            self.load[-1] += (~kept).sum()


def _sharing(context: ForwardContext, cp: Axis) -> list[Axis]:
    """The ranks that share a microbatch, the fastest first."""
    return [*([context.tp] if context.sequence else []), cp]


def _whole(x: torch.Tensor, axes: list[Axis]) -> torch.Tensor:
    """Values of our tokens, [t, ...], and of all ranks that share the microbatch, in the order of ranks."""
    for axis in axes:
        x = all_gather(x, axis)
    return x


def _own_part(whole: torch.Tensor, axes: list[Axis]) -> torch.Tensor:
    """What `_whole` has put together, backwards."""
    for axis in reversed(axes):
        whole = local_shard(whole, axis)
    return whole
