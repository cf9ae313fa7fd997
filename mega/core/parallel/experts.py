"""Rows of tokens on their way to experts and back: sorted by expert, gathered or exchanged over ranks.

    tokens [t, h], of which each chose k experts
      1 gather     over ranks that share experts, so that all see the tokens of all           <->  reduce-scatter
      2 permute    one row for each choice, sorted by expert                                  <->  sum over the choices
      3 exchange   each row to the rank that holds its expert, where ranks see other tokens   <->  the same backwards
      4 sort       rows of all sources by expert

`RowPlan` says where rows are; moving them is a pair for autograd, whose sums have a fixed order. How many rows a rank
gets is known on the device alone: the host waits for one exchange of sizes where ranks exchange rows, and for a count
where a rank takes some of the rows only. Knows no router and no weights.
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
    """The axes of the experts' grid. ep: ranks that hold other experts. etp: those that share each of them.
    both: all these. tokens: ranks that see other samples, or other parts of them."""

    ep: Axis = SINGLE
    etp: Axis = SINGLE
    both: Axis = SINGLE
    tokens: Axis = SINGLE

    @classmethod
    def of(cls, mesh: Mesh) -> ExpertAxes:
        return cls(mesh.ep, mesh.etp, mesh.axis("etp", "ep"), mesh.tokens)


NO_RANKS = ExpertAxes()
"""Of one rank."""


@dataclass(frozen=True)
class RowPlan:
    """Rows sorted by expert. token: int64 [rows], which token each is of, t where it is of none. row_of: int64 [t, k],
    the row of each choice, `rows` where it has none. counts: int64 [experts]. whole: every row is a token's and every
    choice has a row."""

    token: torch.Tensor
    row_of: torch.Tensor
    counts: torch.Tensor
    whole: bool


def plan_rows(
    chosen: torch.Tensor, kept: torch.Tensor | None, experts: range, count: int, limit: int | None = None
) -> RowPlan:
    """A row for each choice int64 [t, k] of one of `experts`, of `count` in all, that is kept.

    limit: every expert gets exactly as many rows.
    """
    tokens, k = chosen.shape
    local, here = chosen.flatten() - experts.start, len(experts)
    whole = here == count and kept is None
    if not whole:
        valid = (local >= 0) & (local < here)
        local = torch.where(valid if kept is None else valid & kept.flatten(), local, here)
    order = local.int().argsort(stable=True)  # in half the time of int64
    counts = torch.zeros(here + 1, dtype=torch.int64, device=local.device)
    counts = counts.index_add_(0, local, torch.ones_like(local))[:here]
    rows = len(local) if whole else _on_host(counts, -(-len(local) * here // count))
    order = order[:rows]
    if limit is not None:
        return _padded(order, local, counts, limit, tokens, k)
    row_of = local.new_full((tokens * k,), rows)
    row_of[order] = torch.arange(rows, device=local.device)
    return RowPlan(order // k, row_of.view(tokens, k), counts, whole)


def _padded(order: torch.Tensor, local: torch.Tensor, counts: torch.Tensor, limit: int, tokens: int, k: int) -> RowPlan:
    """Every expert has `limit` rows, of which the last may be of no token."""
    own = local[order]
    within = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[own]
    positions, rows = own * limit + within, len(counts) * limit
    token = order.new_full((rows,), tokens)
    token[positions] = order // k
    row_of = local.new_full((tokens * k,), rows)
    row_of[order] = positions
    return RowPlan(token, row_of.view(tokens, k), torch.full_like(counts, limit), False)


def _on_host(counts: torch.Tensor, even: int) -> int:
    """The sum of counts, for which the host waits; of meta tensors what an even load makes."""
    return even if counts.is_meta else int(counts.sum())


SumRows = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
"""`ops.rows.sum_rows`."""


def permute(x: torch.Tensor, plan: RowPlan, total: SumRows = sum_rows) -> torch.Tensor:
    """[t, ...] -> [rows, ...]; rows of no token are zeros. total: of the gradients of a token's rows."""
    return _Permute.apply(x, plan, total)  # type: ignore[no-any-return, no-untyped-call]


