"""BERT (Devlin et al. 2018), cut into pipeline stages: a stack that reads rows in both directions, and two losses.

    lm     masked words, over their number: dense, activation, norm, the tied embedding and a bias of the vocabulary
    pair   whether a row's two parts stand in the wrong order, over the rows where that is known: from its first token

The words' head acts on the tokens among which the masked ones are, where the batch knows them and a rank holds whole
rows; else on all, as Megatron-LM's does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from mega.core.batch import MaskedBatch, Term
from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor, Unit
from mega.core.model.block import Norm, ResidualState
from mega.core.model.embedding import OUTSIDE, Embedding
from mega.core.model.forward import ForwardContext, forward_context, padding_documents
from mega.core.model.stack import Losses, StackStage
from mega.core.model.stage import StageOptions
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import Dropout
from mega.core.ops.norm import accurate
from mega.core.parallel.collectives import reduce_from_region
from mega.core.parallel.linear import ColumnLinear
from mega.core.parallel.region import ALONE, Region
from mega.core.parallel.vocab import logits, token_loss
from mega.core.parallel.weight import ParameterFactory

Tensors = dict[str, Tensor]


class Dense(ColumnLinear):
    """A linear layer that every rank holds whole, for the tokens or rows that it has."""

    def __init__(self, factory: ParameterFactory, tensors: Tensors, name: str):
        super().__init__(factory, [tensors[f"{name}.weight"]], [tensors[f"{name}.bias"]], ALONE)


class WordHead(nn.Module):
    """What stood under a mask: dense, activation and norm of our tokens, then logits over the cut vocabulary."""

    def __init__(self, factory: ParameterFactory, model: ModelConfig, tensors: Tensors, region: Region):
        super().__init__()
        self.dense = Dense(factory, tensors, "lm_head.dense")
        self.norm = Norm(factory, model, tensors, "lm_head.norm")
        self.weight = factory(tensors["model.embed_tokens.weight"])
        self.bias = factory(tensors["lm_head.bias"])
        self.activation, self.ops, self.region = model.head_activation, factory.ops, region

    def forward(self, x: torch.Tensor, batch: MaskedBatch, scale: torch.Tensor | None = None) -> Term:
        """x [tokens, h], our tokens under sequence -> the loss, with its gradient where its scale is known."""
        labels, weights = batch.labels.flatten(), batch.loss_weights.flatten()
        if batch.predicted is not None and not self.region.sequence:
            rows = torch.arange(len(batch.predicted), device=x.device) * batch.tokens.shape[1]
            chosen = (rows[:, None] + batch.predicted).flatten()
            x, labels, weights = x[chosen], labels[chosen], weights[chosen]
        return token_loss(self.transformed(x), labels, weights, self.weight, self.region, self.bias, scale)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, ids of this rank]"""
        return logits(self.transformed(x), self.weight, self.region, self.bias)

    def transformed(self, x: torch.Tensor) -> torch.Tensor:
        active = self.ops.activate(self.dense.matmul(x), self.dense.bias, self.activation)
        return self.norm(ResidualState(active))[1]


class RowHead(nn.Module):
    """What kind of row it is: its first token, pooled, and a number of classes. Every tensor rank does the same.

    choices: rows that stand together, where one of them is chosen by a score that each has; 1 elsewhere. dropout: of
    what is pooled, one row of it for each row of a batch.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        tensors: Tensors,
        name: str,
        region: Region,
        dropout: Callable[[MaskedBatch], Dropout | None],
        choices: int = 1,
    ):
        super().__init__()
        self.pooler = Dense(factory, tensors, "pooler.dense")
        self.out = Dense(factory, tensors, name)
        self.region, self.dropout, self.choices = region, dropout, choices

    def forward(self, x: torch.Tensor, batch: MaskedBatch) -> Losses:
        """x [tokens, h], our tokens under sequence -> the loss, and how often the likeliest class is right."""
        classes = self.logits(x, batch)
        losses = F.cross_entropy(classes.to(accurate(classes.dtype)), batch.pairs.clamp(min=0), reduction="none")
        right = (classes.detach().argmax(-1) == batch.pairs).to(losses.dtype)
        rows = batch.pair_weights.to(losses.dtype)
        return Losses((Term((losses * rows).sum(), rows.sum()),), (Term((right * rows).sum(), rows.sum()),))

    def logits(self, x: torch.Tensor, batch: MaskedBatch) -> torch.Tensor:
        """[b, classes] on every rank, or [b / choices, choices]."""
        pooled, drop = self.pooler(self.first_tokens(x, *batch.tokens.shape)).tanh(), self.dropout(batch)
        found: torch.Tensor = self.out(pooled if drop is None else drop(pooled))
        return found if self.choices == 1 else found.view(-1, self.choices)

    def first_tokens(self, x: torch.Tensor, batch: int, seq: int) -> torch.Tensor:
        """The first token of each row: [batch, h] on every rank. Under sequence a rank holds those of some rows."""
        if not self.region.sequence:
            return x.unflatten(0, (batch, seq))[:, 0]
        where = torch.arange(batch, device=x.device) * seq - self.region.axis.index * len(x)
        ours = (where >= 0) & (where < len(x))
        held = x[where.clamp(0, len(x) - 1)].masked_fill(~ours[:, None], 0)
        return reduce_from_region(held, self.region.axis, sequence=False)


ROW_HEADS = {"lm": "binary_head", "classification": "classification_head", "choice": "multichoice_head", "none": ""}
"""The model's head -> what judges rows, if anything does."""


