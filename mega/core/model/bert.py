"""BERT (Devlin et al. 2018) as pipeline stages: a bidirectional stack, and two losses.

    lm     prediction of masked words by a dense layer, activation, norm, the tied embedding and a vocabulary bias;
           the mean over masked words
    pair   prediction, from a row's first token, of whether the row's two segments are swapped; the mean over
           labelled rows

If the batch lists the masked positions and a rank holds whole rows, the losses read only the masked positions and the
first token of each row. The heads run only on these tokens. The last layer projects all tokens to queries, keys and
values, and runs everything else only on these tokens. Otherwise the last layer and the word head run on all tokens, as
in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from mega.core.architecture import Tensor, Unit
from mega.core.architecture.model import Architecture, Output, Rows, Transform
from mega.core.batch import MaskedBatch, Term
from mega.core.config.sections import ModelConfig
from mega.core.model.auxiliary import AuxiliarySums
from mega.core.model.embedding import OUTSIDE, Embedding
from mega.core.model.forward import ForwardContext, forward_context, numbers_at, padding_documents
from mega.core.model.residual import Normalization, ResidualState, normalization
from mega.core.model.stack import Losses, StackStage
from mega.core.model.stage import StageOptions
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import Dropout
from mega.core.ops.fp8 import NarrowMatmuls
from mega.core.ops.norm import accurate
from mega.core.parallel.collectives import reduce_from_region
from mega.core.parallel.linear import ColumnLinear
from mega.core.parallel.pipeline import StageOutput
from mega.core.parallel.region import ALONE, Region
from mega.core.parallel.vocab import logits, token_loss
from mega.core.parallel.weight import ParameterFactory

Tensors = dict[str, Tensor]


class WholeLinear(ColumnLinear):
    """A linear layer that is replicated on every rank and applied to the rank's tokens or rows."""

    def __init__(self, factory: ParameterFactory, tensors: Tensors, name: str):
        super().__init__(factory, [tensors[f"{name}.weight"]], [tensors[f"{name}.bias"]], ALONE)


class WordHead(nn.Module):
    """Head for masked words: dense, activation and norm of this rank's tokens, then logits over the sharded
    vocabulary."""

    def __init__(self, factory: ParameterFactory, transform: Transform, tensors: Tensors, region: Region):
        super().__init__()
        self.dense = WholeLinear(factory, tensors, "lm_head.dense")
        self.norm = Normalization(factory, transform.norm, tensors)
        self.weight = factory(tensors["model.embed_tokens.weight"])
        self.bias = factory(tensors["lm_head.bias"])
        self.activation, self.ops, self.region = transform.activation, factory.ops, region

    def forward(self, x: torch.Tensor, batch: MaskedBatch, scale: torch.Tensor | None = None) -> Term:
        """Return the loss for x [tokens, h], this rank's tokens under sequence parallelism. If `scale` is given, one
        pass over the logits also computes the gradient."""
        labels, weights = batch.labels.flatten(), batch.loss_weights.flatten()
        return token_loss(self.transformed(x), labels, weights, self.weight, self.region, self.bias, scale)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, ids of this rank] for x [tokens, h]."""
        return logits(self.transformed(x), self.weight, self.region, self.bias)

    def transformed(self, x: torch.Tensor) -> torch.Tensor:
        active = self.ops.activate(self.dense.matmul(x), self.dense.bias, self.activation)
        return self.norm(ResidualState(active))[1]


class RowHead(nn.Module):
    """Head that classifies rows: a linear layer, with one output per class, on the pooled first token. Every tensor
    rank computes the same result.

    dropout: function that returns the dropout for the pooled tokens of a batch, one token per row.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        tensors: Tensors,
        value: Rows,
        region: Region,
        dropout: Callable[[MaskedBatch], Dropout | None],
    ):
        super().__init__()
        self.pooler = WholeLinear(factory, tensors, "pooler.dense")
        self.out = WholeLinear(factory, tensors, value.name)
        self.region, self.dropout, self.choices = region, dropout, value.choices

    def forward(self, x: torch.Tensor, batch: MaskedBatch) -> Losses:
        """Return the loss and the accuracy for x [tokens, h], this rank's tokens under sequence parallelism."""
        classes = self.logits(x, batch)
        losses = F.cross_entropy(classes.to(accurate(classes.dtype)), batch.pairs.clamp(min=0), reduction="none")
        correct = (classes.detach().argmax(-1) == batch.pairs).to(losses.dtype)
        rows = batch.pair_weights.to(losses.dtype)
        return Losses((Term((losses * rows).sum(), rows.sum()),), (Term((correct * rows).sum(), rows.sum()),))

    def logits(self, x: torch.Tensor, batch: MaskedBatch) -> torch.Tensor:
        """Return logits [b, classes], or for multiple choice [b / choices, choices], on every rank."""
        pooled, drop = self.pooler(self.first_tokens(x, *batch.tokens.shape)).tanh(), self.dropout(batch)
        classes: torch.Tensor = self.out(pooled if drop is None else drop(pooled))
        return classes if self.choices == 1 else classes.view(-1, self.choices)

    def first_tokens(self, x: torch.Tensor, batch: int, seq: int) -> torch.Tensor:
        """Return the first token of each row, [batch, h], on every rank."""
        if not self.region.sequence:
            return x.unflatten(0, (batch, seq))[:, 0]
        # Under sequence parallelism, this rank has the first tokens of only some rows. Set the other rows to 0, then
        # sum over ranks.
        positions = torch.arange(batch, device=x.device) * seq - self.region.axis.index * len(x)
        on_this_rank = (positions >= 0) & (positions < len(x))
        first = x[positions.clamp(0, len(x) - 1)].masked_fill(~on_this_rank[:, None], 0)
        return reduce_from_region(first, self.region.axis, sequence=False)


