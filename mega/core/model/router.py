"""The router of a mixture of experts, which chooses experts for each token, drops choices, and balances and counts the
load.

Rules that depend on the whole microbatch (sinkhorn, capacity, balance) use values of all ranks that share the
microbatch, so the router's decisions do not depend on the parallel layout.
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
    """The decisions of a router for this rank's tokens."""

    x: torch.Tensor  # [t, h], with the losses of the router attached
    chosen: torch.Tensor  # int64 [t, k], indices of experts
    probabilities: torch.Tensor  # [t, k]
    kept: torch.Tensor | None  # bool [t, k], which choices are kept; None if all choices are kept
    limit: int | None  # maximum number of rows per expert; None if unlimited


class ExpertRouter(nn.Module):
    """The router of one mixture of experts.

    load: float64 [experts + 1], how many times each expert was chosen, then the number of dropped choices, for this
    rank's tokens in this step.
    """

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
        """float64 [experts + 1]: sums of the thresholds over this step's microbatches, then the number of microbatches.
        Used only if experts are chosen by quantiles."""

    def start_step(self) -> None:
        """Set the load and the sums of this step to zero."""
        self.load.zero_()
        self._running.zero_()
        self.quantiles.zero_()
        self._microbatches = 0

    def forward(self, x: torch.Tensor, context: ForwardContext) -> RoutedTokens:
        logits = self._logits(x, context)
        choices, probabilities = self._route(logits, context)
        x, limit, kept_choices = self._losses(x, logits, context), None, None
        if self.value.capacity is not None and self.training:
            limit, kept_choices = self._capacity(choices, probabilities, context)
        self._count(choices, kept_choices, context)
        return RoutedTokens(x, choices, probabilities, kept_choices, limit)

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
        # Sinkhorn normalisation is over all tokens of the microbatch.
        whole = routing.sinkhorn(routing.accurate(_whole(logits.detach(), _sharing(context, self.cp))))
        matrix = _own_part(whole, _sharing(context, self.cp))
        return routing.route(logits, router, k, matrix=matrix)

    def _losses(self, x: torch.Tensor, logits: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if not self.training:  # the validation loss excludes the losses of routers
            return x
        router = self.value.router
        totals: dict[str, Callable[[], torch.Tensor]] = {
            SEQUENCE: lambda: self._balance(logits, context, sequences=True),
            MICROBATCH: lambda: self._balance(logits, context),
            GLOBAL: lambda: self._balance(logits, context, running=True),
            Z_LOSS: lambda: routing.z_total(logits, _valid(context)),
        }
        for loss in router.losses:
            x = context.auxiliary_loss(loss, x, totals[loss.name], split=context.sequence)
        return x

    def _balance(
        self, logits: torch.Tensor, context: ForwardContext, *, sequences: bool = False, running: bool = False
    ) -> torch.Tensor:
        """Return the balance loss over all tokens of the microbatch.

        sequences: whether to return the sum of the rows' balance losses instead. running: whether to use the mean load
        of this step's microbatches so far, over all data ranks.
        """
        scores, k = routing.load_scores(logits, self.value.router.score), self.value.chosen
        first = context.tp.index * len(scores) if context.sequence else 0
        row = (first + torch.arange(len(scores), device=scores.device)) // context.seq
        batch = context.batch
        valid = _valid(context)
        counts = routing.choice_counts(scores, k, row, batch, valid)
        scores = scores if valid is None else scores * valid[:, None]
        sums = scores.new_zeros(batch, scores.shape[1]).index_add(0, row, scores)
        tokens = float(context.seq * self.cp.size)
        if not sequences:
            counts, sums, tokens = counts.sum(0), sums.sum(0), tokens * batch
        for axis in _sharing(context, self.cp):
            all_reduce(counts, axis)
        if running:
            counts, tokens = self._running_mean(counts, context), tokens * (self.data.size // self.cp.size)
        # Each token that is not padding has k choices.
        return routing.imbalance(counts, sums, k, tokens if valid is None else counts.sum(-1) / k)

    def _running_mean(self, counts: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return how many times each expert was chosen on all data ranks, averaged over the microbatches of this step
        so far. counts: how many times each expert was chosen in this rank's microbatch."""

        def mean() -> torch.Tensor:
            global_counts = counts.double() / self.cp.size
            all_reduce(global_counts, self.data)
            self._running += global_counts
            self._microbatches += 1
            return (self._running / self._microbatches).to(counts.dtype)

        assert context.auxiliary is not None
        return context.auxiliary.once((self.layer, GLOBAL), mean)

    def _capacity(
        self, chosen: torch.Tensor, probabilities: torch.Tensor, context: ForwardContext
    ) -> tuple[int, torch.Tensor]:
        """Return the maximum number of tokens per expert, and a mask of the choices that are kept for this rank's
        tokens."""
        value, rule = self.value, self.value.capacity
        assert rule is not None
        numbers, axes = context.token_numbers(self.cp.size, chosen.device), _sharing(context, self.cp)
        all_chosen, weights, numbers = (_whole(tensor, axes) for tensor in (chosen, probabilities.detach(), numbers))
        limit = routing.capacity(len(all_chosen), value.chosen, value.count, rule.factor)
        all_kept = routing.kept_choices(all_chosen, weights, numbers, limit, rule.policy)
        return limit, _own_part(all_kept, axes)

    def _add_quantile(self, logits: torch.Tensor, context: ForwardContext) -> None:
        """Add the thresholds of this microbatch's logits, unless this is a recomputation."""
        assert self.balance is not None
        if context.auxiliary is not None and context.auxiliary.counting and not logits.is_meta:
            whole = _whole(logits.detach(), _sharing(context, self.cp))
            self.quantiles[:-1] += routing.quantile(whole, self.balance, self.value.chosen)
            self.quantiles[-1] += 1

    def _count(self, chosen: torch.Tensor, kept: torch.Tensor | None, context: ForwardContext) -> None:
        """Add this microbatch's choices of experts to the load of this step, unless this is a recomputation."""
        if context.auxiliary is None or not context.auxiliary.counting or not self.training or chosen.is_meta:
            return
        valid = _valid(context)
        counted = torch.ones_like(chosen, dtype=torch.bool) if valid is None else valid[:, None].expand_as(chosen)
        self.load.index_add_(0, chosen.flatten(), counted.flatten().to(self.load.dtype))
        if kept is not None:
            self.load[-1] += (~kept & counted).sum()


def _valid(context: ForwardContext) -> torch.Tensor | None:
    """Return a mask of this rank's tokens that are not padding, bool [t], or None without padding."""
    return None if context.padding is None else ~context.padding


def _sharing(context: ForwardContext, cp: Axis) -> list[Axis]:
    """Return the axes whose ranks share a microbatch, beginning with the fastest-varying axis."""
    return [*([context.tp] if context.sequence else []), cp]


def _whole(x: torch.Tensor, axes: list[Axis]) -> torch.Tensor:
    """Gather values of tokens, [t, ...], over the ranks that share the microbatch, in the order of ranks."""
    for axis in axes:
        x = all_gather(x, axis)
    return x


def _own_part(whole: torch.Tensor, axes: list[Axis]) -> torch.Tensor:
    """Return this rank's shard of a gathered tensor, the inverse of `_whole`."""
    for axis in reversed(axes):
        whole = local_shard(whole, axis)
    return whole
