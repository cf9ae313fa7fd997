"""Encoder-decoder language models, cut into pipeline stages: Megatron-LM's T5 is values of one config.

The encoder reads its tokens in both directions; every layer of the decoder reads its own tokens up to each one, and
all that the encoder made of its tokens (the memory). A stage is a run of units, of one side or of both:

    stage(batch, *cargo) -> cargo             of the encoder [tokens, h]; of the decoder that and the memory
    last(batch, *cargo)  -> the term "lm"     sum of weight x negative log-likelihood, sum of weight

The memory rides along with the decoder's tokens unchanged; each stage that reads it adds to its gradient on the way
back. Tokens are ours under sequence parallelism, the encoder's and the decoder's each by themselves.
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
    """What the encoder reads of a batch, or the decoder: tokens int64 [b, s], samples int64 [b]."""

    tokens: torch.Tensor
    samples: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """int64 [b, s]: each token's column."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)


class EncoderDecoderStage(StackStage[EncoderDecoderBatch]):
    """The units of an encoder and a decoder that one stage holds, in the order of the architecture's."""

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
        """Whether we hold something of the encoder; else its memory comes to us."""
        return self.embedding is not None or len(self.encoder) > 0 or self.decoder_embedding is not None

    def cargo(self, batch: EncoderDecoderBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        share = self.region.size if self.region.sequence else 1
        read, written = (
            (tokens.numel() // share, self.architecture.hidden) for tokens in (batch.encoder_tokens, batch.tokens)
        )
        return [(read, self.residual)] if self.encodes else [(written, self.residual), (read, self.dtype)]

    covered = True
    """Whether every token of the decoder sees one of the encoder's."""

    def documents(self, batch: EncoderDecoderBatch) -> torch.Tensor:
        """int64 [b, e]: the document of each token of the encoder, of which no token of another sees it. Padding is one
        by itself."""
        return padding_documents(batch.encoder_lengths.clamp(min=1), batch.encoder_tokens.shape[1])

    def readers(self, batch: EncoderDecoderBatch) -> torch.Tensor:
        """int64 [b, d]: the document of the encoder that each token of the decoder sees."""
        return torch.zeros_like(batch.tokens)

    def stack_tokens(self, batch: EncoderDecoderBatch) -> tuple[torch.Tensor, ...]:
        return batch.encoder_tokens, batch.tokens

    def stream(
        self, batch: EncoderDecoderBatch, auxiliary: AuxiliarySums | None, *cargo: torch.Tensor
    ) -> tuple[ResidualState, *tuple[torch.Tensor, ...]]:
        documents = self.documents(batch)
        written = Side(batch.tokens, batch.samples)
        plain = self._context(written)
        if self.encodes:
            stream = self._encoded(batch, documents, auxiliary, *cargo)
            if self.decoder_embedding is None:
                return (stream,)
            begun, memory = self.embedded(self.decoder_embedding, written, plain), self._memory(stream)
        else:
            begun, memory = cargo
        keys = None
        adapters = self.architecture.adapters
        if self.dropout_seed is not None and adapters is not None and adapters.dropout:
            columns = torch.arange(batch.encoder_tokens.shape[1], device=batch.samples.device)
            keys = token_keys(self.dropout_seed, batch.samples, columns).flatten()
        seen = MemoryTokens(memory, documents, self.readers(batch), self.covered, keys)
        context = replace(plain, memory=seen, auxiliary=auxiliary)
        return self.through(self.decoder, ResidualState(begun), context), memory

    def _encoded(
        self, batch: EncoderDecoderBatch, documents: torch.Tensor, auxiliary: AuxiliarySums | None, *cargo: torch.Tensor
    ) -> ResidualState:
        read = Side(batch.encoder_tokens, batch.samples)
        context = replace(self._context(read, documents), auxiliary=auxiliary)
        begun = cargo[0] if self.embedding is None else self.embedded(self.embedding, read, context)
        return self.through(self.encoder, ResidualState(begun), context)

    def _context(self, side: Side, documents: torch.Tensor | None = None) -> ForwardContext:
        """documents: of the encoder's tokens, each of which sees all of its own; None: each sees those before it."""
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
        """The encoder's stream, normed. A view, since every layer keeps it and none is to compute it again (a norm
        under selective recompute leaves a recipe with its result)."""
        if self.with_full_params is None:
            normed = self.encoder_norm(stream)[1]
        else:
            normed = self.with_full_params(
                self.encoder_norm, lambda x: self.encoder_norm(ResidualState(x))[1], stream.sum(self.ops)
            )
        return normed.view_as(normed)
