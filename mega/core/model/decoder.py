"""Left-to-right language models as pipeline stages: GPT and Llama are configurations of one decoder.

The loss term is "lm", the sum of weight x negative log-likelihood of the next token, divided by the sum of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.architecture.layer import Norm
from mega.core.architecture.model import Ahead, Words
from mega.core.batch import DecoderBatch, PreferenceBatch
from mega.core.model.ahead import AheadLayer, AheadTokens, tokens_ahead
from mega.core.model.auxiliary import AuxiliarySums
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext, forward_context
from mega.core.model.mixers import LayerPlace
from mega.core.model.objective import CustomLoss, Objective, row_log_probabilities
from mega.core.model.residual import Normalization, ResidualState
from mega.core.model.stack import Losses, StackStage
from mega.core.parallel.region import Region
from mega.core.parallel.vocab import LogitShape, TrainedLogits, cross_entropy, logits, token_loss
from mega.core.parallel.weight import ParameterFactory


class LabelledTokens(Protocol):
    """The fields of a batch that a head uses, as in `DecoderBatch`."""

    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def loss_weights(self) -> torch.Tensor: ...


class Head(nn.Module):
    """Final norm, logits over the sharded vocabulary with an optional bias, and the loss."""

    def __init__(
        self,
        factory: ParameterFactory,
        words: Words,
        norm: Norm,
        tensors: dict[str, Tensor],
        region: Region,
    ):
        super().__init__()
        self.norm = Normalization(factory, norm, tensors)
        self.weight = factory(tensors["model.embed_tokens.weight" if words.tied else "lm_head.weight"])
        self.bias = factory(tensors["lm_head.bias"]) if words.bias else None
        self.shape = LogitShape(words.divisor, words.softcap)
        self.region = region
        self.objective: Objective | CustomLoss | None = None
        self.ahead = nn.ModuleList()
        """One `AheadLayer` for each token after the next one that the model predicts."""

    def forward(
        self, stream: ResidualState, batch: LabelledTokens | None = None, scales: torch.Tensor | None = None
    ) -> Losses | torch.Tensor:
        """Return the losses of `batch` or, without a batch, the logits [tokens, ids of this rank].

        scales: factors of the losses. If given, one pass over the logits computes both the loss and its gradient.
        """
        normed = self.norm(stream)[1]
        if batch is None:
            return logits(normed, self.weight, self.region, self.bias, self.shape)
        if isinstance(self.objective, CustomLoss):
            decoder_batch = cast(DecoderBatch, batch)
            return Losses((self.objective(HeadPredictions(self, normed, decoder_batch), decoder_batch),))
        if self.objective is not None:
            return Losses(*self.objective(self._nll(normed, batch), cast(DecoderBatch, batch)))
        scale = None if scales is None else scales[0]
        labels, weights = batch.labels.flatten(), batch.loss_weights.flatten()
        return Losses((token_loss(normed, labels, weights, self.weight, self.region, self.bias, scale, self.shape),))

    def losses_ahead(
        self,
        stream: ResidualState,
        batch: DecoderBatch,
        scales: torch.Tensor | None,
        further: AheadTokens,
        context: ForwardContext,
    ) -> Losses:
        """Return the losses of the next token and of each later token."""
        h, terms = self.norm(stream)[1], []
        labels, weights = batch.labels, batch.loss_weights
        for depth, layer in enumerate((None, *self.ahead)):
            if layer is not None:
                tokens, labels, weights = (each[..., depth - 1] for each in further)
                h = layer(h, tokens, batch.positions, context)
            scale, targets = None if scales is None else scales[depth], (labels.flatten(), weights.flatten())
            terms.append(token_loss(h, *targets, self.weight, self.region, self.bias, scale, self.shape))
        return Losses(tuple(terms))

    def scores(self, stream: ResidualState, batch: DecoderBatch) -> torch.Tensor:
        """Return the log-probability of each row's trained labels, [b]."""
        return row_log_probabilities(self._nll(self.norm(stream)[1], batch), batch)

    def _nll(self, normed: torch.Tensor, batch: LabelledTokens) -> torch.Tensor:
        """Return the negative log-likelihood of every label, [tokens of the whole rows]."""
        return cross_entropy(normed, batch.labels.flatten(), self.weight, self.region, self.bias, self.shape)


class HeadPredictions:
    """`Predictions` computed by a head. normed: [tokens, h], this rank's tokens under sequence parallelism."""

    def __init__(self, head: Head, normed: torch.Tensor, batch: DecoderBatch):
        self._trained = TrainedLogits(normed, head.weight, head.region, head.bias, head.shape)
        self._labels = batch.labels

    @cached_property
    def logits(self) -> torch.Tensor:
        return self._trained.whole().unflatten(0, tuple(self._labels.shape))

    @cached_property
    def logprobs(self) -> torch.Tensor:
        return -self._trained.nll(self._labels.flatten()).view(self._labels.shape)