class BertHead(nn.Module):
    """The final norm (if norms come before branches) and the heads for masked words and rows."""

    def __init__(
        self,
        factory: ParameterFactory,
        model: Architecture,
        tensors: Tensors,
        region: Region,
        dropout: Callable[[MaskedBatch], Dropout | None],
    ):
        super().__init__()
        output, transform = model.output, None if model.output.words is None else model.output.words.transform
        self.ops = factory.ops
        self.norm = normalization(factory, model.stacks[-1].norm, tensors)
        self.words = None if transform is None else WordHead(factory, transform, tensors, region)
        self.rows = None if output.rows is None else RowHead(factory, tensors, output.rows, region, dropout)
        # A model without a row head may still have a pooler.
        alone = output.pooler and output.rows is None
        self.pooler = WholeLinear(factory, tensors, "pooler.dense") if alone else None

    def forward(
        self, stream: ResidualState, batch: MaskedBatch | None = None, scales: torch.Tensor | None = None
    ) -> Losses | torch.Tensor:
        """Return the losses of `batch` or, without a batch, the word logits [tokens, ids of this rank]."""
        x = self.normed(stream)
        if batch is None:
            assert self.words is not None
            return self.words.logits(x)
        word_losses, scale = Losses(()), None if scales is None else scales[0]
        if self.words is not None:
            word_losses = Losses((self.words(x, batch, scale),))
        if self.rows is None:
            return word_losses
        row_losses = self.rows(x, batch)
        return Losses((*word_losses.terms, *row_losses.terms), row_losses.metrics)

    def normed(self, stream: ResidualState) -> torch.Tensor:
        """Return the stream after the last layer and the final norm, [tokens, h]."""
        return stream.sum(self.ops) if self.norm is None else self.norm(stream)[1]


