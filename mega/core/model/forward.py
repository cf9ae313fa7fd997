"""The context of one microbatch, shared by all layers of a stage: shape, positions, masks and dropout keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from mega.core.architecture.layer import Attention, AuxiliaryLoss, Rope
from mega.core.architecture.model import Architecture
from mega.core.model.auxiliary import AuxiliarySums
from mega.core.ops.attention import Attention as AttentionOperator
from mega.core.ops.counter import RULE, draw, row_keys, site_key, token_keys
from mega.core.ops.dropout import AttentionDropout, Dropout
from mega.core.ops.heads import Rotary
from mega.core.ops.mask import AttentionMask
from mega.core.ops.rotary import rotary_table
from mega.core.parallel.collectives import local_shard
from mega.core.parallel.mesh import Axis


@dataclass(frozen=True)
class MemoryTokens:
    """The outputs of another stack (the memory) that layers attend to."""

    tokens: torch.Tensor
    """[memory tokens, h]; under sequence parallelism, only the tokens of this rank."""
    documents: torch.Tensor
    """int64 [b, columns]: the document, within the row, of each memory token."""
    readers: torch.Tensor
    """int64 [b, s]: the document of the memory that each token attends to."""
    covered: bool
    """Whether every token is guaranteed to attend to at least one memory token."""
    keys: torch.Tensor | None
    """int64 [all memory tokens of the tensor-parallel region]: dropout keys for adapters; None if adapters have no
    dropout."""


@dataclass
class NeighbourStates:
    """The neighbours of a text's chunks in one stage.

    Each row of the text has l chunks, and each chunk has k neighbours of r tokens. The neighbours form rows [b l k, r].
    The layer that holds the neighbours' encoder sets `encoded`.
    """

    tokens: torch.Tensor
    """The neighbours' tokens [b l k r, h], received or embedded by the stage. Under sequence parallelism, only this
    rank's tokens."""
    context: ForwardContext
    """The context for the layers of the neighbours' encoder."""
    found: torch.Tensor | None
    """bool [b, l, k]: which neighbours exist; None if all exist."""
    shape: tuple[int, int, int]
    """(l, k, r): the numbers of chunks per row, neighbours per chunk and tokens per neighbour."""
    chunk: int
    """Number of tokens in a chunk."""
    encoded: torch.Tensor | None = None
    """The output of the neighbours' encoder, shaped like `tokens`; None before the encoder has run."""
    text: torch.Tensor | None = None
    """[b s, h]: the states of the text, which the neighbours' encoder attends to."""

    @property
    def read(self) -> torch.Tensor:
        """The encoded neighbours that the layers of the text attend to."""
        return self.tokens if self.encoded is None else self.encoded

    def readers(self, columns: int) -> torch.Tensor:
        """Return a mask of the text's tokens that attend to a neighbour, bool [b, columns], or [1, columns] if all rows
        are equal."""
        number = (torch.arange(columns, device=self.tokens.device) + 1) // self.chunk - 1
        reads = (number >= 0)[None]
        return reads if self.found is None else self.found.any(2)[:, number.clamp(min=0)] & reads


@dataclass(frozen=True)
class ReadTokens:
    """The tokens whose outputs the head reads. One layer, the last, computes only keys and values for all tokens, and
    everything else for these tokens."""

    layer: int
    """Index of the layer in the whole model."""
    numbers: torch.Tensor
    """int64 [b k]: indices of the tokens in the microbatch, row by row. The first token of a row may occur twice."""
    context: ForwardContext
    """The context of these tokens, k per row, after the layer's attention."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return these tokens of x [all tokens, ...].

        The backward pass adds gradients in no fixed order, but a token occurs at most twice, and the order of two
        summands does not change their sum.
        """
        return x.index_select(0, self.numbers)


