"""Dispatches rows of tokens to their experts and combines the results, by sorting, gathering and exchanging rows over
ranks.

    tokens [t, h], each routed to k experts                                                   backward
      1 gather     over ranks that share experts, so that each has all their tokens          reduce-scatter
      2 permute    one row for each choice, sorted by expert                                  sum over the choices
      3 exchange   each row to the rank of its expert, if ranks have different tokens         exchange back
      4 sort       the rows of all sources by expert

`RowPlan` contains the positions of rows. Autograd functions move the rows, and sum rows in a fixed order. The number of
rows that a rank gets is computed on the device. The host must therefore wait for the device if ranks exchange rows or
if a rank computes only some of the rows. This module does not depend on the router or on weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from mega.core.ops import observe
from mega.core.ops.autograd import FunctionContext
from mega.core.ops.rows import sum_rows
from mega.core.parallel.collectives import Finished, all_gather, conjugate, exchange, reduce_scatter, summed
from mega.core.parallel.mesh import SINGLE, Axis, Mesh
from mega.core.parallel.region import Region


class ExpertAxes(NamedTuple):
    """The axes of the grid of ranks that experts use (mesh.py)."""

    ep: Axis = SINGLE  # ranks that hold different experts
    etp: Axis = SINGLE  # tensor ranks of each expert
    both: Axis = SINGLE  # etp x ep
    tokens: Axis = SINGLE  # ranks that have different samples or different columns of samples

    @classmethod
    def of(cls, mesh: Mesh) -> ExpertAxes:
        return cls(mesh.ep, mesh.etp, mesh.axis("etp", "ep"), mesh.tokens)


NO_RANKS = ExpertAxes()
"""The axes on a single rank."""


@dataclass(frozen=True)
class RowPlan:
    """Rows sorted by expert.

    token    0 1 2                    rows sorted by expert   0 0 0 1 1 1
    experts  0,1  1,0  0,1     ->     token                   0 1 2 0 1 2
    """

    token: torch.Tensor
    """int64 [rows]: the token of each row; t for a padding row."""
    row_of: torch.Tensor
    """int64 [t, k]: index of the row for each token's choice of an expert. For a choice without a row, it is the number
    of rows."""
    counts: torch.Tensor
    """int64 [experts]: number of rows of each expert."""
    whole: bool
    """Whether every row belongs to a token and every choice has a row."""


def plan_rows(
    chosen: torch.Tensor, kept: torch.Tensor | None, experts: range, count: int, limit: int | None = None
) -> RowPlan:
    """Plan one row for each kept choice that selects one of `experts`. chosen: int64 [t, k], the experts chosen by each
    token.

    kept: bool [t, k]; None if all choices are kept. experts: the experts of this rank. count: number of experts on all
    ranks. limit: if set, every expert gets exactly this number of rows (padded).
    """
    tokens, k = chosen.shape
    local, local_experts = chosen.flatten() - experts.start, len(experts)
    whole = local_experts == count and kept is None
    if not whole:
        # Choices of other ranks' experts get the expert index `local_experts`, are sorted to the end, and are cut off.
        valid = (local >= 0) & (local < local_experts)
        local = torch.where(valid if kept is None else valid & kept.flatten(), local, local_experts)
    order = local.int().argsort(stable=True)  # int32 sorts in half the time of int64
    counts = torch.zeros(local_experts + 1, dtype=torch.int64, device=local.device)
    counts = counts.index_add_(0, local, torch.ones_like(local))[:local_experts]
    rows = len(local) if whole else _on_host(counts, -(-len(local) * local_experts // count))
    order = order[:rows]
    if limit is not None:
        return _padded(order, local, counts, limit, tokens, k)
    row_of = local.new_full((tokens * k,), rows)
    row_of[order] = torch.arange(rows, device=local.device)
    return RowPlan(order // k, row_of.view(tokens, k), counts, whole)


def _padded(order: torch.Tensor, local: torch.Tensor, counts: torch.Tensor, limit: int, tokens: int, k: int) -> RowPlan:
    """Return the plan in which every expert has `limit` rows. The last rows of an expert may be padding."""
    row_expert = local[order]
    within = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[row_expert]
    positions, rows = row_expert * limit + within, len(counts) * limit
    token = order.new_full((rows,), tokens)
    token[positions] = order // k
    row_of = local.new_full((tokens * k,), rows)
    row_of[order] = positions
    return RowPlan(token, row_of.view(tokens, k), torch.full_like(counts, limit), False)


def _on_host(counts: torch.Tensor, even: int) -> int:
    """Return the sum of `counts` as an int, which makes the host wait. Meta tensors have no values, so return `even`
    for them."""
    return even if counts.is_meta else int(counts.sum())


SumRows = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
"""`ops.rows.sum_rows`."""


def permute(x: torch.Tensor, plan: RowPlan, total: SumRows = sum_rows) -> torch.Tensor:
    """Copy tokens into rows: [t, ...] -> [rows, ...]; padding rows are zeros.

    total: function that sums the gradients of a token's rows.
    """
    return _Permute.apply(x, plan, total)  # type: ignore[no-any-return, no-untyped-call]


def unpermute(rows: torch.Tensor, plan: RowPlan, total: SumRows = sum_rows) -> torch.Tensor:
    """Sum the rows of each token with `total`, in the order of the token's choices: [rows, ...] -> [t, ...]."""
    return _Unpermute.apply(rows, plan, total)  # type: ignore[no-any-return, no-untyped-call]


