"""Left-to-right language models, cut into pipeline stages: GPT and Llama are values of one config.

The term is "lm": the sum of weight x negative log-likelihood of the next token, over the sum of weights.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn

from mega.core.batch import DecoderBatch, Term
from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor
from mega.core.model.block import Norm, ResidualState
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext, KeyValueCache, forward_context
from mega.core.model.stack import Losses, StackStage
from mega.core.parallel.region import Region
from mega.core.parallel.vocab import cross_entropy, logits
from mega.core.parallel.weight import ParameterFactory


class Labelled(Protocol):
    """What a head asks of a batch; fields as of `DecoderBatch`."""

    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def loss_weights(self) -> torch.Tensor: ...


class Head(nn.Module):
    """Final norm, logits over the cut vocabulary, with a bias where there is one, and the loss. norm: the name of its
    tensors."""

    def __init__(
        self,
        factory: ParameterFactory,
        model: ModelConfig,
        tensors: dict[str, Tensor],
        region: Region,
        norm: str = "model.norm",
    ):
        super().__init__()
        self.norm = Norm(factory, model, tensors, norm)
        self.weight = factory(tensors["model.embed_tokens.weight" if model.tied else "lm_head.weight"])
        self.bias = factory(tensors["lm_head.bias"]) if "lm_head.bias" in tensors else None
        self.region = region

    def forward(self, stream: ResidualState, batch: Labelled | None = None) -> Losses | torch.Tensor:
        """The loss of a batch; logits [tokens, ids of this rank] without one."""
        normed = self.norm(stream)[1]
        if batch is None:
            return logits(normed, self.weight, self.region, self.bias)
        nll = cross_entropy(normed, batch.labels.flatten(), self.weight, self.region, self.bias)
        weight = batch.loss_weights.flatten().to(nll.dtype)
        return Losses((Term((nll * weight).sum(), weight.sum()),))


class DecoderStage(StackStage):
    """The units of a decoder that one stage holds."""

    terms = ("lm",)

    def make_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Embedding:
        return Embedding(factory, self.model, tensors, self.region, self.residual)

    def make_head(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Head:
        return Head(factory, self.model, tensors, self.region)

    def context(self, batch: DecoderBatch, cache: KeyValueCache | None = None) -> ForwardContext:
        return forward_context(
            self.model,
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
            cache=cache,
        )

    def decode(
        self, batch: DecoderBatch, cache: KeyValueCache, wanted: torch.Tensor, *cargo: torch.Tensor
    ) -> torch.Tensor:
        """One step of continuing text. batch: one row of ragged tokens, the next of any sequences, at their positions.

        Gives what the next stage is given, [tokens, h]; the last stage the logits of the tokens `wanted`, int64 [w], as
        [w, ids of this rank].
        """
        context = self.context(batch, cache)
        begun = cargo[0] if self.embedding is None else self.embedded(self.embedding, batch, context)
        stream = self.through(self.blocks, ResidualState(begun), context)
        if self.head is None:
            return stream.sum(self.ops)
        return cast(torch.Tensor, self.head(ResidualState(stream.sum(self.ops).index_select(0, wanted))))

    def embed(self, embedding: nn.Module, batch: DecoderBatch, context: ForwardContext) -> torch.Tensor:
        return cast(torch.Tensor, embedding(batch.tokens, batch.positions, context))
