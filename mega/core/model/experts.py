"""A mixture of experts: a router chooses of many feed-forward networks those that a token passes.

    1 route      logits, probabilities and choice of our tokens; losses of the router ride on them
    2 drop       what exceeds the capacity of an expert, counted over the microbatch
    3 enter      the region of ranks that share these tokens (parallel/experts.py)
    4 there      one row for each choice, sorted by expert, on the rank that holds the expert
    5 experts    probability x activation(x W_up^T) W_down^T, by grouped GEMMs (ops/grouped.py)
    6 back       rows to their tokens, which add them up
    7 combine    what the ranks of the region have made

The shared expert is an ordinary feed-forward network next to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from mega.core.architecture.adapters import AdapterSpec
from mega.core.architecture.layer import Experts
from mega.core.model.forward import ForwardContext
from mega.core.model.mixers import FeedForward, LayerPlace, MixerModule
from mega.core.model.residual import Tensors
from mega.core.model.router import ExpertRouter, RoutedTokens
from mega.core.ops.activation import gated_kind
from mega.core.ops.autograd import FunctionContext
from mega.core.ops.grouped import GroupedMatmuls, GroupedRows
from mega.core.parallel.experts import ExpertRegion, RowExchange, permute, pick, plan_rows, unpermute
from mega.core.parallel.weight import ParameterFactory, Weight


class _GroupedMatmul(torch.autograd.Function):
    """x [rows, in] -> [rows, out]; the weight's gradient goes where its layer wants it."""

    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[Weight, torch.Tensor, torch.dtype]],
        x: torch.Tensor,
        weight: Weight,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        ctx.state = weight, ends, x.dtype
        if weight.requires_grad:
            ctx.save_for_backward(x)
        matmuls: Any = weight.ops.matmuls
        y: torch.Tensor = matmuls.grouped(x, weight.to(x.dtype), ends)
        return y

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[Weight, torch.Tensor, torch.dtype]], grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        weight, ends, dtype = ctx.state
        grouped, matmuls = GroupedRows(grad.contiguous(), ends), weight.ops.matmuls
        grad_x = matmuls.grouped_dgrad(grouped, weight.to(dtype))  # type: ignore[attr-defined]
        return grad_x, weight.add_wgrad(grouped, *ctx.saved_tensors) if weight.requires_grad else None, None


