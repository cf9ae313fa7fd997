"""Encoder-decoder language models as pipeline stages: Megatron-LM's T5 is one configuration.

The encoder's attention is bidirectional. Every layer of the decoder attends causally to the decoder's tokens, and to
all outputs of the encoder (the memory). A stage holds consecutive units of the encoder, the decoder or both:

    stage(batch, *cargo) -> cargo             in the encoder [tokens, h]; in the decoder [tokens, h] and the memory
    last(batch, *cargo)  -> the term "lm"     sum of weight x negative log-likelihood, sum of weight

Stages of the decoder pass the memory to the next stage unchanged. In the backward pass, each stage that attends to the
memory adds to the memory's gradient. Under sequence parallelism, the tokens of encoder and decoder are sharded
separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import nn

from mega.core.architecture import Tensor, Unit
from mega.core.batch import EncoderDecoderBatch
from mega.core.model.auxiliary import AuxiliarySums
from mega.core.model.decoder import Head
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext, MemoryTokens, forward_context, padding_documents
from mega.core.model.residual import Normalization, ResidualState
from mega.core.model.stack import StackStage
from mega.core.ops.counter import token_keys
from mega.core.parallel.weight import ParameterFactory


class Side(NamedTuple):
    """The fields of a batch for the encoder or for the decoder."""

    tokens: torch.Tensor  # int64 [b, s]
    samples: torch.Tensor  # int64 [b], global sample numbers

    @property
    def positions(self) -> torch.Tensor:
        """The column of each token, int64 [b, s]."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)


class EncoderDecoderStage(StackStage[EncoderDecoderBatch]):
    """The units of an encoder and a decoder that one stage holds, in the order of the architecture's units."""

    head_terms: Mapping[str, float] = MappingProxyType({"lm": 1.0})

    def build_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Embedding:
        return Embedding(factory, self.architecture.input, tensors, self.region, self.residual)

    def build_layers(self, factory: ParameterFactory, own: Mapping[Unit, dict[str, Tensor]]) -> None:
        encoder, decoder = self.architecture.stacks
        self.encoder, self.decoder_embedding = self.stack(factory, own, encoder), None
        if decoder.opens in self.units:
            middle, table = own[decoder.opens], self.architecture.input
            assert encoder.norm is not None
            self.encoder_norm = Normalization(factory, encoder.norm, middle)
            self.decoder_embedding = Embedding(
                factory.exact, table, middle, self.region, self.residual, site="decoder_embedding"
            )
        self.decoder = self.stack(factory, own, decoder)

    def build_head(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Head:
        words, norm = self.architecture.output.words, self.architecture.stacks[-1].norm
        assert words is not None and norm is not None
        return Head(factory, words, norm, tensors, self.region)

    def embed(self, embedding: nn.Module, batch: Side, context: ForwardContext) -> torch.Tensor:
        return cast(torch.Tensor, embedding(batch.tokens, batch.positions, context))

    @property
    def encodes(self) -> bool:
        """Whether this stage holds layers of the encoder. All other stages receive the memory from the previous
        stage."""
        return self.embedding is not None or len(self.encoder) > 0 or self.decoder_embedding is not None

    def cargo(self, batch: EncoderDecoderBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        share = self.region.size if self.region.sequence else 1
        encoder_shape, decoder_shape = (
            (tokens.numel() // share, self.architecture.hidden) for tokens in (batch.encoder_tokens, batch.tokens)
        )
        return (
            [(encoder_shape, self.residual)]
            if self.encodes
            else [(decoder_shape, self.residual), (encoder_shape, self.dtype)]
        )

    covered = True
    """Whether every token of the decoder attends to at least one token of the encoder."""

    def documents(self, batch: EncoderDecoderBatch) -> torch.Tensor:
        """Return the document of each encoder token, int64 [b, e]. Tokens attend only within a document, and padding is
        a separate document."""
        return padding_documents(batch.encoder_lengths.clamp(min=1), batch.encoder_tokens.shape[1])

    def readers(self, batch: EncoderDecoderBatch) -> torch.Tensor:
        """Return the document of the encoder that each decoder token attends to, int64 [b, d]."""
        return torch.zeros_like(batch.tokens)

    def stack_tokens(self, batch: EncoderDecoderBatch) -> tuple[torch.Tensor, ...]:
        return batch.encoder_tokens, batch.tokens

    def stream(
        self, batch: EncoderDecoderBatch, auxiliary: AuxiliarySums | None, *cargo: torch.Tensor
    ) -> tuple[ResidualState, *tuple[torch.Tensor, ...]]:
        documents = self.documents(batch)
        decoder_side = Side(batch.tokens, batch.samples)
        plain = self._context(decoder_side)
        if self.encodes:
            stream = self._encoded(batch, documents, auxiliary, *cargo)
            if self.decoder_embedding is None:
                return (stream,)
            embedded, memory = self.embedded(self.decoder_embedding, decoder_side, plain), self._memory(stream)
        else:
            embedded, memory = cargo
        keys = None
        adapters = self.architecture.adapters
        if self.dropout_seed is not None and adapters is not None and adapters.dropout:
            columns = torch.arange(batch.encoder_tokens.shape[1], device=batch.samples.device)
            keys = token_keys(self.dropout_seed, batch.samples, columns).flatten()
        memory_tokens = MemoryTokens(memory, documents, self.readers(batch), self.covered, keys)
        context = replace(plain, memory=memory_tokens, auxiliary=auxiliary)
        return self.through(self.decoder, ResidualState(embedded), context), memory

    def _encoded(
        self, batch: EncoderDecoderBatch, documents: torch.Tensor, auxiliary: AuxiliarySums | None, *cargo: torch.Tensor
    ) -> ResidualState:
        encoder_side = Side(batch.encoder_tokens, batch.samples)
        context = replace(self._context(encoder_side, documents), auxiliary=auxiliary)
        embedded = cargo[0] if self.embedding is None else self.embedded(self.embedding, encoder_side, context)
        return self.through(self.encoder, ResidualState(embedded), context)

    def _context(self, side: Side, documents: torch.Tensor | None = None) -> ForwardContext:
        """Return the context of one side of the model. documents: documents of the encoder's tokens, for bidirectional
        attention within a document; None for causal attention."""
        return forward_context(
            self.architecture,
            side.samples,
            side.positions,
            self.region.axis,
            documents=documents,
            sequence=self.region.sequence,
            dropout_seed=self.dropout_seed,
            dtype=self.dtype,
            dropout_rule=self.options.dropout_rule,
        )

    def _memory(self, stream: ResidualState) -> torch.Tensor:
        """Return the normalized stream of the encoder.

        Under selective recomputation, a norm attaches a recomputation recipe to its result. The returned view has no
        recipe, because every layer of the decoder saves the memory and should not recompute it.
        """
        if self.with_full_params is None:
            normed = self.encoder_norm(stream)[1]
        else:
            normed = self.with_full_params(
                self.encoder_norm, lambda x: self.encoder_norm(ResidualState(x))[1], stream.sum(self.ops)
            )
        return normed.view_as(normed)