def _spread(x: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    if not plan.whole:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x.index_select(0, plan.token)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[RowPlan, SumRows]], x: torch.Tensor, plan: RowPlan, total: SumRows
    ) -> torch.Tensor:
        ctx.state = plan, total
        return _spread(x, plan)

    @staticmethod
    def backward(ctx: FunctionContext[tuple[RowPlan, SumRows]], grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        plan, total = ctx.state
        return total(grad, plan.row_of, plan.whole), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext[RowPlan], rows: torch.Tensor, plan: RowPlan, total: SumRows) -> torch.Tensor:
        ctx.state = plan
        return total(rows, plan.row_of, plan.whole)

    @staticmethod
    def backward(ctx: FunctionContext[RowPlan], grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _spread(grad, ctx.state), None, None


def pick(x: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """Convert one value per choice, x [t, k], to one value per row, [rows]; 0 for padding rows."""
    flat = x.flatten()
    if not plan.whole:
        flat = torch.cat([flat, flat.new_zeros(1)])
    choices = torch.arange(plan.row_of.numel(), device=x.device).view_as(plan.row_of)
    source = choices.new_full((len(plan.token) + 1,), plan.row_of.numel())
    source[plan.row_of.flatten()] = choices.flatten()
    return flat.index_select(0, source[:-1])


class RowExchange:
    """An exchange of rows between the ranks of `ep`, from a token's rank to its expert's rank and back.

    Rows are sorted by expert on both sides. sent: int64 [all experts], number of rows that this rank has for each
    expert. even: whether every rank sends the same number of rows to every expert, so that no sizes are exchanged.
    """

    def __init__(self, sent: torch.Tensor, ep: Axis, *, even: bool):
        self._ep, local_experts = ep, len(sent) // ep.size
        sent = sent.view(ep.size, local_experts)
        received = sent if even else _swapped(sent, ep)
        # sent: [ep, local experts], number of rows for each expert of each rank.
        # received: [ep, local experts], number of rows from each rank for each expert of this rank.
        if sent.is_meta:  # assume an even load
            self._there = self._back = [0] * ep.size
            self._meta = True
        else:
            self._meta = False
            self._there, self._back = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        self.counts = received.sum(0)
        owners = torch.arange(local_experts, device=sent.device).repeat(ep.size)
        total = None if self._meta else sum(self._back)
        self._owners = None if total is None else owners.repeat_interleave(received.flatten(), output_size=total)

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Dispatch rows: [rows, ...] -> [rows of this rank's experts, ...]."""
        received = _Exchange.apply(rows, self, True)  # type: ignore[no-untyped-call]
        return permute(received, self._by_expert(received))

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows back to their ranks of origin, as the inverse of `there`."""
        return _Exchange.apply(unpermute(rows, self._by_expert(rows)), self, False)  # type: ignore[no-any-return, no-untyped-call]

    def _by_expert(self, rows: torch.Tensor) -> RowPlan:
        if self._owners is None:
            order = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        else:
            order = self._owners.argsort(stable=True)
        row_of = torch.empty_like(order)
        row_of[order] = torch.arange(len(order), device=order.device)
        return RowPlan(order, row_of[:, None], self.counts, True)

    def move(self, x: torch.Tensor, forwards: bool) -> torch.Tensor:
        """Exchange rows without sorting them. forwards: whether rows are sent from tokens to experts rather than from
        experts to tokens."""
        if x.is_meta:
            Finished(waited=observe.exchange("all-to-all", x.nbytes, self._ep.ranks)).wait()
            return torch.empty_like(x)
        send_sizes, receive_sizes = (self._there, self._back) if forwards else (self._back, self._there)
        return exchange(x, self._ep, send_sizes, receive_sizes)


def _swapped(counts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Send row r of counts [size, n] to rank r. The received rows are ordered by source rank."""
    out = torch.empty_like(counts)
    if counts.is_meta:
        Finished(waited=observe.exchange("all-to-all", counts.nbytes, axis.ranks)).wait()
    else:
        dist.all_to_all_single(out, counts.contiguous(), group=axis.group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[RowExchange, bool]], x: torch.Tensor, exchange: RowExchange, forwards: bool
    ) -> torch.Tensor:
        ctx.state = exchange, forwards
        return exchange.move(x, forwards)

    @staticmethod
    def backward(ctx: FunctionContext[tuple[RowExchange, bool]], grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        exchange, forwards = ctx.state
        return exchange.move(grad, not forwards), None, None


class ExpertRegion:
    """The division of an MoE layer's work among ranks. It determines which ranks have the same tokens, which experts
    this rank holds, and which rows are exchanged.

    Without sequence parallelism all tensor ranks have the same tokens. Either each rank holds a shard of every expert,
    or the ranks hold different experts; outputs are summed over the ranks. With sequence parallelism, or one tensor
    rank, all ranks have different tokens. The tokens are gathered over the ranks that share experts (etp). If `gathers`
    is set, they are also gathered over the ranks that hold different experts (ep); otherwise rows are exchanged over
    ep.
    """

    def __init__(self, region: Region, axes: ExpertAxes, experts: int, *, gathers: bool):
        local_experts = experts // axes.ep.size
        self.experts_here = range(axes.ep.index * local_experts, (axes.ep.index + 1) * local_experts)
        self.first = axes.etp.first
        same_tokens = region.size > 1 and not region.sequence
        within = same_tokens and axes.etp.size * axes.ep.size == region.size
        assert not same_tokens or within or axes.etp.size == region.size, "tensor ranks have the same tokens"
        self._same = same_tokens
        self._shared = region.axis if same_tokens else axes.both if gathers else axes.etp
        self.exchange = SINGLE if within or (gathers and not same_tokens) else axes.ep

    @property
    def summed_over(self) -> Axis | None:
        """The axis over which the outputs of the local experts are summed, or None if tokens are sent between ranks."""
        if self.exchange.size > 1 or not (self._same or self._shared.size == 1):
            return None
        return self._shared

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens [t, ...] for the experts of this rank, gathered from all ranks that share the work. The
        backward pass sums the gradients over these ranks."""
        if self._shared.size == 1:
            return x
        pair = (_unchanged, summed) if self._same else (all_gather, reduce_scatter)
        return conjugate(x, self._shared, *pair)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather tokens like `enter`, but without a gradient."""
        return x if self._same else all_gather(x, self._shared)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """Sum y over the ranks that share the work, and return the sums for this rank's tokens."""
        if self._shared.size == 1:
            return y
        pair = (summed, _unchanged) if self._same else (reduce_scatter, all_gather)
        return conjugate(y, self._shared, *pair)


def _unchanged(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.view_as(x)