def unpermute(rows: torch.Tensor, plan: RowPlan, total: SumRows = sum_rows) -> torch.Tensor:
    """[rows, ...] -> [t, ...]: each token's rows added up in the order of its choices, by `total`."""
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
    """Of values [t, k] of choices those of the rows, [rows]; 0 for rows of no token."""
    flat = x.flatten()
    if not plan.whole:
        flat = torch.cat([flat, flat.new_zeros(1)])
    choices = torch.arange(plan.row_of.numel(), device=x.device).view_as(plan.row_of)
    source = choices.new_full((len(plan.token) + 1,), plan.row_of.numel())
    source[plan.row_of.flatten()] = choices.flatten()
    return flat.index_select(0, source[:-1])


class RowExchange:
    """Rows, sorted by expert, to the ranks of `ep` that hold their experts, sorted by expert there, and back.

    sent: int64 [experts of all], our rows of each. even: every rank sends equally many rows of every expert, so that
    no sizes need be exchanged.
    """

    def __init__(self, sent: torch.Tensor, ep: Axis, *, even: bool):
        self._ep, here = ep, len(sent) // ep.size
        sent = sent.view(ep.size, here)
        came = sent if even else _swapped(sent, ep)
        if sent.is_meta:  # an even load
            self._there = self._back = [0] * ep.size
            self._meta = True
        else:
            self._meta = False
            self._there, self._back = torch.stack([sent.sum(1), came.sum(1)]).tolist()
        self.counts = came.sum(0)
        owners = torch.arange(here, device=sent.device).repeat(ep.size)
        total = None if self._meta else sum(self._back)
        self._owners = None if total is None else owners.repeat_interleave(came.flatten(), output_size=total)

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [rows of our experts, ...]."""
        arrived = _Exchange.apply(rows, self, True)  # type: ignore[no-untyped-call]
        return permute(arrived, self._by_expert(arrived))

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `there`."""
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
        """The exchange alone."""
        if x.is_meta:
            Finished(waited=observe.exchange("all-to-all", x.nbytes, self._ep.ranks)).wait()
            return torch.empty_like(x)
        to, of = (self._there, self._back) if forwards else (self._back, self._there)
        return exchange(x, self._ep, to, of)


def _swapped(counts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Row r of [size, n] goes to rank r; what comes lies in the order of its sources."""
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
    """How ranks share a mixture: which of them see the same tokens, which experts are ours, which rows travel.

    Where tensor ranks all have the same tokens (no sequence parallelism), either they cut every expert, or they hold
    other experts; outputs are summed over them. Otherwise all ranks have other tokens, which are gathered over those
    that share experts and, if `gathers`, over those that hold others too; else rows of these are exchanged.
    """

    def __init__(self, region: Region, axes: ExpertAxes, experts: int, *, gathers: bool):
        here = experts // axes.ep.size
        self.experts_here = range(axes.ep.index * here, (axes.ep.index + 1) * here)
        self.first = axes.etp.first
        same_tokens = region.size > 1 and not region.sequence
        within = same_tokens and axes.etp.size * axes.ep.size == region.size
        assert not same_tokens or within or axes.etp.size == region.size, "tensor ranks have the same tokens"
        self._same = same_tokens
        self._shared = region.axis if same_tokens else axes.both if gathers else axes.etp
        self.exchange = SINGLE if within or (gathers and not same_tokens) else axes.ep

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What all ranks that share our tokens have, one after the other, [t, ...]; its gradient is summed."""
        if self._shared.size == 1:
            return x
        pair = (_unchanged, summed) if self._same else (all_gather, reduce_scatter)
        return conjugate(x, self._shared, *pair)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The same without a gradient."""
        return x if self._same else all_gather(x, self._shared)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share our tokens, of which our own stay."""
        if self._shared.size == 1:
            return y
        pair = (summed, _unchanged) if self._same else (reduce_scatter, all_gather)
        return conjugate(y, self._shared, *pair)


def _unchanged(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.view_as(x)
