"""Attention masks for all implementations: which keys are visible to each query, and the dropout of attention weights.

This module does not depend on kernels or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from mega.core.ops.dropout import AttentionDropout

Kind = Literal["causal", "full"]


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The mask of s queries and t keys. A key is visible to a query if no field of the mask hides it.

    kind "causal", window 3, s = t = 5:    1 . . . .
                                           1 1 . . .
                                           1 1 1 . .
                                           . 1 1 1 .
                                           . . 1 1 1
    """

    kind: Kind = "causal"
    """"causal": query i sees keys j <= q_offset + i. "full": query i sees every key (encoders, cross attention)."""
    window: int | None = None
    """Sliding window: query i sees only keys j with |q_offset + i - j| < window. None means no window."""
    q_documents: torch.Tensor | None = None
    """Document of each query, int64 [b, s]. A query sees only keys of the same document. Padding is a separate
    document."""
    k_documents: torch.Tensor | None = None
    """Document of each key, int64 [b, t]."""
    q_offset: int = 0
    """Position of the first query among the keys. For example, it is t - s for the last s tokens of a cached row of t
    tokens, and negative if the first query precedes all keys."""
    dropout: AttentionDropout | None = None
    """Dropout of the attention weights."""
    softcap: float | None = None
    """If set, each score s is replaced with softcap x tanh(s / softcap) before the softmax."""
    covered: bool = False
    """Whether the caller guarantees that every query sees at least one key. With documents, this cannot be determined
    without reading document ids from the device."""

    def __post_init__(self) -> None:
        assert self.kind in ("causal", "full"), self.kind
        assert self.window is None or self.window >= 1, self.window
        assert (self.q_documents is None) == (self.k_documents is None)

    def band(self, s: int, t: int) -> tuple[int | None, int | None]:
        """Return (low, high) such that kind, window and offset allow query i to see key j if low <= j - i <= high. None
        represents a bound that hides no key.

        >>> AttentionMask().band(4, 4), AttentionMask(q_offset=3).band(1, 4), AttentionMask(window=2).band(4, 4)
        ((None, 0), (None, None), (-1, 0))
        """
        low = high = None
        if self.window is not None:
            low, high = self.q_offset - self.window + 1, self.q_offset + self.window - 1
        if self.kind == "causal":
            high = self.q_offset
        return None if low is None or low <= 1 - s else low, None if high is None or high >= t - 1 else high

    def visible(self, s: int, t: int, device: torch.device) -> torch.Tensor | None:
        """Return bool [s, t], or [b, 1, s, t] with documents, which is True where a query sees a key. None if every
        query sees every key.

        >>> AttentionMask(window=2, q_offset=1).visible(2, 4, torch.device("cpu")).int().tolist()
        [[1, 1, 0, 0], [0, 1, 1, 0]]
        """
        low, high = self.band(s, t)
        visible = None
        if low is not None or high is not None:
            visible = torch.ones(s, t, dtype=torch.bool, device=device)
            visible = visible if high is None else visible.tril(high)
            visible = visible if low is None else visible.triu(low)
        if self.q_documents is None or self.k_documents is None:
            return visible
        same = self.q_documents[:, None, :, None] == self.k_documents[:, None, None, :]
        return same if visible is None else same & visible

    def simple_kind(self, s: int, t: int) -> Kind | None:
        """Return the kind with which a kernel without a mask argument computes the same attention: "causal" (only if s
        equals t) or "full".

        Return None if no kind is equivalent, because documents, a window or an offset hide keys, or because of dropout
        or a soft cap.

        >>> AttentionMask(window=4).simple_kind(4, 4), AttentionMask(q_offset=3).simple_kind(1, 4)
        ('causal', 'full')
        """
        if any(getattr(self, name) is not unset for name, unset in _BESIDE_POSITIONS):
            return None
        band = self.band(s, t)
        if band == (None, None):
            return "full"
        return "causal" if band == (None, 0) and s == t else None

    @property
    def features(self) -> tuple[str, ...]:
        """The features, in addition to the kind, that a kernel must support for this mask, as phrases for messages.

        >>> AttentionMask(window=2).features
        ('a window',)
        """
        return tuple(word for name, word, unset in _FEATURES if getattr(self, name) is not unset)

    def empty(self, s: int, t: int) -> bool:
        """Whether positions alone imply that no query sees any key."""
        low, high = self.band(s, t)
        return (high is not None and high <= -s) or (low is not None and low >= t)

    def may_hide_all(self, s: int, t: int) -> bool:
        """Whether a query without visible keys is possible. Document ids are not read, because reading them would
        synchronise with the device."""
        low, high = self.band(s, t)
        if (high is not None and high < 0) or (low is not None and low > t - s):
            return True
        # If queries and keys are the same tokens, every token sees itself within the bounds checked above.
        return not self.covered and self.q_documents is not self.k_documents

    def cut(self, queries: slice, keys: slice) -> AttentionMask:
        """Return the mask of a contiguous range of queries and a contiguous range of keys.

        >>> AttentionMask(window=3).cut(slice(4, 8), slice(2, 6)).q_offset
        2
        """
        return replace(
            self,
            q_documents=None if self.q_documents is None else self.q_documents[:, queries],
            k_documents=None if self.k_documents is None else self.k_documents[:, keys],
            q_offset=self.q_offset + (queries.start or 0) - (keys.start or 0),
            dropout=None if self.dropout is None else self.dropout.cut(queries, keys),
            covered=False,
        )


_WORDS = {"dropout": "dropout", "q_documents": "documents", "window": "a window", "softcap": "a soft cap"}
_POSITIONS = {"kind", "q_offset", "covered"}
# Both lists below include new fields automatically, so that kernels that do not support a new field reject the mask.
_UNSET = {
    field.name: field.default for field in fields(AttentionMask) if field.name not in (*_POSITIONS, "k_documents")
}
_FEATURES = [(name, _WORDS.get(name, name), _UNSET[name]) for name in dict.fromkeys((*_WORDS, *_UNSET))]
_BESIDE_POSITIONS = [(name, unset) for name, _, unset in _FEATURES if name != "window"]

CAUSAL = AttentionMask()
FULL = AttentionMask("full")
