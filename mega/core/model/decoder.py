"""Left-to-right language models, cut into pipeline stages: GPT and Llama are values of one config.

The term is "lm": the sum of weight x negative log-likelihood of the next token, over the sum of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.architecture.layer import Norm
from mega.core.architecture.model import Words
from mega.core.batch import DecoderBatch, PreferenceBatch
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext, forward_context
from mega.core.model.objective import CustomLoss, Objective, row_log_probabilities
from mega.core.model.residual import Normalization, ResidualState
from mega.core.model.stack import Losses, StackStage
from mega.core.parallel.region import Region
from mega.core.parallel.vocab import LogitShape, TrainedLogits, cross_entropy, logits, token_loss
from mega.core.parallel.weight import ParameterFactory


class LabelledTokens(Protocol):
    """What a head asks of a batch; fields as of `DecoderBatch`."""

    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def loss_weights(self) -> torch.Tensor: ...


class Head(nn.Module):
    """Final norm, logits over the cut vocabulary, with a bias where there is one, and the loss."""

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

    def forward(
        self, stream: ResidualState, batch: LabelledTokens | None = None, scales: torch.Tensor | None = None
    ) -> Losses | torch.Tensor:
        """The loss of a batch, with its gradient where its scale is known; logits [tokens, ids of this rank] without a
        batch."""
        normed = self.norm(stream)[1]
        if batch is None:
            return logits(normed, self.weight, self.region, self.bias, self.shape)
        if isinstance(self.objective, CustomLoss):
            own = cast(DecoderBatch, batch)
            return Losses((self.objective(HeadPredictions(self, normed, own), own),))
        if self.objective is not None:
            return Losses(*self.objective(self._nll(normed, batch), cast(DecoderBatch, batch)))
        scale = None if scales is None else scales[0]
        labels, weights = batch.labels.flatten(), batch.loss_weights.flatten()
        return Losses((token_loss(normed, labels, weights, self.weight, self.region, self.bias, scale, self.shape),))

    def scores(self, stream: ResidualState, batch: DecoderBatch) -> torch.Tensor:
        """Log-probability of each row's trained labels, [b]."""
        return row_log_probabilities(self._nll(self.norm(stream)[1], batch), batch)

    def _nll(self, normed: torch.Tensor, batch: LabelledTokens) -> torch.Tensor:
        """Negative log-likelihood of every label, [tokens of the whole rows]."""
        return cross_entropy(normed, batch.labels.flatten(), self.weight, self.region, self.bias, self.shape)


class HeadPredictions:
    """`Predictions` of a head. normed: [tokens, h], our tokens under sequence parallelism."""

    def __init__(self, head: Head, normed: torch.Tensor, batch: DecoderBatch):
        self._found = TrainedLogits(normed, head.weight, head.region, head.bias, head.shape)
        self._labels = batch.labels

    @cached_property
    def logits(self) -> torch.Tensor:
        return self._found.whole().unflatten(0, tuple(self._labels.shape))

    @cached_property
    def logprobs(self) -> torch.Tensor:
        return -self._found.nll(self._labels.flatten()).view(self._labels.shape)


@contextmanager
def custom_loss(stages: Sequence[nn.Module], loss: CustomLoss) -> Iterator[None]:
    """Meanwhile the head, where one of `stages` has it, computes `loss` instead of its own."""
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
        return head

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
        )

    def embed(self, embedding: nn.Module, batch: DecoderBatch, context: ForwardContext) -> torch.Tensor:
        return cast(torch.Tensor, embedding(batch.tokens, batch.positions, context))

    def outputs(self, stream: ResidualState, batch: DecoderBatch) -> torch.Tensor:
        """Of pairs of answers, each row's log-probability, [2 b]."""
        if not isinstance(batch, PreferenceBatch):
            return super().outputs(stream, batch)
        head = self.head
        assert isinstance(head, Head)
        return self.headed(stream, lambda stream: head.scores(stream, batch))