@dataclass(frozen=True)
class ForwardContext:
    """The context of one microbatch in a stage. Tokens are rows of [tokens, h], batch-major."""

    batch: int
    """Number of rows in the microbatch."""
    seq: int
    """Number of columns on this context rank."""
    documents: torch.Tensor | None
    """int64 [b, whole s]: the document of each token; None if every row is one document."""
    tables: Mapping[Rope, Rotary]
    """cos and sin [tokens, R / 2] of the positions, for each type of rotary positions in the model."""
    keys: torch.Tensor | None
    """int64 [this rank's tokens]: dropout keys; None if dropout is off (evaluation, or probability 0)."""
    row_keys: torch.Tensor | None
    """int64 [b, whole s]: dropout keys of the whole rows; None if dropout is off."""
    region_keys: torch.Tensor | None
    """int64 [all tokens of the tensor-parallel region]: dropout keys; None if dropout is off."""
    tp: Axis
    sequence: bool
    """Whether each tensor rank holds a shard of the tokens (sequence parallelism)."""
    rule: int = RULE
    """The version of the dropout rule (ops/counter.py)."""
    memory: MemoryTokens | None = field(default=None, kw_only=True)
    neighbours: NeighbourStates | None = field(default=None, kw_only=True)
    auxiliary: AuxiliarySums | None = field(default=None, kw_only=True)
    """Collector of the losses of layers; None if these losses are not computed."""
    seq_numbers: torch.Tensor | None = field(default=None, kw_only=True)
    """int64 [s]: this rank's columns of the whole rows; None for all columns."""
    padding: torch.Tensor | None = field(default=None, kw_only=True)
    """bool [this rank's tokens]: which tokens are padding; None without padding."""
    valid_tokens: torch.Tensor | None = field(default=None, kw_only=True)
    """float64 []: number of the tensor-parallel region's tokens that are not padding; None without padding."""
    reads: ReadTokens | None = field(default=None, kw_only=True)
    """The tokens whose outputs the head reads; None if every layer computes the outputs of all tokens."""

    def auxiliary_loss(
        self, loss: AuxiliaryLoss, x: torch.Tensor, total: Callable[[], torch.Tensor], *, split: bool
    ) -> torch.Tensor:
        """Attach a loss to x. The backward pass of the returned tensor, which replaces x, also starts the backward pass
        of the loss.

        total: computes the sum [] of the loss over this rank's tokens, sequences or microbatch, in fp32 or wider.
        `total` is not called if losses are not computed. split: whether the total covers only this tensor rank's heads,
        columns or (under sequence parallelism) tokens. If not, every tensor rank computes the same total.
        """
        if self.auxiliary is None:
            return x
        return self.auxiliary.add(loss, x, total(), (self.batch, self.seq), split, self.valid_tokens)

    def jitter(self, x: torch.Tensor, eps: float, layer: int, site: str) -> torch.Tensor:
        """Multiply each element of x [this rank's tokens, h] by a random factor between 1 - eps and 1 + eps."""
        if self.keys is None:
            return x
        elements = torch.arange(x.shape[-1], device=x.device)
        bits = draw(row_keys(self.keys, site_key(layer, site, self.rule))[:, None], elements)
        return x * (1 + eps * ((bits + 0.5) / 2**15 - 1)).to(x.dtype)

    def token_numbers(self, shards: int, device: torch.device) -> torch.Tensor:
        """Return the indices of this rank's tokens in the microbatch, int64 [this rank's tokens], row by row. shards:
        number of ranks that share a row."""
        in_row = torch.arange(self.seq, device=device) if self.seq_numbers is None else self.seq_numbers
        first = torch.arange(self.batch, device=device) * (self.seq * shards)
        numbers = (first[:, None] + in_row).flatten()
        return local_shard(numbers, self.tp) if self.sequence else numbers

    def rotary(self, rope: Rope | None) -> Rotary | None:
        """Return cos and sin of a layer's positions, or None if the layer has no rotary positions."""
        return None if rope is None else self.tables[rope]

    def dropout(self, probability: float, layer: int, site: str) -> Dropout | None:
        """Return the dropout for a branch's output [this rank's tokens, h], or None if dropout is off."""
        if self.keys is None or not probability:
            return None
        return Dropout(self.keys, site_key(layer, site, self.rule), probability, self.rule)

    def adapter_dropout(self, probability: float, layer: int, site: str) -> Dropout | None:
        """Return the dropout for the input of a linear layer's adapter, for all tokens of the tensor-parallel
        region."""
        if self.region_keys is None or not probability:
            return None
        return Dropout(self.region_keys, site_key(layer, site, self.rule), probability, self.rule)

    def reading(self, layer: int, columns: torch.Tensor) -> ForwardContext:
        """Return the context for a head that reads only `columns`, int64 [b, k], of the output of `layer`. A rank must
        have whole rows."""
        assert not self.sequence and self.seq_numbers is None and self.padding is None

        def gathered(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.gather(1, columns)

        row_keys = gathered(self.row_keys)
        keys = None if row_keys is None else row_keys.flatten()
        tokens = replace(
            self,
            seq=columns.shape[1],
            documents=gathered(self.documents),
            tables={},  # positions are applied before the tokens are selected
            keys=keys,
            row_keys=row_keys,
            region_keys=keys,
        )
        return replace(self, reads=ReadTokens(layer, numbers_at(columns, self.seq), tokens))

    def read_by(self, layer: int) -> ReadTokens | None:
        """Return the tokens for which `layer` computes its output; None for all tokens."""
        return None if self.reads is None or self.reads.layer != layer else self.reads

    def for_memory(self) -> ForwardContext:
        """Return the context for a linear layer that is applied to the memory."""
        assert self.memory is not None
        return replace(self, region_keys=self.memory.keys)

    def attend(
        self,
        operator: AttentionOperator,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: Attention,
        layer: int,
        first_head: int,
    ) -> torch.Tensor:
        """Compute self-attention over whole rows: q [b, s, heads, d]; k, v [b, s, kv_heads, d] -> [b, s, heads, d]. If
        only some outputs of the layer are read, q and the result have only the tokens that are read.

        first_head: index in the layer of the first head of `q`.
        """
        mask = self.attention_mask(attention, layer, first_head)
        if attention.padding == "masked":
            return operator(q, k, v, mask)
        padding = mask.q_documents
        assert padding is not None
        if attention.padding == "zero":
            return operator(q, k, v, replace(mask, q_documents=2 * padding, covered=False))
        # Queries of 0 result in equal attention weights for all keys. Dropout is applied to these weights as usual.
        even = operator(torch.zeros_like(q), k, v, replace(mask, q_documents=None, k_documents=None))
        return torch.where(padding[:, :, None, None].bool(), even, operator(q, k, v, mask))

    def attention_mask(self, attention: Attention, layer: int, first_head: int) -> AttentionMask:
        """Return the mask of self-attention over whole rows, with dropout, for all queries or the queries that `layer`
        computes. first_head: index of this rank's first head."""
        length = 0 if self.row_keys is None else self.row_keys.shape[1]
        reads = self.read_by(layer)
        assert reads is None or not (attention.causal or attention.window), "a mask of positions needs all queries"
        queries = self if reads is None else reads.context
        return AttentionMask(
            "causal" if attention.causal else "full",
            attention.window,
            q_documents=queries.documents,
            k_documents=self.documents,
            dropout=queries._attention_dropout(attention, layer, first_head, length),
            softcap=attention.softcap,
            covered=reads is not None,  # each query is one of the keys
        )

    def memory_mask(self, attention: Attention, layer: int, first_head: int) -> AttentionMask:
        """Return the mask of attention to the memory. A token attends to one document, or to all memory tokens if
        padding is visible."""
        memory = self.memory
        assert memory is not None
        dropout = self._attention_dropout(attention, layer, first_head, memory.documents.shape[1])
        if attention.padding != "masked":
            return AttentionMask("full", dropout=dropout, softcap=attention.softcap)
        return AttentionMask(
            "full",
            q_documents=memory.readers,
            k_documents=memory.documents,
            dropout=dropout,
            softcap=attention.softcap,
            covered=memory.covered,
        )

    def _attention_dropout(
        self, attention: Attention, layer: int, first_head: int, length: int
    ) -> AttentionDropout | None:
        """Return the dropout of attention weights, or None. length: number of columns in the keys' whole rows."""
        return (
            None if self.row_keys is None else self.weight_dropout(self.row_keys, attention, layer, first_head, length)
        )

    def weight_dropout(
        self, queries: torch.Tensor, attention: Attention, layer: int, first_head: int, length: int
    ) -> AttentionDropout | None:
        """Return the dropout of attention weights for `length` keys. queries: int64 [rows, s], the queries' dropout
        keys."""
        if not attention.dropout:
            return None
        site = site_key(layer, attention.site, self.rule)
        return AttentionDropout(queries, site, first_head, (range(length),), attention.dropout, self.rule)


def forward_context(
    model: Architecture,
    samples: torch.Tensor,
    positions: torch.Tensor,
    tp: Axis,
    *,
    sequence: bool,
    dropout_seed: int | None,
    dtype: torch.dtype,
    columns: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    dropout_rule: int = RULE,
    row_shards: int = 1,
    padding: torch.Tensor | None = None,
) -> ForwardContext:
    """Compute the context of rows of tokens.

    samples: int64 [b], global sample numbers. positions: int64 [b, s]. columns: int64 [s], the columns of the whole
    rows that this rank has; None for all columns. documents: int64 [b, whole s], or None if every row is one document.
    dropout_seed: None disables dropout. row_shards: number of ranks that share a row. padding: bool [b, s], as in
    `DecoderBatch`.
    """
    batch_size, seq = positions.shape
    keys = row_keys = region_keys = None
    if dropout_seed is not None and model.drops:
        # Dropout keys depend on the sample and the column in the whole row, so masks are equal in every parallel
        # layout.
        whole = torch.arange(seq * row_shards, device=samples.device)
        row_keys = token_keys(dropout_seed, samples, whole)
        keys = region_keys = (row_keys if columns is None else row_keys[:, columns]).flatten()
        if sequence:
            keys = local_shard(keys, tp)
    tables = rotary_tables(model.ropes, positions.flatten(), dtype, seq * row_shards)
    splits_sequence = sequence and tp.size > 1
    own_padding = None if padding is None else padding.flatten()
    if own_padding is not None and sequence:
        own_padding = local_shard(own_padding, tp)
    return ForwardContext(
        *(batch_size, seq, documents, tables, keys, row_keys, region_keys, tp, splits_sequence, dropout_rule),
        seq_numbers=columns,
        padding=own_padding,
        valid_tokens=None if padding is None else (~padding).sum().double(),
    )


def numbers_at(columns: torch.Tensor, seq: int) -> torch.Tensor:
    """Return the indices in a microbatch of the tokens in `columns`, int64 [b, k] -> [b k]. seq: length of a row.

    >>> numbers_at(torch.tensor([[0, 2], [0, 1]]), 4).tolist()
    [0, 2, 4, 5]
    """
    first = torch.arange(0, columns.shape[0] * seq, seq, device=columns.device)
    return (first[:, None] + columns).flatten()


def padding_documents(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return documents, int64 [b, width]: 0 for the first `lengths` [b] tokens of each row, and 1 for the row's
    padding.

    >>> padding_documents(torch.tensor([2, 4]), 4).tolist()
    [[0, 0, 1, 1], [0, 0, 0, 0]]
    """
    return (torch.arange(width, device=lengths.device) >= lengths[:, None]).long()


def rotary_tables(
    ropes: Iterable[Rope], positions: torch.Tensor, dtype: torch.dtype, length: int | None = None
) -> dict[Rope, Rotary]:
    """Return cos and sin, each [n, R / 2], of positions int64 [n]. length: as in `rotary_table`."""
    return {rope: rotary_table(positions, rope, dtype, length) for rope in ropes}
