"""A mixture of experts, in which a router sends each token to a few of many feed-forward networks.

    1 route      compute logits, probabilities and experts for this rank's tokens; attach the router's losses
    2 drop       drop choices that exceed an expert's capacity, counted over the microbatch
    3 enter      enter the region of ranks that share these tokens (parallel/experts.py)
    4 dispatch   send one row for each choice, sorted by expert, to the rank that holds the expert
    5 experts    compute probability x activation(x W_up^T) W_down^T by grouped GEMMs (ops/grouped.py)
    6 return     send rows back to the ranks of their tokens; sum the rows of each token
    7 combine    combine the outputs of the ranks of the region

The shared expert, if there is one, is a feed-forward network that is applied to every token.
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
    """Multiply x [rows, in] by the experts' weights, and return [rows, out]. `Weight.add_wgrad` handles the weight's
    gradient."""

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
    """Low-rank adapters of the experts' linear layers, fused into one GEMM: y + scale (x A_e^T) B_e^T (see
    parallel/adapter.py).

    parts: for each linear layer, the adapters of all local experts, or () if the layer has no adapters.
    """

    def __init__(self, factory: ParameterFactory, parts: Sequence[Sequence[AdapterSpec]]):
        super().__init__()
        adapted = [part for part in parts if part]
        self.down = factory(*(spec.down for of_expert in zip(*adapted, strict=True) for spec in of_expert))
        self.up = nn.ParameterList(factory(*(spec.up for spec in part)) for part in adapted)
        self.rank, self.scale = adapted[0][0].down.shape[0], adapted[0][0].scale
        self._there = [bool(part) for part in parts]

    def forward(self, x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = _GroupedMatmul.apply(x, self.down, ends) * self.scale  # type: ignore[no-untyped-call]
        pairs = zip(h.split(self.rank, 1), self.up, strict=True)
        outputs = iter([_GroupedMatmul.apply(part, up, ends) for part, up in pairs])  # type: ignore[no-untyped-call]
        width = y.shape[1] // len(self._there)
        return y + torch.cat(
            [next(outputs) if is_adapted else y.new_zeros(len(y), width) for is_adapted in self._there], 1
        )


class GroupedExperts(nn.Module):
    """The experts, or shards of experts, on one rank, applied to rows that are sorted by expert."""

    def __init__(self, factory: ParameterFactory, value: Experts, tensors: Tensors, region: ExpertRegion):
        super().__init__()
        self.value, self.ops, self.first = value.expert, factory.ops, region.first
        self.activation = gated_kind(value.expert.activation) if value.expert.gated else value.expert.activation
        grouped_ops = replace(factory.ops, matmuls=GroupedMatmuls(factory.ops.accumulate))
        self._factory = replace(factory, ops=grouped_ops)
        self._inner = ("gate", "up") if value.expert.gated else ("up",)

        def weight_of(*projections: str, kind: str) -> Weight | None:
            names = [
                f"{value.expert.name}.{number}.{projection}_proj.{kind}"
                for number in region.experts_here
                for projection in projections
            ]
            return self._factory(*(tensors[name] for name in names)) if names[0] in tensors else None

        up, down = weight_of(*self._inner, kind="weight"), weight_of("down", kind="weight")
        assert up is not None and down is not None
        self.up, self.down = up, down
        self.up_bias, self.down_bias = weight_of(*self._inner, kind="bias"), weight_of("down", kind="bias")
        self.up_adapter: GroupedAdapter | None = None
        self.down_adapter: GroupedAdapter | None = None

    def adapt(self, specs: Mapping[str, AdapterSpec]) -> None:
        """Add the adapters of the experts' linear layers. specs: name of a layer's weight -> its adapter."""

        def adapter(weight: Weight, count: int) -> GroupedAdapter | None:
            names = [segment.shard.name for segment in weight.segments]
            parts = [[specs[name] for name in names[first::count] if name in specs] for first in range(count)]
            return GroupedAdapter(self._factory, parts) if any(parts) else None

        self.up_adapter, self.down_adapter = adapter(self.up, len(self._inner)), adapter(self.down, 1)

    def forward(self, tokens: torch.Tensor, probabilities: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [n, h], which are partial sums if ranks shard the experts. tokens: [n, h], sorted
        by expert. probabilities: [n]. counts: int64 [local experts]."""
        ends = counts.cumsum(0).to(torch.int32)
        hidden = _GroupedMatmul.apply(tokens, self.up, ends)  # type: ignore[no-untyped-call]
        if self.up_adapter is not None:
            hidden = self.up_adapter(tokens, hidden, ends)
        if self.up_bias is not None:
            hidden = hidden + _biases(self.up_bias, counts, len(tokens))
        weighted = self.ops.activate_weighted(hidden, probabilities, self.activation)
        out: torch.Tensor = _GroupedMatmul.apply(weighted, self.down, ends)  # type: ignore[no-untyped-call]
        if self.down_adapter is not None:
            out = self.down_adapter(weighted, out, ends)
        if self.down_bias is not None:
            once = probabilities * float(self.first)  # outputs are summed over ranks, so one rank adds the bias
            out = out + (_biases(self.down_bias, counts, len(tokens)) * once[:, None]).to(out.dtype)
        return out


