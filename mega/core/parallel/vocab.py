"""Look-up, logits and cross entropy with a vocabulary that is sharded over the tensor axis, without gathering logits.

Rank r owns the ids [r n, (r + 1) n), where n is the padded vocabulary size divided by the number of ranks. The padding
rows at the end do not belong to tokens. Their logits are minus infinity, so their probability and gradient are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.batch import Term
from mega.core.ops.autograd import FunctionContext, deliver
from mega.core.ops.norm import accurate
from mega.core.ops.suite import Ops
from mega.core.parallel.collectives import all_reduce, gather_from_region, reduce_from_region
from mega.core.parallel.gemms import WeightGemms
from mega.core.parallel.linear import column_matmul
from mega.core.parallel.mesh import Axis
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory, Weight


class _LookUp(torch.autograd.Function):
    """Look up ids [tokens] -> rows [tokens, h]; zeros for ids of other ranks. first: this rank's first id; None if the
    table is not sharded."""

    @staticmethod
    def forward(ctx: FunctionContext[Weight], ids: torch.Tensor, weight: Weight, first: int | None) -> torch.Tensor:
        ctx.state = weight
        if first is None:
            ctx.save_for_backward(ids, None)
            return weight.detach()[ids]
        local = ids - first
        in_shard = (local >= 0) & (local < weight.shape[0])
        local = local.masked_fill(~in_shard, 0)
        ctx.save_for_backward(local, in_shard)
        return weight.detach()[local].masked_fill(~in_shard[:, None], 0)

    @staticmethod
    def backward(ctx: FunctionContext[Weight], grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        local, in_shard = ctx.saved_tensors
        if in_shard is not None:
            grad = grad.masked_fill(~in_shard[:, None], 0)
        return None, ctx.state.add_rows(local, grad), None


def look_up(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return the rows [tokens, h] of `ids` in a table that is not sharded."""
    if not torch.is_grad_enabled():  # skip autograd, because nothing is saved
        return weight.index_select(0, ids)
    return _LookUp.apply(ids, weight, None)  # type: ignore[no-any-return, no-untyped-call]


