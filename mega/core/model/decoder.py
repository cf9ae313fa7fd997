"""Left-to-right language models, cut into pipeline stages: GPT and Llama are values of one config.

A stage is a run of blocks, with the embedding in front of the first and the head after the last:

    stage(batch, *cargo) -> cargo             [tokens, h], our tokens under sequence parallelism
    last(batch, *cargo)  -> the term "lm"     sum of weight x negative log-likelihood, sum of weight
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from mega.core.batch import DecoderBatch, Term
from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor, Unit, inventory
from mega.core.model.block import Block, Norm, ResidualState
from mega.core.model.forward import ForwardContext, forward_context
from mega.core.model.stage import StageOptions, UnshardHook
from mega.core.ops.sinusoid import sinusoid
from mega.core.parallel.collectives import local_shard
from mega.core.parallel.mesh import Axis
from mega.core.parallel.pipeline import StageOutput
from mega.core.parallel.recompute import groups, recomputed
from mega.core.parallel.region import Region
from mega.core.parallel.vocab import VocabEmbedding, cross_entropy, logits, look_up
from mega.core.parallel.weight import ParameterFactory

OUTSIDE = -1
"""The "layer" of dropout outside the blocks."""


class Embedding(nn.Module):
    """Token rows, scaled if the model requires it, plus learned or sinusoidal positions; in the residual stream's
    dtype, then dropout.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        model: ModelConfig,
        tensors: dict[str, Tensor],
        region: Region,
        residual: torch.dtype,
    ):
        super().__init__()
        self.residual = residual
        self.tokens = VocabEmbedding(factory, tensors["model.embed_tokens.weight"], region)
        table = tensors.get("model.embed_positions.weight")
        self.positions = factory(table) if table is not None else None
        assert model.hidden is not None
        self.scale = model.hidden**0.5 if model.embedding_scale else None
        self.offset = model.position_offset if model.position == "sinusoidal" else None
        self.dropout, self.ops = model.hidden_dropout, factory.ops

    def forward(self, batch: DecoderBatch, context: ForwardContext) -> torch.Tensor:
        x = self.tokens(batch.tokens.flatten())
        if self.scale is not None:
            x = x * self.scale
        where = local_shard(batch.positions.flatten(), context.tp) if context.sequence else batch.positions.flatten()
        if self.positions is not None:
            x = x + look_up(where, self.positions)
        elif self.offset is not None:
            x = x + sinusoid(where + self.offset, x.shape[-1], x.dtype)
        drop = context.dropout(self.dropout, OUTSIDE, "embedding")
        return self.ops.added(None, x.to(self.residual), None, drop)


class Head(nn.Module):
    """Final norm, logits over the cut vocabulary, and the loss."""

    def __init__(self, factory: ParameterFactory, model: ModelConfig, tensors: dict[str, Tensor], region: Region):
        super().__init__()
        self.norm = Norm(factory, model, tensors, "model.norm")
        self.weight = factory(tensors["model.embed_tokens.weight" if model.tied else "lm_head.weight"])
        self.region = region

    def forward(self, stream: ResidualState, batch: DecoderBatch | None = None) -> Term | torch.Tensor:
        """The loss of a batch; logits [tokens, ids of this rank] without one."""
        normed = self.norm(stream)[1]
        if batch is None:
            return logits(normed, self.weight, self.region)
        nll = cross_entropy(normed, batch.labels.flatten(), self.weight, self.region)
        weight = batch.loss_weights.flatten().to(nll.dtype)
        return Term((nll * weight).sum(), weight.sum())


