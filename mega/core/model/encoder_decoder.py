"""Encoder-decoder language models, cut into pipeline stages: Megatron-LM's T5 is values of one config.

The encoder reads its tokens in both directions; every block of the decoder reads its own tokens up to each one, and
all that the encoder made of its tokens (the memory). A stage is a run of units, of one side or of both:

    stage(batch, *cargo) -> cargo             of the encoder [tokens, h]; of the decoder that and the memory
    last(batch, *cargo)  -> the term "lm"     sum of weight x negative log-likelihood, sum of weight

The memory rides along with the decoder's tokens unchanged; each stage that reads it adds to its gradient on the way
back. Tokens are ours under sequence parallelism, the encoder's and the decoder's each by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import nn

from mega.core.batch import EncoderDecoderBatch
from mega.core.config.sections import ModelConfig
from mega.core.inventory import Tensor, Unit
from mega.core.inventory.t5 import CROSS, block_prefix
from mega.core.model.block import Attention, Block, Norm, ResidualState, Tensors
from mega.core.model.decoder import Head
from mega.core.model.embedding import Embedding
from mega.core.model.forward import ForwardContext, forward_context, padding_documents
from mega.core.model.stack import StackStage, relative
from mega.core.ops.attention import Attention as AttentionOp
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.mask import AttentionMask
from mega.core.parallel.region import Region
from mega.core.parallel.weight import ParameterFactory


class Side(NamedTuple):
    """What the encoder reads of a batch, or the decoder: tokens int64 [b, s], samples int64 [b]."""

    tokens: torch.Tensor
    samples: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """int64 [b, s]: each token's column."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)


@dataclass(frozen=True, kw_only=True)
class VisiblePaddingContext(ForwardContext):
    """Of the encoder's tokens where the decoder attends to their padding, so that its states are part of the result.

    Megatron-LM masks every key of a padding query with a large negative number. Its softmax in torch then gives all
    columns the same weight; its fused kernel gives 0. padding: int64 [b, s], 0 for tokens, 1 after them.
    """

    padding: torch.Tensor
    uniform: bool

    def attend(
        self,
        attention: AttentionOp,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        probability: float,
        layer: int,
        first_head: int,
    ) -> torch.Tensor:
        mask = self.attention_mask(probability, layer, first_head)
        if not self.uniform:
            return attention(q, k, v, replace(mask, q_documents=2 * self.padding, k_documents=self.padding))
        tokens = attention(q, k, v, replace(mask, q_documents=self.padding, k_documents=self.padding))
        # Queries of zeros have equal scores, so dropout acts on even weights as it does on all others.
        even = attention(torch.zeros_like(q), k, v, replace(mask, q_documents=None, k_documents=None))
        return torch.where(self.padding[:, :, None, None].bool(), even, tokens)


@dataclass(frozen=True, kw_only=True)
class DecoderContext(ForwardContext):
    """Of the decoder's tokens. Padding follows a row's tokens, so none of them sees it.

    memory: [encoder tokens, h], ours under sequence. padding: int64 [b, encoder columns], 0 for tokens, 1 after them.
    mask_padding: whether cross attention ignores it.
    memory_keys: int64 [all encoder tokens of the region], dropout keys of the memory for adapters; None without.
    """

    memory: torch.Tensor
    padding: torch.Tensor
    mask_padding: bool
    memory_keys: torch.Tensor | None

    def of_memory(self) -> DecoderContext:
        """The same for what reads the memory as it reads its own tokens."""
        return replace(self, region_keys=self.memory_keys)

    def cross_mask(self, probability: float, layer: int, first_head: int) -> AttentionMask:
        """What the decoder's tokens see of the encoder's: all but padding (with mask_padding), and the first of a row
        in any case."""
        dropout = None
        if self.row_keys is not None and probability:
            site, columns = site_key(layer, "cross_attention", self.rule), (range(self.padding.shape[1]),)
            dropout = AttentionDropout(self.row_keys, site, first_head, columns, probability, self.rule)
        if not self.mask_padding:
            return AttentionMask("full", dropout=dropout)
        real = self.padding.new_zeros(self.batch, self.seq)
        return AttentionMask("full", q_documents=real, k_documents=self.padding, dropout=dropout, covered=True)