class VocabEmbedding(nn.Module):
    """The token embedding: ids [tokens] -> rows [tokens, h]; under sequence parallelism only this rank's tokens.

    sum_ranks: function that sums the rows over ranks in place, without a gradient. If None, a collective of
    `region.axis` with a gradient is used.
    """

    def __init__(self, factory: ParameterFactory, tensor: Tensor, region: Region):
        super().__init__()
        self.weight = factory(tensor)
        self.region = region

    def forward(self, ids: torch.Tensor, sum_ranks: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        if self.region.size == 1:
            return look_up(ids, self.weight)
        first = self.region.axis.index * self.weight.shape[0]
        rows = _LookUp.apply(ids, self.weight, first)  # type: ignore[no-untyped-call]
        if sum_ranks is not None:
            sum_ranks(rows)
            return rows  # type: ignore[no-any-return]
        return reduce_from_region(rows, self.region.axis, self.region.sequence)


class LogitShape(NamedTuple):
    """A function that divides each logit by `divisor` and then limits it to +-softcap with tanh."""

    divisor: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


UNSHAPED = LogitShape()


def logits(
    x: torch.Tensor, weight: Weight, region: Region, bias: Weight | None = None, shape: LogitShape = UNSHAPED
) -> torch.Tensor:
    """Return the logits [tokens, ids of this rank] of x [tokens, h]. The logits of padding are minus infinity.

    Under sequence parallelism x holds the tokens of this rank.
    """
    out = column_matmul(x, WeightGemms(weight), region)
    out = shape(out if bias is None else out + bias)
    vocab_rows = weight.segments[0].shard.size[0]
    if vocab_rows == weight.shape[0]:
        return out
    padding = torch.arange(weight.shape[0], device=out.device) >= vocab_rows
    return out.masked_fill(padding, -math.inf)


class TrainedLogits:
    """The logits of a batch, [tokens, ids of this rank], with a gradient.

    The logits are computed once. Losses read whole rows of logits, log-probabilities of labels, or both. x: [tokens,
    h]; under sequence parallelism only the tokens of this rank.
    """

    def __init__(
        self, x: torch.Tensor, weight: Weight, region: Region, bias: Weight | None = None, shape: LogitShape = UNSHAPED
    ):
        local = column_matmul(x, WeightGemms(weight), region)
        if bias is not None:
            local = _AddBias.apply(local, bias)  # type: ignore[no-untyped-call]
        self._local, self._weight, self._axis = shape(local), weight, region.axis

    def whole(self) -> torch.Tensor:
        """Return the logits of all ids without padding, [tokens, vocab], the same on every rank."""
        return gather_from_region(self._local, self._axis)[:, : self._weight.segments[0].shard.whole[0]]

    def nll(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the negative log-likelihood of labels, as in `cross_entropy`."""
        args = self._local, labels, self._weight, self._axis, None
        return _CrossEntropy.apply(*args)  # type: ignore[no-any-return, no-untyped-call]


def _normalised(
    ops: Ops, x: torch.Tensor, local: torch.Tensor, real: int, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (log-sum-exp over all ids, the label's logit, the largest logit), each [tokens], for logits x [tokens, ids
    of this rank].

    Phases:
        1 largest logit, sum of exponentials and label's logit of this rank's columns
        2 largest logit of all ranks; rescale this rank's sum of exponentials to that logit
        3 sum the exponentials and the label's logit over ranks
    """
    # 1
    largest, total, target = ops.softmax_parts(x, local, real)
    # 2
    if axis.size > 1:
        local_largest = largest.clone()
        all_reduce(largest, axis, "max")
        # 3
        sums = torch.stack([total * (local_largest - largest).exp(), target])
        all_reduce(sums, axis)
        total, target = sums
    return total.log() + largest, target, largest


class _CrossEntropy(torch.autograd.Function):
    """The negative log-likelihood. Its gradient is the softmax, minus 1 at the label."""

    @staticmethod
    def forward(
        ctx: FunctionContext[tuple[Ops, int, Weight | None]],
        x: torch.Tensor,
        labels: torch.Tensor,
        weight: Weight,
        axis: Axis,
        bias: Weight | None,
    ) -> torch.Tensor:
        local_vocab = weight.segments[0].shard.size[0]
        ctx.state = weight.ops, local_vocab, bias
        local = labels - axis.index * x.shape[1]
        log_total, target, _ = _normalised(weight.ops, x, local, local_vocab, axis)
        ctx.save_for_backward(x, local, log_total)
        return log_total - target

    @staticmethod
    def backward(
        ctx: FunctionContext[tuple[Ops, int, Weight | None]], grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, torch.Tensor | None]:
        (x, local, log_total), (ops, local_vocab, bias) = ctx.saved_tensors, ctx.state
        grad_x = ops.softmax_gradient(x, local, log_total, grad, local_vocab)
        return grad_x, None, None, None, _bias_gradient(bias, grad_x)


class _WithGradient(torch.autograd.Function):
    """The negative log-likelihood on one rank, together with its gradient.

    The forward pass overwrites the logits with `scale` times the gradient. The outputs are the negative
    log-likelihoods, which are not differentiable, and an empty tensor, at which the backward pass begins.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext[Weight | None],
        x: torch.Tensor,
        labels: torch.Tensor,
        scale: torch.Tensor,
        weight: Weight,
        bias: Weight | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nll, gradient = weight.ops.nll_and_gradient(x, labels, scale, weight.segments[0].shard.size[0])
        ctx.state = bias
        ctx.save_for_backward(gradient.detach())
        ctx.mark_non_differentiable(nll)
        ctx.set_materialize_grads(False)
        return nll, x.new_empty(0)

    @staticmethod
    def backward(
        ctx: FunctionContext[Weight | None], *_: object
    ) -> tuple[torch.Tensor, None, None, None, torch.Tensor | None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None, None, None, _bias_gradient(ctx.state, gradient)


class _AddBias(torch.autograd.Function):
    """Add bias [n] to x [tokens, n]. The gradient of the bias is added to its main_grad, as for other weights."""

    @staticmethod
    def forward(ctx: FunctionContext[Weight], x: torch.Tensor, bias: Weight) -> torch.Tensor:
        ctx.state = bias
        return x + bias.detach()

    @staticmethod
    def backward(ctx: FunctionContext[Weight], grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return grad, _bias_gradient(ctx.state, grad)


def _bias_gradient(bias: Weight | None, grad: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else deliver(bias, grad.sum(0, dtype=accurate(grad.dtype)))


def token_loss(
    x: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    weight: Weight,
    region: Region,
    bias: Weight | None = None,
    scale: torch.Tensor | None = None,
    shape: LogitShape = UNSHAPED,
) -> Term:
    """Return the negative log-likelihood of labels, weighted by `weights` [tokens], as a `Term`.

    scale: the factor of the total before its backward pass; None if unknown. If `scale` is given and one rank has
    the whole vocabulary, one pass over the logits computes the loss and its gradient. Other arguments: as in
    `cross_entropy`.
    """
    # With a sharded vocabulary, the gradient depends on sums over ranks, so the loss and its gradient need two passes.
    if scale is None or region.size > 1:
        nll = cross_entropy(x, labels, weight, region, bias, shape)
        weights = weights.to(nll.dtype)
        return Term((nll * weights).sum(), weights.sum())
    local_logits = _shaped_logits(x, weight, region, bias, shape)
    weights = weights.to(accurate(local_logits.dtype))
    scales = weights * scale.to(weights.dtype)
    nll, root = _WithGradient.apply(local_logits, labels, scales, weight, bias)  # type: ignore[no-untyped-call]
    return Term((nll * weights).sum(), weights.sum(), root)


def _shaped_logits(
    x: torch.Tensor, weight: Weight, region: Region, bias: Weight | None, shape: LogitShape
) -> torch.Tensor:
    """Return logits with a detached bias. The loss computes the bias's gradient from the gradient of the logits, so
    `shape` cannot be combined with a bias."""
    assert bias is None or shape == UNSHAPED, "a bias is added to logits that stay as they are"
    return shape(column_matmul(x, WeightGemms(weight), region, None if bias is None else bias.detach()))


def cross_entropy(
    x: torch.Tensor,
    labels: torch.Tensor,
    weight: Weight,
    region: Region,
    bias: Weight | None = None,
    shape: LogitShape = UNSHAPED,
) -> torch.Tensor:
    """Return the negative log-likelihood [tokens], in max(fp32, dtype), of labels int64 [tokens] under the head
    `weight`.

    x: [tokens, h], under sequence parallelism the tokens of this rank. bias: bias of the logits, sharded like the
    vocabulary.
    """
    local_logits = _shaped_logits(x, weight, region, bias, shape)
    return _CrossEntropy.apply(local_logits, labels, weight, region.axis, bias)  # type: ignore[no-any-return, no-untyped-call]


class TokenScores(NamedTuple):
    """The scores of labels."""

    nll: torch.Tensor
    """-ln p of each label, in max(fp32, dtype)."""
    greedy: torch.Tensor | None
    """Whether each label is the most likely id (ties are broken by the lower id); None if not requested."""


def score_labels(
    x: torch.Tensor, labels: torch.Tensor, vocab: int, axis: Axis, ops: Ops, *, greedy: bool = False
) -> TokenScores:
    """Score labels int64 [tokens] under logits x [tokens, ids of this rank]. The result is the same on every rank of
    the axis.

    vocab: number of ids without padding. Logits are not gathered; ranks exchange a few numbers per token.
    """
    first = axis.index * x.shape[1]
    local_vocab = min(max(vocab - first, 0), x.shape[1])
    log_total, target, largest = _normalised(ops, x.contiguous(), labels - first, local_vocab, axis)
    if not greedy:
        return TokenScores(log_total - target, None)
    if local_vocab:
        top, best = x[:, :local_vocab].max(-1)
        best = (best + first).masked_fill(top.to(largest.dtype) < largest, vocab)
    else:
        best = torch.full_like(labels, vocab)
    all_reduce(best, axis, "min")
    return TokenScores(log_total - target, best == labels)