class DecoderStage(nn.Module):
    """The units of a decoder that one stage holds: "embedding", blocks by number, "head", in this order.

    with_full_params: runs a unit with its whole weights on this rank only meanwhile; None where they stay.
    """

    terms, metrics = ("lm",), ()

    def __init__(
        self,
        model: ModelConfig,
        units: Sequence[Unit],
        factory: ParameterFactory,
        region: Region,
        options: StageOptions = StageOptions(),  # noqa: B008 - frozen
    ):
        super().__init__()
        self.model, self.units, self.region, self.options = model, tuple(units), region, options
        self.dtype, self.residual = factory.dtype, options.residual or factory.dtype
        self.ops = factory.ops
        self.with_full_params: UnshardHook | None = None
        by_unit: dict[Unit, dict[str, Tensor]] = {}
        for tensor in inventory(model):
            for unit in tensor.units:
                by_unit.setdefault(unit, {})[tensor.name] = tensor
        self.embedding = (
            Embedding(factory.exact, model, by_unit["embedding"], region, self.residual)
            if "embedding" in units
            else None
        )
        self.layers = [unit for unit in units if isinstance(unit, int)]
        self.blocks = nn.ModuleList(
            Block(factory, model, _relative(by_unit[layer], layer), layer, region) for layer in self.layers
        )
        self.runs = list(groups(len(self.layers), *options.full_recompute))
        self.head = Head(factory.exact, model, by_unit["head"], region) if "head" in units else None

    def cargo(self, batch: DecoderBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what this stage is given for `batch`."""
        assert self.model.hidden
        tokens = batch.tokens.numel() // (self.region.size if self.region.sequence else 1)
        return [((tokens, self.model.hidden), self.residual)]

    def forward(self, batch: DecoderBatch, *cargo: torch.Tensor, outputs: bool = False) -> StageOutput:
        """outputs: the last stage gives logits [b, s, ids of this rank] instead of the loss."""
        stream = self._stream(batch, *cargo)
        if self.head is None:
            return StageOutput(cargo=(stream.sum(self.ops),))
        if outputs:
            return StageOutput(outputs=self._logits(stream).unflatten(0, tuple(batch.tokens.shape)))
        return StageOutput(terms={"lm": self._loss(stream, batch)})

    def _stream(self, batch: DecoderBatch, *cargo: torch.Tensor) -> ResidualState:
        seed = self.options.dropout_seed if self.training else None
        context = forward_context(
            self.model,
            batch,
            self.region.axis,
            sequence=self.region.sequence,
            dropout_seed=seed,
            dtype=self.dtype,
            dropout_rule=self.options.dropout_rule,
            row_shards=self.ops.row_shards,
        )
        stream = ResidualState(cargo[0] if self.embedding is None else self._embed(batch, context))
        for which, recompute in self.runs:
            blocks = [self.blocks[number] for number in which]
            if recompute and torch.is_grad_enabled():
                run = partial(self._from_sum, blocks, context)
                stream = ResidualState(recomputed(run, stream.sum(self.ops), self._share))
            else:
                stream = self._through(blocks, stream, context)
        return stream

    @property
    def _share(self) -> Axis | None:
        """Over which ranks what recompute keeps is shared out."""
        return self.region.axis if self.options.distribute_saved and not self.region.sequence else None

    def _embed(self, batch: DecoderBatch, context: ForwardContext) -> torch.Tensor:
        assert self.embedding is not None
        embedding = self.embedding
        if self.with_full_params is None:
            return embedding(batch, context)
        return self.with_full_params(embedding, lambda _: embedding(batch, context), batch.tokens)

    def _through(
        self, blocks: Iterable[nn.Module], stream: ResidualState, context: ForwardContext, unshard: bool = True
    ) -> ResidualState:
        for block in blocks:
            if self.with_full_params is None or not unshard:
                stream = block(stream, context)
            else:
                run = partial(self._from_sum, [block], context, unshard=False)
                stream = ResidualState(self.with_full_params(block, run, stream.sum(self.ops)))
        return stream

    def _from_sum(
        self, blocks: Sequence[nn.Module], context: ForwardContext, x: torch.Tensor, unshard: bool = True
    ) -> torch.Tensor:
        """Blocks as a function of one tensor, for callers that run them as a unit."""
        return self._through(blocks, ResidualState(x), context, unshard).sum(self.ops)

    def _logits(self, stream: ResidualState) -> torch.Tensor:
        head = self.head
        assert head is not None
        if self.with_full_params is None:
            return head(stream)
        return self.with_full_params(head, lambda x: head(ResidualState(x)), stream.sum(self.ops))

    def _loss(self, stream: ResidualState, batch: DecoderBatch) -> Term:
        assert self.head is not None
        if self.with_full_params is None:
            return self.head(stream, batch)
        made: list[Term] = []

        def run(x: torch.Tensor) -> torch.Tensor:
            made.append(self.head(ResidualState(x), batch))  # type: ignore[misc]
            return made[0].total

        total = self.with_full_params(self.head, run, stream.sum(self.ops))
        return Term(total, made[0].weight)


def _relative(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
