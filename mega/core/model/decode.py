"""One decoding step on a decoder's stage: the layers of model/layer.py as functions that are prepared for decoding.

For a small model, the host takes longer to launch operations than the device takes to run them. The functions of a
stage are therefore prepared once, without modules, gradients, dropout, sequence parallelism and ZeRO, which decoding
does not need. The inputs of a step are tensors whose shapes depend only on the number of tokens, and a step never
synchronizes with the host, so the step can be captured in a CUDA graph. If the suite of ops has kernels for few rows,
these kernels compute all common branches except the attention itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch

from mega.core.architecture.layer import Branch, Rope
from mega.core.model.ahead import AheadLayer
from mega.core.model.decode_neighbours import NeighbourStep
from mega.core.model.decoder import DecoderStage, Head
from mega.core.model.embedding import Embedding
from mega.core.model.experts import ExpertLayer
from mega.core.model.forward import ForwardContext
from mega.core.model.layer import NormStep, ResidualBranch, TransformerLayer, branch_function, run_parallel
from mega.core.model.mixers import FeedForward, SelfAttention
from mega.core.model.neighbours import ChunkAttention
from mega.core.model.residual import Normalization, ProjectionNorm, ResidualState
from mega.core.ops import few_experts
from mega.core.ops.activation import GATED
from mega.core.ops.few_experts import ExpertRule, ExpertWeights, FewExperts
from mega.core.ops.few_rows import FewRows, NormOf, Place, trusted
from mega.core.ops.heads import Rotary
from mega.core.ops.matmuls import Factor
from mega.core.ops.norm import factor_of, rms_norm_by
from mega.core.ops.rotary import rotate
from mega.core.parallel.collectives import first_problem
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.mesh import SINGLE
from mega.core.parallel.one_shot import Sum, by_group
from mega.core.parallel.vocab import logits


class KeyValueCache(Protocol):
    """A cache of the keys and values of earlier tokens."""

    @property
    def tables(self) -> Mapping[Rope, Rotary]:
        """cos and sin of all positions, for each type of rotary positions, in the format that the stage's ops need."""

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Store keys and values [tokens, 2 kv_heads, d] of one layer's new tokens, and attend to all visible tokens.

        q: [tokens, heads, d], the queries of the same tokens. Returns [tokens, heads x d].
        """

    def attend_new(self, layer: int, fused: torch.Tensor, rotary: Rotary | None, place: Place) -> torch.Tensor:
        """Store keys and values and attend, as in `__call__`. fused: [tokens, heads + 2 kv_heads, d], before the
        rotation of queries and keys.

        place: the kernel of `FewRows` that rotates queries and keys and stores keys and values.
        """


class DecodeContext(NamedTuple):
    """The inputs of one step that all branches share."""

    cache: KeyValueCache
    rotary: Sequence[Rotary | None]
    """cos and sin of the step's tokens: None, then an entry for each of the model's `ropes`."""
    neighbours: NeighbourStep | None = None
    """The neighbours that the tokens attend to; None in models without a retriever."""


@dataclass(frozen=True)
class DecodeBranch:
    """A branch for decoding: `BranchSteps` whose steps are functions."""

    value: Branch
    before: NormStep | None  # adds the previous branch to the stream and normalizes the sum
    after: NormStep | None
    mix: Callable[[torch.Tensor, DecodeContext], torch.Tensor]  # x -> mixed, the input of the last linear layer
    add: Callable[[torch.Tensor, torch.Tensor, DecodeContext], ResidualState]  # (stream, mixed) -> new stream
    alone: Callable[[torch.Tensor, DecodeContext], torch.Tensor]  # mixed -> output of the branch


class DecodeStep:
    """The decoding step of a pipeline stage, called as step(ids, positions, wanted, cache, *cargo). The weights must
    stay at their addresses.

    ids, positions: int64 [tokens], the next tokens of any sequences. The step returns the activations for the next
    stage, [tokens, h], or, on the last stage, logits [w, ids of this rank] of the tokens with the indices `wanted`,
    int64 [w]. sum_ranks: function that sums a branch's partial outputs, and embedding rows, over tensor ranks. If None,
    the tensor axis's collective is used.
    """

    def __init__(self, stage: DecoderStage, sum_ranks: Sum | None = None):
        assert not stage.region.sequence and stage.with_full_params is None
        assert all(attention.source == "self" for attention in stage.architecture.attentions)
        assert isinstance(stage.embedding, Embedding | None) and isinstance(stage.head, Head | None)
        self._embedding, self._head, self._ops = stage.embedding, stage.head, stage.ops
        self._sum = sum_ranks
        self._last_norm = None if self._head is None else _norm(self._head.norm)
        self._ropes = stage.architecture.ropes
        self.parts = DecodeParts(*_verified_kernels(stage), sum_ranks, (None, *self._ropes))
        self._functions = [
            each for layer in stage.layers for each in layer_functions(cast(TransformerLayer, layer), self.parts)
        ]
        self.keep: Callable[[torch.Tensor], object] | None = None
        """Function that is called in each step with the output of the final norm for all tokens, [tokens, h]. A CUDA
        graph of the step includes the work of this call."""

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        cache: KeyValueCache,
        *cargo: torch.Tensor,
        neighbours: NeighbourStep | None = None,
    ) -> torch.Tensor:
        x = cargo[0] if self._embedding is None else self._embedding.look_up(ids, positions, None, self._sum)
        stream, context = ResidualState(x), decode_context(cache, self._ropes, positions, neighbours)
        for function in self._functions:
            stream = function(stream, context)
        x = self._ops.added(*stream)
        if self._head is None or self._last_norm is None:
            return x
        if self.keep is None:
            normed = self._last_norm(ResidualState(x.index_select(0, wanted)))[1]
        else:
            all_normed = self._last_norm(ResidualState(x))[1]
            self.keep(all_normed)
            normed = all_normed.index_select(0, wanted)
        return logits(normed, self._head.weight, self._head.region, self._head.bias, self._head.shape)


def decode_context(
    cache: KeyValueCache, ropes: Sequence[Rope], positions: torch.Tensor, neighbours: NeighbourStep | None = None
) -> DecodeContext:
    """Return the inputs of a step for tokens at these positions."""
    rotary: list[Rotary | None] = [None]
    for rope in ropes:
        cos, sin = cache.tables[rope]
        rotary.append((cos.index_select(0, positions), sin.index_select(0, positions)))
    return DecodeContext(cache, rotary, neighbours)


def _verified_kernels(stage: DecoderStage) -> tuple[FewRows | None, FewExperts | None]:
    """Return the kernels for few rows, and the kernels for mixture-of-experts layers with few tokens. Kernels that fail
    a test on the device of any tensor rank are replaced with None on all tensor ranks."""
    ahead = stage.head.ahead if isinstance(stage.head, Head) else ()
    layers = *stage.layers, *(cast(AheadLayer, each).layer for each in ahead)
    modules = [module for layer in layers for module in layer.modules()]
    widths = {module.weight.shape[1]: None for module in modules if isinstance(module, ColumnLinear | RowLinear)}
    device, experts = next(stage.parameters()).device, None
    agree = partial(first_problem, axis=stage.region.axis, device=device)
    if any(isinstance(module, ExpertLayer) for module in modules):
        experts = few_experts.trusted(stage.ops.few_experts, stage.dtype, device, stage.architecture.hidden, agree)
    return trusted(stage.ops.few_rows, stage.dtype, device, list(widths), agree), experts


class DecodeParts(NamedTuple):
    """Objects that the functions of all layers share."""

    few: FewRows | None  # kernels for few rows
    experts: FewExperts | None  # kernels for MoE layers with few tokens
    sum_ranks: Sum | None  # sum over tensor ranks
    ropes: Sequence[Rope | None]  # types of rotary positions, in the order of `DecodeContext.rotary`


StreamFunction = Callable[[ResidualState, DecodeContext], ResidualState]


def layer_functions(layer: TransformerLayer, parts: DecodeParts) -> list[StreamFunction]:
    """Return a layer as a list of functions, to be called in order.

    Each function selects a branch by the number of rows: the fused branch for few rows, or else the prepared branch.
    """
    factors = [_factors(branch) if _has_steps(branch) else None for branch in layer.branches]
    usual = [
        _generic_branch(branch) if factors_of_branch is None else _prepared_branch(branch, factors_of_branch, parts)
        for branch, factors_of_branch in zip(layer.branches, factors, strict=True)
    ]
    if layer.value.parallel:
        before = None if layer.before is None else _norm(layer.before)
        return [lambda stream, context: run_parallel(usual, before, stream.sum(layer.ops), context)]
    branches = zip(layer.branches, usual, factors, strict=True)
    return [_by_number_of_tokens(branch_function(each[1]), _few_branch(*each, parts)) for each in branches]


class _FewBranch(NamedTuple):
    """A branch for few rows, and a function that returns whether the branch supports a given number of rows."""

    branch: DecodeBranch
    takes: Callable[[int], bool]


def _by_number_of_tokens(any_number: StreamFunction, few: _FewBranch | None) -> StreamFunction:
    if few is None:
        return any_number
    run, takes = branch_function(few.branch), few.takes
    return lambda stream, context: (run if takes(len(stream.x)) else any_number)(stream, context)


def _few_branch(
    branch: ResidualBranch, usual: DecodeBranch, factors: _Factors | None, parts: DecodeParts
) -> _FewBranch | None:
    """Return the branch for few rows, or None if no kernels implement this branch. usual: the branch for any number of
    rows."""
    if isinstance(branch.mixer, ExpertLayer):
        return _expert_branch(branch, branch.mixer, usual, parts)
    if factors is None or (fused := _fused_branch(branch, usual, factors, parts)) is None:
        return None
    takes, outer = parts.few.takes if parts.few is not None else lambda *_: False, factors.outer
    return _FewBranch(fused, lambda tokens: takes(tokens, outer))


class _Factors(NamedTuple):
    """Weights of the first and the last linear layer of a branch, in the format that the GEMMs need."""

    inner: Factor
    outer: Factor


def _has_steps(branch: ResidualBranch) -> bool:
    """Whether the branch's mixer has prepared steps for decoding. Other mixers run as in training."""
    return type(branch.mixer) in (SelfAttention, FeedForward)