@contextmanager
def custom_loss(stages: Sequence[nn.Module], loss: CustomLoss) -> Iterator[None]:
    """Return a context in which the head, on the stage that holds it, computes `loss` instead of the usual loss."""
    heads = [head for stage in stages if isinstance(head := getattr(stage, "head", None), Head)]
    before = [head.objective for head in heads]
    for head in heads:
        head.objective = loss
    try:
        yield
    finally:
        for head, objective in zip(heads, before, strict=True):
            head.objective = objective


class DecoderStage(StackStage[DecoderBatch]):
    """The units of a decoder that one stage holds."""

    head_terms: Mapping[str, float] = MappingProxyType({"lm": 1.0})

    def build_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Embedding:
        return Embedding(factory, self.architecture.input, tensors, self.region, self.residual)

    def build_head(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Head:
        words, norm = self.architecture.output.words, self.architecture.stacks[-1].norm
        assert words is not None and norm is not None
        head = Head(factory, words, norm, tensors, self.region)
        head.objective = self.options.objective
        options, first = self.options, len(self.architecture.layers)
        for number, ahead in enumerate(self._ahead, first):
            place = LayerPlace(number, self.region, 0.0, options.cp, options.experts, options.gathers_experts)
            head.ahead.append(AheadLayer(factory, self.architecture, ahead, tensors, place, self.residual))
        head.weight.uses += len(self._ahead)
        return head

    @property
    def _ahead(self) -> tuple[Ahead, ...]:
        """The layers of multi-token prediction; empty if the objective is not next-token prediction."""
        return self.architecture.output.ahead if self.options.objective is None else ()

    def split(self, batch: DecoderBatch, index: int, size: int) -> DecoderBatch:
        """Split rows over context ranks. Tokens ahead are computed from whole rows before the split."""
        if size > 1 and self._ahead:
            tokens, labels, weights = self._tokens_ahead(batch)
            batch = replace(batch, ahead_tokens=tokens, ahead_labels=labels, ahead_weights=weights)
        return batch.split(index, size)

    def _tokens_ahead(self, batch: DecoderBatch) -> AheadTokens:
        if batch.ahead_tokens is None or batch.ahead_labels is None or batch.ahead_weights is None:
            depths = len(self._ahead)
            return tokens_ahead(batch.tokens, batch.labels, batch.loss_weights, depths, batch.documents)
        return AheadTokens(batch.ahead_tokens, batch.ahead_labels, batch.ahead_weights)

    def weights(self, batch: DecoderBatch) -> Mapping[str, torch.Tensor]:
        by_name = super().weights(batch)
        if not self._ahead:
            return by_name
        weights = self._tokens_ahead(batch).weights.unbind(2)
        return {**by_name, **{each.loss: loss_weights for each, loss_weights in zip(self._ahead, weights, strict=True)}}

    def head_losses(
        self,
        stream: ResidualState,
        batch: DecoderBatch,
        scales: torch.Tensor | None,
        auxiliary: AuxiliarySums | None,
    ) -> Losses:
        if not self._ahead or not self.training:  # the validation loss is that of the next token only
            return super().head_losses(stream, batch, scales, auxiliary)
        assert isinstance(self.head, Head)
        context = replace(self.context(batch), auxiliary=auxiliary)
        return self.head.losses_ahead(stream, batch, scales, self._tokens_ahead(batch), context)

    def context(self, batch: DecoderBatch) -> ForwardContext:
        return forward_context(
            self.architecture,
            batch.samples,
            batch.positions,
            self.region.axis,
            columns=batch.columns,
            documents=batch.documents,
            sequence=self.region.sequence,
            dropout_seed=self.dropout_seed,
            dtype=self.dtype,
            dropout_rule=self.options.dropout_rule,
            row_shards=self.ops.row_shards,
            padding=batch.padding if self.architecture.mixtures else None,
        )

    def embed(self, embedding: nn.Module, batch: DecoderBatch, context: ForwardContext) -> torch.Tensor:
        return cast(torch.Tensor, embedding(batch.tokens, batch.positions, context))

    def outputs(self, stream: ResidualState, batch: DecoderBatch) -> torch.Tensor:
        """Return logits, or, for a batch of answer pairs, the log-probability of each row, [2 b]."""
        if not isinstance(batch, PreferenceBatch):
            return super().outputs(stream, batch)
        head = self.head
        assert isinstance(head, Head)
        return self.run_head(stream, lambda stream: head.scores(stream, batch))
