"""Left-to-right language models, cut into pipeline stages: GPT and Llama are values of one config.

A stage is a run of blocks, with the embedding in front of the first and the head behind the last:

    stage(batch, *cargo) -> cargo            [tokens, h], our tokens under sequence parallelism
    last(batch, *cargo)  -> (sum of weight x loss, sum of weight)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from mega.core.batch import DecoderBatch
from mega.core.config.sections import MemoryConfig, ModelConfig
from mega.core.inventory import Place, Tensor, inventory
from mega.core.model.block import Block, Norm, Stream
from mega.core.model.flow import Flow, flow
from mega.core.ops.sinusoid import sinusoid
from mega.core.parallel.collectives import own_block
from mega.core.parallel.mesh import Axis
from mega.core.parallel.pipeline import Cargo, Loss
from mega.core.parallel.recompute import groups, recomputed
from mega.core.parallel.vocab import VocabEmbedding, cross_entropy, logits, look_up
from mega.core.parallel.weight import Maker, Weight

Around = Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]

OUTSIDE = -1
"""The "layer" of dropout outside the blocks."""


class Embedding(nn.Module):
    """Token rows, scaled where the model says so, plus learned or sinusoidal positions; in the residual stream's dtype,
    then dropout.
    """

    def __init__(
        self,
        make: Maker,
        model: ModelConfig,
        tensors: dict[str, Tensor],
        tp: Axis,
        sequence: bool,
        residual: torch.dtype,
    ):
        super().__init__()
        self.residual = residual
        self.tokens = VocabEmbedding(make, tensors["model.embed_tokens.weight"], tp, sequence)
        table = tensors.get("model.embed_positions.weight")
        self.positions = make(table) if table is not None else None
        assert model.hidden is not None
        self.scale = model.hidden**0.5 if model.embedding_scale else None
        self.offset = model.position_offset if model.position == "sinusoidal" else None
        self.dropout = model.hidden_dropout

    def forward(self, batch: DecoderBatch, flow: Flow) -> torch.Tensor:
        x = self.tokens(batch.tokens.flatten())
        if self.scale is not None:
            x = x * self.scale
        where = own_block(batch.positions.flatten(), flow.tp) if flow.sequence else batch.positions.flatten()
        if self.positions is not None:
            x = x + look_up(where, self.positions)
        elif self.offset is not None:
            x = x + sinusoid(where + self.offset, x.shape[-1], x.dtype)
        return flow.drop(x.to(self.residual), self.dropout, OUTSIDE, "embedding")


class Head(nn.Module):
    """Final norm, logits over the cut vocabulary, and the loss. `tied` is the embedding's weight where shared."""

    def __init__(
        self,
        make: Maker,
        model: ModelConfig,
        tensors: dict[str, Tensor],
        tp: Axis,
        sequence: bool,
        tied: Weight | None,
    ):
        super().__init__()
        self.norm = Norm(make, model, tensors, "model.norm")
        name = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
        self.weight = make(tensors[name]) if tied is None else tied
        if tied is not None:
            tied.uses += 1
        self.tp, self.sequence = tp, sequence

    def logits(self, stream: Stream) -> torch.Tensor:
        """[tokens, ids of this rank]"""
        return logits(self.norm(stream)[1], self.weight, self.tp, self.sequence)

    def forward(self, stream: Stream, batch: DecoderBatch) -> Loss:
        normed = self.norm(stream)[1]
        nll = cross_entropy(normed, batch.labels.flatten(), self.weight, self.tp, self.sequence)
        weight = batch.loss_weights.flatten().to(nll.dtype)
        return Loss((nll * weight).sum(), weight.sum())


