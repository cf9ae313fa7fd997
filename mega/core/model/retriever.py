"""Left-to-right language models that attend to retrieved neighbours of each chunk (Retro), as pipeline stages.

    stage(batch, *cargo) -> cargo             [tokens, h], and neighbours [b l k r, h] if a later stage needs them
    last(batch, *cargo)  -> the term "lm"     as in a decoder

The first stage holds the embedding table, so it embeds the neighbours together with the text. The embedded neighbours
are passed from stage to stage up to the layer that holds their encoder. From that layer on, the encoded neighbours are
passed up to the last layer that attends to neighbours.
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
    """The units of a Retro model that one stage holds."""

    def build_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Embedding:
        """Create the embedding. A forward pass looks up each table twice (for text and neighbours), so each table gets
        two gradients."""
        embedding = super().build_embedding(factory, tensors)
        for table in weights(embedding):
            table.uses += 1
        return embedding

    def cargo(self, batch: DecoderBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        shapes = super().cargo(batch)
        if self._reading_from(self.units[0]):
            assert isinstance(batch, NeighbourBatch)
            share = self.region.size if self.region.sequence else 1
            shapes.append(((batch.neighbours.numel() // share, self.architecture.hidden), self.residual))
        return shapes

    def _reading_from(self, unit: int | str) -> bool:
        """Return whether `unit` or a later layer attends to neighbours."""
        units = self.architecture.units
        return units.index(unit) <= units.index(self.architecture.reading[-1])

    def stream(
        self, batch: DecoderBatch, auxiliary: AuxiliarySums | None, *cargo: torch.Tensor
    ) -> tuple[ResidualState, *tuple[torch.Tensor, ...]]:
        assert isinstance(batch, NeighbourBatch)
        context, states = replace(self.context(batch), auxiliary=auxiliary), None
        if self._reading_from(self.units[0]):
            states = self._neighbours(batch, *cargo[1:])
        context = replace(context, neighbours=states)
        embedded = cargo[0] if self.embedding is None else self.embedded(self.embedding, batch, context)
        if torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()
        stream = self.through(self.layers, ResidualState(embedded), context)
        units = self.architecture.units
        after = units.index(self.units[-1]) + 1
        if states is None or after == len(units) or not self._reading_from(units[after]):
            return (stream,)
        return stream, states.read

    def _neighbours(self, batch: NeighbourBatch, *cargo: torch.Tensor) -> NeighbourStates:
        """Return the neighbours at the input of this stage, embedded from the batch or received from the previous
        stage."""
        size, chunks, count, width = batch.neighbours.shape
        numbers = torch.arange(chunks * count, device=batch.samples.device)
        # Dropout is a function of the sample number. Neighbours get negative sample numbers, which texts do not use.
        samples = -1 - (batch.samples[:, None] * (chunks * count) + numbers).flatten()
        positions = torch.arange(width, device=batch.samples.device).expand(size * chunks * count, width)
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
        return NeighbourStates(tokens, context, batch.found, (chunks, count, width), batch.tokens.shape[1] // chunks)

    def unit(self, layer: nn.Module, stream: ResidualState, context: ForwardContext) -> ResidualState:
        """Run a layer with unsharded weights.

        The layer that holds the encoder returns two tensors, which are concatenated because the unshard hook returns
        only one tensor.
        """
        states = context.neighbours
        if states is None or not cast(TransformerLayer, layer).encodes:
            return super().unit(layer, stream, context)
        assert self.with_full_params is not None
        x = stream.sum(self.ops)

        def run(both: torch.Tensor) -> torch.Tensor:
            inner = replace(states, tokens=both[len(x) :], encoded=None)
            y = layer(ResidualState(both[: len(x)]), replace(context, neighbours=inner)).sum(self.ops)
            return torch.cat([y, inner.read])

        outputs = self.with_full_params(layer, run, torch.cat([x, states.tokens]))
        states.encoded = outputs[len(x) :]
        return ResidualState(outputs[: len(x)])
