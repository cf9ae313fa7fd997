"""Which keys a query of attention sees, and which weights are dropped: one value for every implementation.

It states what is computed and knows no implementation: neither kernels nor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from mega.core.ops.dropout import AttentionDropout

Kind = Literal["causal", "full"]


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """What s queries see of t keys; a key is visible where all of these agree.

    kind: "causal", where query i sees key j up to its own position, j <= q_offset + i; or "full", every key
        (encoders, cross attention).
    window: sliding window; query i sees only keys with |q_offset + i - j| < window.
    q_documents, k_documents: int64 [b, s] and [b, t]; queries and keys see each other only where these are equal.
        Padding is a document of its own.
    q_offset: position of the first query among the keys; t - s for the last s tokens of a cached row of t. Negative
        where the first query precedes all keys.
    dropout: of the attention weights, or None.
    softcap: scores s become softcap x tanh(s / softcap) before the softmax.
    covered: whether every query is known to see a key, which is not to be seen of documents without reading them.
    """

    kind: Kind = "causal"
    window: int | None = None
    q_documents: torch.Tensor | None = None
    k_documents: torch.Tensor | None = None
    q_offset: int = 0
    dropout: AttentionDropout | None = None
    softcap: float | None = None
    covered: bool = False

    def __post_init__(self) -> None:
        assert self.kind in ("causal", "full"), self.kind
        assert self.window is None or self.window >= 1, self.window
        assert (self.q_documents is None) == (self.k_documents is None)

    def band(self, s: int, t: int) -> tuple[int | None, int | None]:
        """(low, high): by position alone, query i sees key j where low <= j - i <= high; None: no bound hides a key.

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
        """bool [s, t], or [b, 1, s, t] with documents: True where a query sees a key. None: everywhere.

        >>> AttentionMask(window=2, q_offset=1).visible(2, 4, torch.device("cpu")).int().tolist()
        [[1, 1, 0, 0], [0, 1, 1, 0]]
        """
        low, high = self.band(s, t)
        seen = None
        if low is not None or high is not None:
            seen = torch.ones(s, t, dtype=torch.bool, device=device)
            seen = seen if high is None else seen.tril(high)
            seen = seen if low is None else seen.triu(low)
        if self.q_documents is None or self.k_documents is None:
            return seen
        same = self.q_documents[:, None, :, None] == self.k_documents[:, None, None, :]
        return same if seen is None else same & seen

    def simple_kind(self, s: int, t: int) -> Kind | None:
        """What a kernel without a mask argument has to compute: square causal attention, or attention to every key.

        None where that would not do: documents, a window or an offset hide keys, or weights are dropped.

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
        """What a kernel has to know besides the kind, in words.

        >>> AttentionMask(window=2).features
        ('a window',)
        """
        return tuple(word for name, word, unset in _FEATURES if getattr(self, name) is not unset)

    def empty(self, s: int, t: int) -> bool:
        """Whether the positions alone hide every key from every query."""
        low, high = self.band(s, t)
        return (high is not None and high <= -s) or (low is not None and low >= t)

    def may_hide_all(self, s: int, t: int) -> bool:
        """Whether some query may see no key at all; documents are not read, which would wait for the device."""
        low, high = self.band(s, t)
        if (high is not None and high < 0) or (low is not None and low > t - s):
            return True
        # Where queries and keys are the same tokens, the bounds that have just been checked let each see itself.
        return not self.covered and self.q_documents is not self.k_documents

    def cut(self, queries: slice, keys: slice) -> AttentionMask:
        """The mask of some of the queries and keys, both contiguous.

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
# A field that is added later counts in both, so no kernel that does not know it takes its attention.
_UNSET = {
    field.name: field.default for field in fields(AttentionMask) if field.name not in (*_POSITIONS, "k_documents")
}
_FEATURES = [(name, _WORDS.get(name, name), _UNSET[name]) for name in dict.fromkeys((*_WORDS, *_UNSET))]
_BESIDE_POSITIONS = [(name, unset) for name, _, unset in _FEATURES if name != "window"]

CAUSAL = AttentionMask()
FULL = AttentionMask("full")