def _biases(bias: Weight, counts: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bias of each row's expert, [count, out]."""
    if counts.is_meta:
        return bias.unflatten(0, (len(counts), -1))[:1].expand(count, -1)
    numbers = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=count)
    return bias.unflatten(0, (len(counts), -1)).index_select(0, numbers)


class ExpertLayer(MixerModule):
    """The mixer of an MoE layer. `forward` returns the whole output of the branch, so `finish` returns its input
    unchanged."""

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
        # steps 1 and 2
        routed: RoutedTokens = self.router(x, context)
        # 3
        x, region = routed.x, self.region
        entered, weights, all_chosen = region.enter(x), region.enter(routed.probabilities), region.gather(routed.chosen)
        all_kept = None if routed.kept is None else region.gather(routed.kept)
        # steps 4 to 6
        y = self._run_experts(entered, weights, all_chosen, all_kept, routed.limit)
        # 7
        y = region.combine(y)
        return y if self.shared is None else y + self.shared_output(self.shared, x, context)

    def _run_experts(
        self,
        x: torch.Tensor,
        probabilities: torch.Tensor,
        chosen: torch.Tensor,
        kept: torch.Tensor | None,
        limit: int | None,
    ) -> torch.Tensor:
        """Return the outputs [t, h] of the experts on these ranks for tokens [t, h]."""
        ep, count, total = self.region.exchange, self.value.count, self.experts.ops.sum_rows
        if ep.size == 1:
            plan = plan_rows(chosen, kept, self.region.experts_here, count)
            outputs = self.experts(permute(x, plan, total), pick(probabilities, plan), plan.counts)
            return unpermute(outputs, plan, total)
        padded = limit is not None and self.value.capacity is not None and self.value.capacity.padded
        plan = plan_rows(chosen, kept, range(count), count, limit if padded else None)
        exchange = RowExchange(plan.counts, ep, even=padded)
        tokens, weights = exchange.there(permute(x, plan, total)), exchange.there(pick(probabilities, plan))
        return unpermute(exchange.back(self.experts(tokens, weights, exchange.counts)), plan, total)

    def shared_output(self, shared: FeedForward, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the output of the shared expert for this rank's tokens."""
        y = shared.finish(shared(x, context), context)
        if shared.bias is not None:
            y = y + shared.bias
        return y if self.shared_gate is None else y * F.linear(x, self.shared_gate).sigmoid()


class ExpertLoad(NamedTuple):
    """The load of experts in one step."""

    counts: torch.Tensor  # float64 [MoE layers, experts]: how many times each expert was chosen
    dropped: torch.Tensor  # float64 [MoE layers]: number of dropped choices

    def metrics(self) -> Mapping[str, torch.Tensor]:
        """Return metrics for the log.

        largest_share: largest fraction of an MoE layer's choices that select the same expert. dropped_share: fraction
        of all choices that were dropped. tokens_of_expert_N: how many times expert N was chosen, averaged over MoE
        layers.
        """
        total = self.counts.sum()
        shares = self.counts / self.counts.sum(1, keepdim=True).clamp(min=1)
        metrics = {"largest_share": shares.max(), "dropped_share": self.dropped.sum() / total.clamp(min=1)}
        return metrics | {f"tokens_of_expert_{number}": mean for number, mean in enumerate(self.counts.mean(0))}