class CrossAttention(Attention):
    """Queries of the decoder's tokens; keys and values, one GEMM, of the memory."""

    name = CROSS

    def _project(self, factory: ParameterFactory, tensors: Tensors, region: Region) -> None:
        self.q = self._column(factory, tensors, region, "q")
        self.kv = self._column(factory, tensors, region, "kv")

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [tokens, h] -> [tokens, h], to which the bias of `out` is still to be added."""
        assert isinstance(context, DecoderContext)
        drop = context.adapter_dropout(self.adapter_dropout, self.layer, "cross_q_adapter")
        q = self.q(x, drop).unflatten(1, (self.heads, -1))
        drop = context.of_memory().adapter_dropout(self.adapter_dropout, self.layer, "cross_kv_adapter")
        k, v = self.kv(context.memory, drop).unflatten(1, (2 * self.kv_heads, -1)).chunk(2, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(ResidualState(q))[1], self.k_norm(ResidualState(k))[1]
        q, k, v = (one.unflatten(0, (context.batch, -1)) for one in (q, k, v))
        mixed = self.ops.attention(q, k, v, context.cross_mask(self.dropout, self.layer, self.first_head))
        drop = context.adapter_dropout(self.adapter_dropout, self.layer, "cross_out_adapter")
        return self.out.matmul(mixed.reshape(context.batch * context.seq, -1), drop)


class DecoderBlock(Block):
    """A block with cross attention between its attention and its feed-forward layer."""

    def __init__(self, factory: ParameterFactory, model: ModelConfig, tensors: Tensors, layer: int, region: Region):
        super().__init__(factory, model, tensors, layer, region)
        self.cross_norm = Norm(factory, model, tensors, f"{CROSS}_layernorm")
        self.cross_attention = CrossAttention(factory, model, tensors, layer, region)

    def forward(self, stream: ResidualState, context: ForwardContext) -> ResidualState:
        x, normed = self.attention_norm(stream)
        branch = self._attended(normed, context)
        x, normed = self.cross_norm(ResidualState(normed if self.post_norm_residual else x, *branch))
        cross = self.cross_attention(normed, context)
        branch = self._branch(cross, self.cross_attention.out, context, "cross_attention_out")
        x, normed = self.feed_forward_norm(ResidualState(normed if self.post_norm_residual else x, *branch))
        branch = self._fed_forward(normed, context)
        return ResidualState(normed if self.post_norm_residual else x, *branch)


class EncoderDecoderStage(StackStage):
    """The units of an encoder and a decoder that one stage holds, in the order of inventory/t5.py."""

    terms = ("lm",)

    def build_embedding(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Embedding:
        return Embedding(factory, self.model, tensors, self.region, self.residual)

    def build_blocks(self, factory: ParameterFactory, own: Mapping[Unit, dict[str, Tensor]]) -> None:
        model, region = self.model, self.region
        assert model.layers is not None

        def stack(kind: type[Block], held: range) -> nn.ModuleList:
            ours = (unit for unit in self.units if isinstance(unit, int) and unit in held)
            return nn.ModuleList(
                kind(factory, model, relative(own[unit], block_prefix(model, unit)), unit, region) for unit in ours
            )

        self.encoder, self.decoder_embedding = stack(Block, range(model.layers)), None
        if "middle" in self.units:
            middle = own["middle"]
            self.encoder_norm = Norm(factory, model, middle, "model.encoder.norm")
            self.decoder_embedding = Embedding(
                factory.exact, model, middle, region, self.residual, site="decoder_embedding"
            )
        self.decoder = stack(DecoderBlock, range(model.layers, model.blocks))

    def build_head(self, factory: ParameterFactory, tensors: dict[str, Tensor]) -> Head:
        return Head(factory, self.model, tensors, self.region, norm="model.decoder.norm")

    def embed(self, embedding: nn.Module, batch: Side, context: ForwardContext) -> torch.Tensor:
        return cast(torch.Tensor, embedding(batch.tokens, batch.positions, context))

    @property
    def encodes(self) -> bool:
        """Whether we hold something of the encoder; else its memory comes to us."""
        return self.embedding is not None or len(self.encoder) > 0 or self.decoder_embedding is not None

    def cargo(self, batch: EncoderDecoderBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        assert self.model.hidden
        share = self.region.size if self.region.sequence else 1
        read, written = (
            (tokens.numel() // share, self.model.hidden) for tokens in (batch.encoder_tokens, batch.tokens)
        )
        return [(read, self.residual)] if self.encodes else [(written, self.residual), (read, self.dtype)]

    def stream(
        self, batch: EncoderDecoderBatch, *cargo: torch.Tensor
    ) -> tuple[ResidualState, *tuple[torch.Tensor, ...]]:
        padding = padding_documents(batch.encoder_lengths.clamp(min=1), batch.encoder_tokens.shape[1])
        written = Side(batch.tokens, batch.samples)
        plain = self._context(written)
        if self.encodes:
            stream = self._encoded(batch, padding, *cargo)
            if self.decoder_embedding is None:
                return (stream,)
            begun, memory = self.embedded(self.decoder_embedding, written, plain), self._memory(stream)
        else:
            begun, memory = cargo
        keys = None
        if self.dropout_seed is not None and self.model.lora_dropout:
            columns = torch.arange(batch.encoder_tokens.shape[1], device=batch.samples.device)
            keys = token_keys(self.dropout_seed, batch.samples, columns).flatten()
        masked = self.model.memory_padding == "masked"
        context = DecoderContext(**vars(plain), memory=memory, padding=padding, mask_padding=masked, memory_keys=keys)
        return self.through(self.decoder, ResidualState(begun), context), memory

    def _encoded(self, batch: EncoderDecoderBatch, padding: torch.Tensor, *cargo: torch.Tensor) -> ResidualState:
        read = Side(batch.encoder_tokens, batch.samples)
        context, mode = self._context(read, padding), self.model.memory_padding
        if mode != "masked":
            context = VisiblePaddingContext(**vars(context), padding=padding, uniform=mode == "uniform")
        begun = cargo[0] if self.embedding is None else self.embedded(self.embedding, read, context)
        return self.through(self.encoder, ResidualState(begun), context)

    def _context(self, side: Side, padding: torch.Tensor | None = None) -> ForwardContext:
        """padding: as documents, where every token sees every other; None: where each sees those before it."""
        return forward_context(
            self.model,
            side.samples,
            side.positions,
            self.region.axis,
            documents=padding,
            kind="causal" if padding is None else "full",
            sequence=self.region.sequence,
            dropout_seed=self.dropout_seed,
            dtype=self.dtype,
            dropout_rule=self.options.dropout_rule,
        )

    def _memory(self, stream: ResidualState) -> torch.Tensor:
        """The encoder's stream, normed. A view, since every block keeps it and none is to compute it again (a norm
        under selective recompute leaves a recipe with its result)."""
        if self.with_full_params is None:
            normed = self.encoder_norm(stream)[1]
        else:
            normed = self.with_full_params(
                self.encoder_norm, lambda x: self.encoder_norm(ResidualState(x))[1], stream.sum(self.ops)
            )
        return normed.view_as(normed)
