"""Left-to-right language models that read the neighbours of each chunk of their text, cut into pipeline stages.

    stage(batch, *cargo) -> cargo             [tokens, h], and the neighbours [b l k r, h] if a later stage reads them
    last(batch, *cargo)  -> the term "lm"     as of a decoder

Neighbours are embedded along with the text, since the first stage holds the table. They travel as they are up to the
layer that has their encoder, and as what it made of them from there to the last layer that attends to them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.batch import DecoderBatch, NeighbourBatch
from mega.core.model.auxiliary import AuxiliarySums
from mega.core.model.decoder import DecoderStage
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext, NeighbourStates, forward_context
from mega.core.model.layer import TransformerLayer
from mega.core.model.residual import ResidualState
from mega.core.parallel.weight import ParameterFactory, weights


class RetrieverStage(DecoderStage):
    """The units of such a model that one stage holds."""

    def build_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Embedding:
        """Its tables are looked up twice in a pass, so that they have two gradients."""
        embedding = super().build_embedding(factory, tensors)
        for table in weights(embedding):
            table.uses += 1
        return embedding

    def cargo(self, batch: DecoderBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        found = super().cargo(batch)
        if self._reading_from(self.units[0]):
            assert isinstance(batch, NeighbourBatch)
            share = self.region.size if self.region.sequence else 1
            found.append(((batch.neighbours.numel() // share, self.architecture.hidden), self.residual))
        return found

    def _reading_from(self, unit: int | str) -> bool:
        """Whether a layer from `unit` on reads neighbours."""
        units = self.architecture.units
        return units.index(unit) <= units.index(self.architecture.reading[-1])

    def stream(
        self, batch: DecoderBatch, auxiliary: AuxiliarySums | None, *cargo: torch.Tensor
    ) -> tuple[ResidualState, *tuple[torch.Tensor, ...]]:
        assert isinstance(batch, NeighbourBatch)
        context, near = replace(self.context(batch), auxiliary=auxiliary), None
        if self._reading_from(self.units[0]):
            near = self._neighbours(batch, *cargo[1:])
        context = replace(context, neighbours=near)
        begun = cargo[0] if self.embedding is None else self.embedded(self.embedding, batch, context)
        if torch.is_grad_enabled() and not begun.requires_grad:
            begun.requires_grad_()
        stream = self.through(self.layers, ResidualState(begun), context)
        units = self.architecture.units
        after = units.index(self.units[-1]) + 1
        if near is None or after == len(units) or not self._reading_from(units[after]):
            return (stream,)
        return stream, near.read

    def _neighbours(self, batch: NeighbourBatch, *cargo: torch.Tensor) -> NeighbourStates:
        """As they come to this stage: those of the batch, embedded, or the cargo."""
        size, chunks, each, width = batch.neighbours.shape
        numbers = torch.arange(chunks * each, device=batch.samples.device)
        # Dropout of samples with numbers below 0, which no text has.
        samples = -1 - (batch.samples[:, None] * (chunks * each) + numbers).flatten()
        positions = torch.arange(width, device=batch.samples.device).expand(size * chunks * each, width)
        context = forward_context(
            self.architecture,
            samples,
            positions,
            self.region.axis,
            sequence=self.region.sequence,
            dropout_seed=self.dropout_seed,
            dtype=self.dtype,
            dropout_rule=self.options.dropout_rule,
        )
        if self.embedding is None:
            (tokens,) = cargo
        else:
            text = replace(batch, tokens=batch.neighbours.flatten(0, 2), positions=positions)
            tokens = self.embedded(self.embedding, text, context)
            if torch.is_grad_enabled() and not tokens.requires_grad:
                tokens.requires_grad_()
        return NeighbourStates(tokens, context, batch.found, (chunks, each, width), batch.tokens.shape[1] // chunks)

    def unit(self, layer: nn.Module, stream: ResidualState, context: ForwardContext) -> ResidualState:
        """The layer that has the encoder gives two tensors, which are one to those who bring its weights here."""
        near = context.neighbours
        if near is None or not cast(TransformerLayer, layer).encodes:
            return super().unit(layer, stream, context)
        assert self.with_full_params is not None
        x = stream.sum(self.ops)

        def run(both: torch.Tensor) -> torch.Tensor:
            inner = replace(near, tokens=both[len(x) :], encoded=None)
            y = layer(ResidualState(both[: len(x)]), replace(context, neighbours=inner)).sum(self.ops)
            return torch.cat([y, inner.read])

        both = self.with_full_params(layer, run, torch.cat([x, near.tokens]))
        near.encoded = both[len(x) :]
        return ResidualState(both[: len(x)])