def _first(branch: ResidualBranch) -> ColumnLinear:
    mixer: Any = branch.mixer
    first: ColumnLinear = mixer.up if isinstance(mixer, FeedForward) else mixer.qkv
    return first


def _factors(branch: ResidualBranch) -> _Factors:
    """Return the factors of a branch. The first bias is added by the GEMM in attention, but by the activation in a
    feed-forward network."""
    first, out = _first(branch), branch.mixer.out
    bias = None if isinstance(branch.mixer, FeedForward) else _bias(first)
    return _Factors(_factor(first, bias), _factor(out))


def _prepared_branch(branch: ResidualBranch, factors: _Factors, parts: DecodeParts) -> DecodeBranch:
    """Return a branch with prepared steps, for any number of rows."""
    mixer: Any = branch.mixer
    out, factor = branch.mixer.out, factors.outer
    multiply, bias, add_branch = _linear(out, factor, parts.sum_ranks), out.bias, branch.ops.added
    project = _linear(_first(branch), factors.inner)
    in_place = branch.ops.spread and bias is None and out.gemms.plain and out.region.size == 1
    transposed = factor.weight.t()

    def add(x: torch.Tensor, mixed: torch.Tensor, context: DecodeContext) -> ResidualState:
        # If no operation follows the last linear layer, one addmm computes the layer's output and adds the output to
        # the stream.
        if in_place and x.dtype == mixed.dtype:
            return ResidualState(x.addmm_(mixed, transposed))
        return ResidualState(x, multiply(mixed), bias)

    return DecodeBranch(
        branch.value,
        before=None if branch.before is None else _norm(branch.before),
        after=None if branch.after is None else _norm(branch.after),
        mix=_feed_forward_function(mixer, project)
        if isinstance(mixer, FeedForward)
        else _attention_function(mixer, parts, project),
        add=add,
        alone=lambda mixed, context: add_branch(None, multiply(mixed), bias, None),
    )