class GroupedAdapter(nn.Module):
    """Low-rank adapters of experts' linears that are one GEMM (parallel/adapter.py): y + scale (x A_e^T) B_e^T.

    parts: of each linear, the adapters of all experts here; () where it has none.
    """

    def __init__(self, factory: ParameterFactory, parts: Sequence[Sequence[AdapterSpec]]):
        super().__init__()
        there = [part for part in parts if part]
        self.down = factory(*(spec.down for of_expert in zip(*there, strict=True) for spec in of_expert))
        self.up = nn.ParameterList(factory(*(spec.up for spec in part)) for part in there)
        self.rank, self.scale = there[0][0].down.shape[0], there[0][0].scale
        self._there = [bool(part) for part in parts]

    def forward(self, x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = _GroupedMatmul.apply(x, self.down, ends) * self.scale  # type: ignore[no-untyped-call]
        pairs = zip(h.split(self.rank, 1), self.up, strict=True)
        made = iter([_GroupedMatmul.apply(part, up, ends) for part, up in pairs])  # type: ignore[no-untyped-call]
        wide = y.shape[1] // len(self._there)
        return y + torch.cat([next(made) if there else y.new_zeros(len(y), wide) for there in self._there], 1)


class GroupedExperts(nn.Module):
    """The experts that one rank holds, or its part of them, on rows that are sorted by expert."""

    def __init__(self, factory: ParameterFactory, value: Experts, tensors: Tensors, region: ExpertRegion):
        super().__init__()
        self.value, self.ops, self.first = value.expert, factory.ops, region.first
        self.activation = gated_kind(value.expert.activation) if value.expert.gated else value.expert.activation
        own = replace(factory.ops, matmuls=GroupedMatmuls(factory.ops.accumulate))
        self._factory = replace(factory, ops=own)
        self._inner = ("gate", "up") if value.expert.gated else ("up",)

        def held(*which: str, kind: str) -> Weight | None:
            names = [
                f"{value.expert.name}.{number}.{one}_proj.{kind}" for number in region.experts_here for one in which
            ]
            return self._factory(*(tensors[name] for name in names)) if names[0] in tensors else None

        up, down = held(*self._inner, kind="weight"), held("down", kind="weight")
        assert up is not None and down is not None
        self.up, self.down = up, down
        self.up_bias, self.down_bias = held(*self._inner, kind="bias"), held("down", kind="bias")
        self.up_adapter: GroupedAdapter | None = None
        self.down_adapter: GroupedAdapter | None = None

    def adapt(self, specs: Mapping[str, AdapterSpec]) -> None:
        """Add the adapters of our linears. specs: name of a linear's weight -> its adapter."""

        def adapter(weight: Weight, count: int) -> GroupedAdapter | None:
            names = [segment.shard.name for segment in weight.segments]
            parts = [[specs[name] for name in names[first::count] if name in specs] for first in range(count)]
            return GroupedAdapter(self._factory, parts) if any(parts) else None

        self.up_adapter, self.down_adapter = adapter(self.up, len(self._inner)), adapter(self.down, 1)

    def forward(self, tokens: torch.Tensor, probabilities: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """tokens [n, h], probabilities [n], counts int64 [experts here] -> [n, h], of ranks that cut them a part."""
        ends = counts.cumsum(0).to(torch.int32)
        wide = _GroupedMatmul.apply(tokens, self.up, ends)  # type: ignore[no-untyped-call]
        if self.up_adapter is not None:
            wide = self.up_adapter(tokens, wide, ends)
        if self.up_bias is not None:
            wide = wide + _biases(self.up_bias, counts, len(tokens))
        weighted = self.ops.activate_weighted(wide, probabilities, self.activation)
        out: torch.Tensor = _GroupedMatmul.apply(weighted, self.down, ends)  # type: ignore[no-untyped-call]
        if self.down_adapter is not None:
            out = self.down_adapter(weighted, out, ends)
        if self.down_bias is not None:
            once = probabilities * float(self.first)  # the parts of all ranks are added up
            out = out + (_biases(self.down_bias, counts, len(tokens)) * once[:, None]).to(out.dtype)
        return out


def _biases(bias: Weight, counts: torch.Tensor, count: int) -> torch.Tensor:
    """The bias of each token's expert, [count, out]."""
    if counts.is_meta:
        return bias.unflatten(0, (len(counts), -1))[:1].expand(count, -1)
    numbers = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=count)
    return bias.unflatten(0, (len(counts), -1)).index_select(0, numbers)


class ExpertLayer(MixerModule):
    """A mixture; `forward` gives what is added to the stream."""

    def __init__(self, factory: ParameterFactory, value: Experts, tensors: Tensors, place: LayerPlace):
        super().__init__(place)
        self.value, self.sequence = value, place.region.sequence
        self.router = ExpertRouter(factory, value, tensors, place)
        self.region = ExpertRegion(place.region, place.experts, value.count, gathers=place.gathers_experts)
        self.experts = GroupedExperts(factory, value, tensors, self.region)
        self.shared, self.shared_gate = None, None
        if value.shared is not None:
            self.shared = FeedForward(factory, value.shared, tensors, place)
            if value.shared_gate:
                self.shared_gate = factory(tensors[f"{value.name}.shared_expert_gate.weight"])

    @property
    def bias(self) -> Weight | None:
        return None

    def finish(self, mixed: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return mixed

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        # 1 and 2
        routed: RoutedTokens = self.router(x, context)
        # 3
        x, region = routed.x, self.region
        entered, weights, which = region.enter(x), region.enter(routed.probabilities), region.gather(routed.chosen)
        kept = None if routed.kept is None else region.gather(routed.kept)
        # 4 to 6
        y = self._exchanged(entered, weights, which, kept, routed.limit)
        # 7
        y = region.combine(y)
        return y if self.shared is None else y + self._shared(self.shared, x, context)

    def _exchanged(
        self,
        x: torch.Tensor,
        probabilities: torch.Tensor,
        chosen: torch.Tensor,
        kept: torch.Tensor | None,
        limit: int | None,
    ) -> torch.Tensor:
        """Of tokens [t, h] what the experts on these ranks make, [t, h]."""
        ep, count, total = self.region.exchange, self.value.count, self.experts.ops.sum_rows
        if ep.size == 1:
            plan = plan_rows(chosen, kept, self.region.experts_here, count)
            mixed = self.experts(permute(x, plan, total), pick(probabilities, plan), plan.counts)
            return unpermute(mixed, plan, total)
        padded = limit is not None and self.value.capacity is not None and self.value.capacity.padded
        plan = plan_rows(chosen, kept, range(count), count, limit if padded else None)
        exchange = RowExchange(plan.counts, ep, even=padded)
        tokens, weights = exchange.there(permute(x, plan, total)), exchange.there(pick(probabilities, plan))
        return unpermute(exchange.back(self.experts(tokens, weights, exchange.counts)), plan, total)

    def _shared(self, shared: FeedForward, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """What the shared expert makes of our tokens."""
        y = shared.finish(shared(x, context), context)
        if shared.bias is not None:
            y = y + shared.bias
        return y if self.shared_gate is None else y * F.linear(x, self.shared_gate).sigmoid()


class ExpertLoad(NamedTuple):
    """Of one step. counts: float64 [mixtures, experts], choices of each. dropped: float64 [mixtures]."""

    counts: torch.Tensor
    dropped: torch.Tensor

    def metrics(self) -> Mapping[str, torch.Tensor]:
        """largest_share: of a mixture's choices that one expert gets, at the most. dropped_share: of all choices.
        tokens_of_expert_N: in the mean over the mixtures."""
        total = self.counts.sum()
        shares = self.counts / self.counts.sum(1, keepdim=True).clamp(min=1)
        found = {"largest_share": shares.max(), "dropped_share": self.dropped.sum() / total.clamp(min=1)}
        return found | {f"tokens_of_expert_{number}": mean for number, mean in enumerate(self.counts.mean(0))}
