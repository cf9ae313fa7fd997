"""Facts about one microbatch that every block of a stage needs: its shape, positions and dropout keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega.core.config.sections import ModelConfig
from mega.core.ops.attention import Attention
from mega.core.ops.counter import RULE, site_key, token_keys
from mega.core.ops.dropout import AttentionDropout, Dropout
from mega.core.ops.mask import AttentionMask, Kind
from mega.core.ops.rotary import RopeScaling, rotary_table
from mega.core.parallel.collectives import local_shard
from mega.core.parallel.mesh import Axis


@dataclass(frozen=True)
class ForwardContext:
    """One microbatch on its way through a stage. Tokens are rows of [tokens, h], batch-major.

    documents: int64 [b, whole s], or None. kind: of attention, as of `AttentionMask`. rotary: cos and sin
    [tokens, R / 2], or None. keys: int64 [tokens], dropout keys of our tokens (under sequence, of this rank's);
    row_keys: int64 [b, whole s], of the whole rows; region_keys: int64 [all tokens of the region]; None where nothing
    is dropped (evaluation, or probability 0). rule: how it is decided, of ops/counter.py. window: tokens that each one
    sees.
    """

    batch: int
    seq: int
    documents: torch.Tensor | None
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    keys: torch.Tensor | None
    row_keys: torch.Tensor | None
    region_keys: torch.Tensor | None
    tp: Axis
    sequence: bool
    rule: int = RULE
    kind: Kind = "causal"
    window: int | None = None

    def dropout(self, probability: float, layer: int, site: str) -> Dropout | None:
        """Dropout of a row of the residual stream for each of our tokens."""
        if self.keys is None or not probability:
            return None
        return Dropout(self.keys, site_key(layer, site, self.rule), probability, self.rule)

    def adapter_dropout(self, probability: float, layer: int, site: str) -> Dropout | None:
        """Dropout of the input of a linear's adapter, for each token of the region."""
        if self.region_keys is None or not probability:
            return None
        return Dropout(self.region_keys, site_key(layer, site, self.rule), probability, self.rule)

    def attend(
        self,
        attention: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        probability: float,
        layer: int,
        first_head: int,
    ) -> torch.Tensor:
        """Self-attention of the whole rows: q [b, s, heads, d]; k, v [b, s, kv_heads, d] -> [b, s, heads, d].

        probability: of dropping an attention weight. first_head: number of the first of these heads in the layer.
        """
        return attention(q, k, v, self.attention_mask(probability, layer, first_head))

    def attention_mask(self, probability: float, layer: int, first_head: int) -> AttentionMask:
        """What the tokens of the whole rows see of one another, with dropout of the weights from a head on."""
        dropout = None
        if self.row_keys is not None and probability:
            site, held = site_key(layer, "attention", self.rule), (range(self.row_keys.shape[1]),)
            dropout = AttentionDropout(self.row_keys, site, first_head, held, probability, self.rule)
        documents = self.documents
        return AttentionMask(self.kind, self.window, q_documents=documents, k_documents=documents, dropout=dropout)


def forward_context(
    model: ModelConfig,
    samples: torch.Tensor,
    positions: torch.Tensor,
    tp: Axis,
    *,
    sequence: bool,
    dropout_seed: int | None,
    dtype: torch.dtype,
    columns: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    kind: Kind = "causal",
    dropout_rule: int = RULE,
    row_shards: int = 1,
) -> ForwardContext:
    """What rows of tokens mean to the blocks that read them.

    samples: int64 [b], global sample numbers. positions: int64 [b, s]. columns: int64 [s], which columns of the whole
    rows these are; None: all. documents: int64 [b, whole s], or None. dropout_seed: None switches dropout off.
    row_shards: ranks that share a row.
    """
    batch_size, seq = positions.shape
    drops = dropout_seed is not None and (model.hidden_dropout or model.attention_dropout or model.lora_dropout)
    keys = row_keys = region_keys = None
    if drops:
        assert dropout_seed is not None
        whole = torch.arange(seq * row_shards, device=samples.device)
        row_keys = token_keys(dropout_seed, samples, whole)
        keys = region_keys = (row_keys if columns is None else row_keys[:, columns]).flatten()
        if sequence:
            keys = local_shard(keys, tp)
    angles = rotary(model, positions.flatten(), dtype)
    cut = sequence and tp.size > 1
    rest = dropout_rule, kind, model.window
    return ForwardContext(batch_size, seq, documents, angles, keys, row_keys, region_keys, tp, cut, *rest)


def rotary(model: ModelConfig, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """cos and sin of positions int64 [n], each [n, R / 2]; None where the model has other positions."""
    if model.position != "rope":
        return None
    assert model.head_dim is not None
    width = int(model.head_dim * model.rope_fraction)
    scaling = _rope_scaling(model)
    return rotary_table(positions, width, model.rope_base, model.rope_interpolation, dtype, scaling)


def padding_documents(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """int64 [b, width]: 0 for the first `lengths` [b] tokens of each row and 1 for its padding, which no token sees.

    >>> padding_documents(torch.tensor([2, 4]), 4).tolist()
    [[0, 0, 1, 1], [0, 0, 0, 0]]
    """
    return (torch.arange(width, device=lengths.device) >= lengths[:, None]).long()


def _rope_scaling(model: ModelConfig) -> RopeScaling | None:
    if model.rope_scaling == "none":
        return None
    return RopeScaling(
        factor=model.rope_scaling_factor,
        low=model.rope_low_freq_factor,
        high=model.rope_high_freq_factor,
        original=model.rope_original_positions,
    )