def _alone(tokens: int) -> ForwardContext:
    """Return the context of modules that process each token separately."""
    return ForwardContext(1, tokens, None, {}, None, None, None, SINGLE, False)


def _generic_branch(branch: ResidualBranch) -> DecodeBranch:
    """Return a branch without prepared steps. Its mixer attends to neighbours, or processes each token separately as in
    training."""
    mixer, add_branch = branch.mixer, branch.ops.added

    def mix(x: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        if isinstance(mixer, ChunkAttention) and context.neighbours is not None:
            return context.neighbours.attend(mixer, x)
        return cast(torch.Tensor, mixer(x, _alone(len(x))))

    def finish(mixed: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        if isinstance(mixer, ChunkAttention) and context.neighbours is not None:
            return context.neighbours.finish(mixer, mixed)
        return mixer.finish(mixed, _alone(len(mixed)))

    return DecodeBranch(
        branch.value,
        before=None if branch.before is None else _norm(branch.before),
        after=None if branch.after is None else _norm(branch.after),
        mix=mix,
        add=lambda x, mixed, context: ResidualState(x, finish(mixed, context), mixer.bias),
        alone=lambda mixed, context: add_branch(None, finish(mixed, context), mixer.bias, None),
    )


def _fused_branch(
    branch: ResidualBranch, usual: DecodeBranch, factors: _Factors, parts: DecodeParts
) -> DecodeBranch | None:
    """Return a branch for few rows. The first GEMM also computes the norm of its input; the last GEMM, or the sum over
    tensor ranks, also adds the branch to the stream.

    Returns None if the branch has other operations between these steps. usual: the branch for any number of rows.
    """
    mixer, few, value = cast(Any, branch.mixer), parts.few, branch.value
    first, out, region = _first(branch), branch.mixer.out, branch.mixer.out.region
    plain = first.gemms.plain and out.gemms.plain and value.onto == "stream" and value.multiplier == 1.0
    if few is None or not plain or branch.before is None or branch.after is not None:
        return None
    if not all(few.takes(1, each) for each in factors):
        return None
    inner = replace(factors.inner, bias=_bias(first))
    outer = replace(factors.outer, bias=_bias(out) if region.axis.first else None)
    first_norm = branch.before
    norm = NormOf(first_norm.weight.detach(), first_norm.bias, first_norm.eps, first_norm.form)
    linear, add_branch, summed = few.linear, branch.ops.added, parts.sum_ranks or by_group(region.axis)

    def before(stream: ResidualState) -> tuple[torch.Tensor, torch.Tensor]:
        x = add_branch(*stream)
        return x, x

    def project(x: torch.Tensor) -> torch.Tensor:
        return linear(x, inner, norm, None, None)

    def feed(x: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        if (
            mixer.activation in GATED and mixer.activation != "swiglu"
        ):  # the kernel implements only this gated activation
            return mixer.ops.activate(project(x), None, mixer.activation)
        return linear(x, inner, norm, mixer.activation, None)

    def add(x: torch.Tensor, mixed: torch.Tensor, context: DecodeContext) -> ResidualState:
        if region.size == 1:
            return ResidualState(linear(mixed, outer, None, None, x))
        summed(linear(mixed, outer, None, None, None), x)
        return ResidualState(x)

    mix = feed if isinstance(mixer, FeedForward) else _attention_function(mixer, parts, project)
    return replace(usual, before=before, mix=mix, add=add)


def _expert_branch(
    branch: ResidualBranch, mixer: ExpertLayer, usual: DecodeBranch, parts: DecodeParts
) -> _FewBranch | None:
    """Return the branch of a mixture-of-experts layer for few tokens, or None if the kernels do not implement all
    operations of the branch. Without a shared expert, the kernels also compute the norm and, on a single rank, add the
    output to the stream.
    """
    experts, axis, value, few = mixer.experts, mixer.region.summed_over, branch.value, parts.experts
    extras = (experts.up_bias, experts.down_bias, experts.up_adapter, experts.down_adapter, branch.after)
    plain = value.onto == "stream" and value.multiplier == 1.0 and all(each is None for each in extras)
    if few is None or axis is None or branch.before is None or not plain:
        return None
    matrices = mixer.router.gate.detach(), experts.up.detach(), experts.down.detach()
    weights = ExpertWeights(*matrices, mixer.region.experts_here)
    rule = ExpertRule(mixer.value.router, mixer.value.chosen, experts.activation)
    first_norm, shared, add_branch = branch.before, mixer.shared, branch.ops.added
    norm = NormOf(first_norm.weight.detach(), first_norm.bias, first_norm.eps, first_norm.form)
    summed, run = parts.sum_ranks or by_group(axis), few.run

    def mix(x: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        if shared is None:
            return x
        y = run(x, weights, rule, None, None)
        if axis.size > 1:
            summed(y)
        return y + mixer.shared_output(shared, x, _alone(len(x)))

    def add(x: torch.Tensor, mixed: torch.Tensor, context: DecodeContext) -> ResidualState:
        if shared is not None:
            return ResidualState(x, mixed)
        if axis.size == 1:
            return ResidualState(run(mixed, weights, rule, norm, x))
        summed(run(mixed, weights, rule, norm, None), x)
        return ResidualState(x)

    def before(stream: ResidualState) -> tuple[torch.Tensor, torch.Tensor]:
        x = add_branch(*stream)
        return x, x

    fused = replace(usual, before=before if shared is None else usual.before, mix=mix, add=add)
    return _FewBranch(fused, lambda tokens: few.takes(tokens, weights, rule))


def _bias(linear: ColumnLinear | RowLinear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


def _norm(norm: Normalization | ProjectionNorm) -> NormStep:
    if isinstance(norm, ProjectionNorm):
        return norm
    add_norm, add_branch = norm.ops.add_norm, norm.ops.added
    weight, bias, eps, form = norm.weight.detach(), norm.bias, norm.eps, norm.form
    spread = norm.ops.spread and bias is None and weight.element_size() >= 4
    few = rms_norm_by(factor_of(weight, weight.dtype, form), eps) if spread else None

    def run(stream: ResidualState) -> tuple[torch.Tensor, torch.Tensor]:
        if few is None or stream.x.dtype != weight.dtype:
            return add_norm(*stream, weight, bias, eps, form)
        x = add_branch(*stream)
        return x, few(x)

    return run


def _factor(linear: ColumnLinear | RowLinear, bias: torch.Tensor | None = None) -> Factor:
    """Return the weight of a linear layer in the format that its GEMM needs. bias: added by the GEMM."""
    return linear.weight.ops.matmuls.factor(linear.weight, bias)


def _linear(
    linear: ColumnLinear | RowLinear, factor: Factor, sum_ranks: Sum | None = None
) -> Callable[..., torch.Tensor]:
    multiply = linear.gemms.by(factor)
    if not isinstance(linear, RowLinear) or linear.region.size == 1:
        return multiply
    summed = sum_ranks or by_group(linear.region.axis)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = multiply(x)
        summed(y)
        return y

    return run


def _attention_function(
    attention: SelfAttention, parts: DecodeParts, project: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, DecodeContext], torch.Tensor]:
    """Return the attention of a branch as a function. project: function that computes query, key and value."""
    layer, heads, kv_heads, ops = attention.layer, attention.heads, attention.kv_heads, attention.ops
    q_norm, k_norm = (None if norm is None else _norm(norm) for norm in (attention.q_norm, attention.k_norm))
    rope, few, fused_heads = parts.ropes.index(attention.value.rope), parts.few, heads + 2 * kv_heads
    multiplier, head_norms = attention.value.score_multiplier, _head_norms(attention)

    def run(x: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        fused, cache, rotary = project(x), context.cache, context.rotary[rope]
        # A scale of the scores must be applied before the attention. The fused kernel computes everything after the
        # projection and the heads' norms, so it is used only without such a scale.
        if few is not None and multiplier == 1.0 and (q_norm is None or head_norms is not None):
            fused = fused.view(len(fused), fused_heads, -1)
            if head_norms is not None:
                few.norm_heads(fused, *head_norms, heads)
            return cache.attend_new(layer, fused, rotary, few.place)
        if q_norm is None and ops.spread:
            fused = fused.view(fused.shape[0], fused_heads, -1)
            if rotary is not None:
                rotate(fused.narrow(1, 0, heads + kv_heads), *rotary)
            if multiplier != 1.0:
                fused.narrow(1, 0, heads).mul_(multiplier)
            return cache(layer, *fused.split_with_sizes([heads, 2 * kv_heads], 1))
        q, k, v = ops.split_heads(fused, None, heads, kv_heads, rotary if q_norm is None else None)
        if q_norm is not None and k_norm is not None:
            q, k = q_norm(ResidualState(q))[1], k_norm(ResidualState(k))[1]
            if rotary is not None:
                q, k = rotate(q, *rotary), rotate(k, *rotary)
        return cache(layer, attention.scaled(q), torch.cat([k, v], 1))

    return run


def _head_norms(attention: SelfAttention) -> tuple[NormOf, NormOf] | None:
    """Return the RMSNorms of the query heads and of the key heads, or None if the model has no such norms."""
    norms = [each for each in (attention.q_norm, attention.k_norm) if isinstance(each, Normalization)]
    if len(norms) < 2 or any(each.bias is not None for each in norms):
        return None
    q, k = (NormOf(each.weight.detach(), None, each.eps, each.form) for each in norms)
    return q, k


def _feed_forward_function(
    feed_forward: FeedForward, project: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, DecodeContext], torch.Tensor]:
    activate, bias, kind = feed_forward.ops.activate, feed_forward.up.bias, feed_forward.activation
    return lambda x, context: activate(project(x), bias, kind)


def use_decoding_layout(stage: Any) -> None:
    """Store the layers' matrices transposed, so that a GEMM with few rows need not copy them first."""
    for module in stage.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            module.weight.data = module.weight.data.t().contiguous().t()