class DecoderStage(nn.Module):
    """The blocks `layers` of a decoder, with embedding and head where this stage has them.

    dropout_seed: None switches dropout off. residual: dtype of the residual stream, where it is not the weights'.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: Iterable[int],
        make: Maker,
        tp: Axis,
        *,
        first: bool = True,
        last: bool = True,
        sequence: bool = False,
        dropout_seed: int | None = None,
        embedding: Weight | None = None,
        recompute: MemoryConfig | None = None,
        residual: torch.dtype | None = None,
    ):
        super().__init__()
        self.model, self.tp, self.sequence = model, tp, sequence and tp.size > 1
        self.dropout_seed, self.dtype, self.row_shards = dropout_seed, make.dtype, make.ops.row_shards
        self.residual = residual if residual is not None else make.dtype
        by_place: dict[Place, dict[str, Tensor]] = {}
        for tensor in inventory(model):
            for place in tensor.places:
                by_place.setdefault(place, {})[tensor.name] = tensor
        self.embedding = (
            Embedding(make.exact, model, by_place["embedding"], tp, self.sequence, self.residual) if first else None
        )
        self.layers = list(layers)
        self.blocks = nn.ModuleList(
            Block(make, model, _relative(by_place[layer], layer), layer, tp, self.sequence) for layer in self.layers
        )
        full = recompute is not None and recompute.recompute == "full"
        self.runs = list(
            groups(len(self.layers), recompute.recompute_method, recompute.recompute_layers)
            if recompute is not None and full
            else groups(len(self.layers), None, None)
        )
        self.around: Around | None = None
        """Runs a unit (embedding, block, head) with its weights here only meanwhile; None where they stay."""
        self.share = tp if recompute is not None and recompute.distribute_saved and not self.sequence else None
        tied = self.embedding.tokens.weight if model.tied and self.embedding is not None else embedding
        self.head = Head(make.exact, model, by_place["head"], tp, self.sequence, tied) if last else None

    def cargo(self, rows: int, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what flows between stages for b rows of s tokens."""
        assert self.model.hidden
        tokens = rows * columns // (self.tp.size if self.sequence else 1)
        return [((tokens, self.model.hidden), self.residual)]

    def hidden(self, batch: DecoderBatch, *cargo: torch.Tensor) -> torch.Tensor:
        """Everything up to the head: [tokens, h], our tokens under sequence."""
        return self._stream(batch, *cargo).sum()

    def _stream(self, batch: DecoderBatch, *cargo: torch.Tensor) -> Stream:
        seed = self.dropout_seed if self.training else None
        facts = flow(
            self.model,
            batch,
            self.tp,
            sequence=self.sequence,
            dropout_seed=seed,
            dtype=self.dtype,
            row_shards=self.row_shards,
        )
        stream = Stream(cargo[0] if self.embedding is None else self._embed(batch, facts))
        for which, again in self.runs:
            blocks = [self.blocks[number] for number in which]
            if again and torch.is_grad_enabled():
                run = partial(self._from_sum, blocks, facts)
                stream = Stream(recomputed(run, stream.sum(), self.share))
            else:
                stream = self._through(blocks, stream, facts)
        return stream

    def _embed(self, batch: DecoderBatch, facts: Flow) -> torch.Tensor:
        assert self.embedding is not None
        embedding = self.embedding
        if self.around is None:
            return embedding(batch, facts)
        return self.around(embedding, lambda _: embedding(batch, facts), batch.tokens)

    def _through(self, blocks: Iterable[nn.Module], stream: Stream, facts: Flow, around: bool = True) -> Stream:
        for block in blocks:
            if self.around is None or not around:
                stream = block(stream, facts)
            else:
                run = partial(self._from_sum, [block], facts, around=False)
                stream = Stream(self.around(block, run, stream.sum()))
        return stream

    def _from_sum(self, blocks: Sequence[nn.Module], facts: Flow, x: torch.Tensor, around: bool = True) -> torch.Tensor:
        """Blocks as a function of one tensor, for whoever runs them as a unit."""
        return self._through(blocks, Stream(x), facts, around).sum()

    def _loss(self, stream: Stream, batch: DecoderBatch) -> Loss:
        assert self.head is not None
        if self.around is None:
            return self.head(stream, batch)
        made: list[Loss] = []

        def run(x: torch.Tensor) -> torch.Tensor:
            made.append(self.head(Stream(x), batch))  # type: ignore[misc]
            return made[0].total

        total = self.around(self.head, run, stream.sum())
        return Loss(total, made[0].weight)

    def logits(self, batch: DecoderBatch, *cargo: torch.Tensor) -> torch.Tensor:
        """Last stage only: [b, s, ids of this rank]; whole where tp is 1."""
        assert self.head is not None
        return self.head.logits(self._stream(batch, *cargo)).unflatten(0, tuple(batch.tokens.shape))

    def forward(self, batch: DecoderBatch, *cargo: torch.Tensor) -> Cargo | Loss:
        stream = self._stream(batch, *cargo)
        return (stream.sum(),) if self.head is None else self._loss(stream, batch)


def _relative(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