class BertHead(nn.Module):
    """The final norm, where norms stand before their branches, and what judges words and rows."""

    def __init__(
        self,
        factory: ParameterFactory,
        model: ModelConfig,
        tensors: Tensors,
        region: Region,
        dropout: Callable[[MaskedBatch], Dropout | None],
    ):
        super().__init__()
        self.ops = factory.ops
        self.norm = Norm(factory, model, tensors, "model.norm") if model.norm_placement == "pre" else None
        self.words = WordHead(factory, model, tensors, region) if model.head == "lm" else None
        name, pooled = ROW_HEADS[model.head], "pooler.dense.weight" in tensors
        judges = f"{name}.weight" in tensors
        choices = model.classes if model.head == "choice" else 1
        self.rows = RowHead(factory, tensors, name, region, dropout, choices) if judges else None
        # A model without a head still has its pooler.
        self.pooler = Dense(factory, tensors, "pooler.dense") if pooled and not judges else None

    def forward(
        self, stream: ResidualState, batch: MaskedBatch | None = None, scales: torch.Tensor | None = None
    ) -> Losses | torch.Tensor:
        """The losses of a batch; logits of words [tokens, ids of this rank] without one."""
        x = self.normed(stream)
        if batch is None:
            assert self.words is not None
            return self.words.logits(x)
        found, scale = Losses(()), None if scales is None else scales[0]
        if self.words is not None:
            found = Losses((self.words(x, batch, scale),))
        if self.rows is None:
            return found
        judged = self.rows(x, batch)
        return Losses((*found.terms, *judged.terms), judged.metrics)

    def normed(self, stream: ResidualState) -> torch.Tensor:
        """[tokens, h] after the last block."""
        return stream.sum(self.ops) if self.norm is None else self.norm(stream)[1]


_CLASS = ("class",), ("accuracy",)
NAMES = {"lm": (("lm", "pair"), ("pair_accuracy",)), "classification": _CLASS, "choice": _CLASS, "none": ((), ())}
"""The model's head -> its losses and metrics."""


class BertStage(StackStage):
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
        self.terms, self.metrics = NAMES[model.head]
        if model.head == "lm" and not model.binary_head:
            self.terms, self.metrics = ("lm",), ()

    def outputs(self, stream: ResidualState, batch: MaskedBatch) -> torch.Tensor:
        """Logits of the words [b, s, ids of this rank], or of the classes [b, classes], or choices."""
        head = cast(BertHead, self.head)
        rows = head.rows
        if self.model.head not in ("classification", "choice") or rows is None:
            return super().outputs(stream, batch)
        return self.headed(stream, lambda stream: rows.logits(head.normed(stream), batch))

    def build_embedding(self, factory: ParameterFactory, tensors: Tensors) -> Embedding:
        return Embedding(factory, self.model, tensors, self.region, self.residual)

    def build_head(self, factory: ParameterFactory, tensors: Tensors) -> BertHead:
        return BertHead(factory, self.model, tensors, self.region, self.pooled_dropout)

    def pooled_dropout(self, batch: MaskedBatch) -> Dropout | None:
        """Of the pooled first tokens of a classifier; what judges the order of parts has none."""
        seed, probability = self.dropout_seed, self.model.hidden_dropout
        if seed is None or not probability or self.model.head == "lm":
            return None
        keys = token_keys(seed, batch.samples, torch.zeros_like(batch.samples[:1]))[:, 0]
        rule = self.options.dropout_rule
        return Dropout(keys, site_key(OUTSIDE, "pooler", rule), probability, rule)

    def context(self, batch: MaskedBatch) -> ForwardContext:
        width = batch.tokens.shape[1] * self.ops.row_shards
        return forward_context(
            self.model,
            batch.samples,
            batch.positions,
            self.region.axis,
            columns=batch.columns,
            documents=padding_documents(batch.lengths, width),
            kind="full",
            sequence=self.region.sequence,
            dropout_seed=self.dropout_seed,
            dtype=self.dtype,
            dropout_rule=self.options.dropout_rule,
            row_shards=self.ops.row_shards,
        )

    def embed(self, embedding: nn.Module, batch: MaskedBatch, context: ForwardContext) -> torch.Tensor:
        return cast(torch.Tensor, embedding(batch.tokens, batch.positions, context, batch.types))