def losses_of(output: Output) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the losses and metrics of a model with this `output`."""
    if output.words is None:
        return ((), ()) if output.rows is None else (("class",), ("accuracy",))
    return (("lm",), ()) if output.rows is None else (("lm", "pair"), ("pair_accuracy",))


class BertStage(StackStage[MaskedBatch]):
    """The units of a BERT that one stage holds."""

    def __init__(
        self,
        model: ModelConfig,
        units: Sequence[Unit],
        factory: ParameterFactory,
        region: Region,
        options: StageOptions = StageOptions(),  # noqa: B008 - frozen
    ):
        super().__init__(model, units, factory, region, options)
        terms, self.metrics = losses_of(self.architecture.output)
        self.head_terms = dict.fromkeys(terms, 1.0)
        self.read_layer = self._read_layer()

    def forward(
        self, batch: MaskedBatch, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        # Outputs are those of all tokens.
        batch = replace(batch, predicted=None) if outputs else batch
        return super().forward(batch, *cargo, outputs=outputs, scales=scales)

    def _read_layer(self) -> int | None:
        """Return the index of the last layer if it can run only on the tokens that the head of this stage reads, else
        None."""
        stack = self.architecture.stacks[-1]
        here = stack.numbers[-1] in self.units and self.head is not None
        # GEMMs in fp8 need multiples of 16 or 128 tokens.
        narrow = isinstance(self.ops.matmuls, NarrowMatmuls)
        return stack.numbers[-1] if here and stack.layers[-1].queries_alone and not narrow else None

    def reads_some(self, batch: MaskedBatch) -> bool:
        """Whether the head reads only some tokens of `batch`, and this rank has whole rows."""
        words = self.architecture.output.words is not None
        return self.head is not None and words and batch.predicted is not None and not self.region.sequence

    @property
    def reads_first(self) -> bool:
        """Whether the head reads the first token of each row."""
        return self.architecture.output.rows is not None

    def head_losses(
        self, stream: ResidualState, batch: MaskedBatch, scales: torch.Tensor | None, auxiliary: AuxiliarySums | None
    ) -> Losses:
        if self.reads_some(batch):
            if self.read_layer is None:
                numbers = numbers_at(batch.read_columns(first=self.reads_first), batch.tokens.shape[1])
                stream = ResidualState(stream.sum(self.ops).index_select(0, numbers))
            batch = batch.read(first=self.reads_first)
        return super().head_losses(stream, batch, scales, auxiliary)

    def outputs(self, stream: ResidualState, batch: MaskedBatch) -> torch.Tensor:
        """Return the logits of words [b, s, ids of this rank], of classes [b, classes], or of choices [b / choices,
        choices]."""
        head = cast(BertHead, self.head)
        rows = head.rows
        if head.words is not None or rows is None:
            return super().outputs(stream, batch)
        return self.run_head(stream, lambda stream: rows.logits(head.normed(stream), batch))

    def build_embedding(self, factory: ParameterFactory, tensors: Tensors) -> Embedding:
        return Embedding(factory, self.architecture.input, tensors, self.region, self.residual)

    def build_head(self, factory: ParameterFactory, tensors: Tensors) -> BertHead:
        return BertHead(factory, self.architecture, tensors, self.region, self.pooled_dropout)

    def pooled_dropout(self, batch: MaskedBatch) -> Dropout | None:
        """Return the dropout of a classifier's pooled first tokens. The head for segment order has no dropout."""
        seed, probability = self.dropout_seed, self.architecture.input.dropout
        if seed is None or not probability or self.architecture.output.words is not None:
            return None
        keys = token_keys(seed, batch.samples, torch.zeros_like(batch.samples[:1]))[:, 0]
        rule = self.options.dropout_rule
        return Dropout(keys, site_key(OUTSIDE, "pooler", rule), probability, rule)

    def context(self, batch: MaskedBatch) -> ForwardContext:
        width = batch.tokens.shape[1] * self.ops.row_shards
        context = forward_context(
            self.architecture,
            batch.samples,
            batch.positions,
            self.region.axis,
            columns=batch.columns,
            documents=padding_documents(batch.lengths, width),
            sequence=self.region.sequence,
            dropout_seed=self.dropout_seed,
            dtype=self.dtype,
            dropout_rule=self.options.dropout_rule,
            row_shards=self.ops.row_shards,
        )
        if self.read_layer is None or not self.reads_some(batch):
            return context
        return context.reading(self.read_layer, batch.read_columns(first=self.reads_first))

    def embed(self, embedding: nn.Module, batch: MaskedBatch, context: ForwardContext) -> torch.Tensor:
        return cast(torch.Tensor, embedding(batch.tokens, batch.positions, context, batch.types))
