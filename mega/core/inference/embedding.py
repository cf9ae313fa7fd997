"""Embed texts with a BERT model, by pooling its last hidden states over the tokens of each row.

    vectors = TextVectors(stage, pad)          on every rank: rows of ids -> pooled states
    engine  = EmbeddingEngine(vectors, ...)    on rank 0: add, step, cancel, close, as `request.Engine`
    follow(vectors, relay)                     on the other ranks, until rank 0 closes

The inputs are token ids and the outputs are vectors. This module depends on neither a tokenizer nor a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.batch import MaskedBatch
from mega.core.inference.relay import STEP, STOP, Relay
from mega.core.inference.request import LOGITS_NOT_FINITE, Event, Limits, Request, RequestError
from mega.core.model.bert import BertHead, BertStage
from mega.core.ops.paged_attention import Integers

Pooling = Literal["mean", "cls", "inner"]
"""Tokens whose hidden states are averaged into a row's vector: all, only the first, or all except the first and the
last."""

STEP_TOKENS = 8192
"""Default maximum number of tokens in a step, including padding."""


class TextVectors:
    """Embeds rows with a whole BERT model, or with a tensor-parallel shard of one. pad: the id that pads shorter
    rows."""

    def __init__(self, stage: BertStage, pad: int, device: torch.device) -> None:
        self._stage, self._pad, self._device = stage, pad, device

    @property
    def width(self) -> int:
        """Number of elements in a vector."""
        return self._stage.architecture.hidden

    def __call__(self, rows: Sequence[Sequence[int]], pooling: Pooling) -> NDArray[np.float32]:
        """Return the vectors of rows, [rows, width]. Rows include [CLS] and [SEP]. All tensor ranks must pass the same
        rows."""
        return np.asarray(self.on_device(rows, pooling).cpu().numpy())

    @torch.no_grad()
    def on_device(self, rows: Sequence[Sequence[int]], pooling: Pooling) -> torch.Tensor:
        """Return the vectors as an fp32 tensor on the device, without waiting for the device."""
        batch = self._batch_of(rows)
        stream, *_ = self._stage.stream(batch, None)
        head = cast(BertHead, self._stage.head)
        states = head.normed(stream).view(*batch.tokens.shape, -1).float()
        weights = _pooled_tokens(batch.lengths, batch.tokens.shape[1], pooling)
        return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)

    def _batch_of(self, rows: Sequence[Sequence[int]]) -> MaskedBatch:
        sizes = np.fromiter(map(len, rows), np.int64, len(rows))
        table = np.full((len(rows), sizes.max()), self._pad, np.int64)
        table[np.arange(table.shape[1]) < sizes[:, None]] = np.fromiter(
            chain.from_iterable(rows), np.int64, sizes.sum()
        )
        tokens, lengths = (self._sent(torch.from_numpy(each)) for each in (table, sizes))
        zeros, samples = torch.zeros_like(tokens), torch.arange(len(rows), device=self._device)
        return MaskedBatch(tokens, zeros, zeros.float(), zeros, lengths, torch.full_like(samples, -1), samples)

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        """Copy x to the device. A GPU copies from pinned memory, so that the host does not wait for earlier kernels."""
        return x.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else x


def _pooled_tokens(lengths: torch.Tensor, width: int, pooling: Pooling) -> torch.Tensor:
    """Return float32 [b, s], with 1 for each token that is pooled, else 0. In a row of at most two tokens, "inner"
    pools all tokens.

    >>> _pooled_tokens(torch.tensor([4, 2]), 4, "inner").tolist()
    [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    """
    columns, ends = torch.arange(width, device=lengths.device), lengths[:, None]
    whole = columns < ends
    if pooling == "cls":
        return (columns == 0).expand_as(whole).float()
    if pooling == "inner":
        return torch.where(ends > 2, (columns > 0) & (columns < ends - 1), whole).float()
    return whole.float()


class EmbeddingEngine:
    """The implementation of `request.Engine` for a BERT model, on rank 0. The last event of a request contains the
    vector of the prompt.

    limits: maximum number of rows in a step, and maximum number of tokens in a row. relay: sends the rows of a step to
    the other ranks. tokens: maximum number of tokens in a step, including padding.
    """

    def __init__(
        self, vectors: TextVectors, limits: Limits, pooling: Pooling, *, relay: Relay | None, tokens: int = STEP_TOKENS
    ) -> None:
        self.limits, self.vectors, self.pooling = limits, vectors, pooling
        self._relay, self._tokens = relay, max(tokens, limits.longest)
        self._waiting: deque[tuple[int, tuple[int, ...]]] = deque()
        self._cancelled: list[int] = []
        self._next = 0

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._cancelled

    def add(self, request: Request) -> int:
        if len(request.prompt) > self.limits.longest:
            raise RequestError("prompt", f"of {len(request.prompt)} tokens", f"at most {self.limits.longest} fit")
        self._next += 1
        self._waiting.append((self._next, request.prompt))
        return self._next

    def cancel(self, number: int) -> None:
        if any(number == each for each, _ in self._waiting):
            self._waiting = deque(each for each in self._waiting if each[0] != number)
            self._cancelled.append(number)

    def step(self) -> list[Event]:
        events = [Event(number, finish="cancelled") for number in self._cancelled]
        self._cancelled.clear()
        if not (queued := self._next_rows()):
            return events
        rows = [row for _, row in queued]
        try:
            if self._relay is not None:
                self._relay.send(STEP, packed(rows))
            vectors = self.vectors(rows, self.pooling)
        except RuntimeError as error:
            raise error if self._relay is None else self._relay.explained(error) from None
        numbers = [number for number, _ in queued]
        return events + [_last_event(number, vector) for number, vector in zip(numbers, vectors, strict=True)]

    def _next_rows(self) -> list[tuple[int, tuple[int, ...]]]:
        """Remove from the queue, in order of arrival, as many rows as fit into the next step, and return them."""
        queued: list[tuple[int, tuple[int, ...]]] = []
        longest = 0
        while self._waiting and len(queued) < self.limits.requests:
            longest = max(longest, len(self._waiting[0][1]))
            if queued and longest * (len(queued) + 1) > self._tokens:
                break
            queued.append(self._waiting.popleft())
        return queued

    def warm_up(self) -> float:
        """Return 0 seconds, because this engine compiles no kernels and captures no graphs."""
        return 0.0

    def close(self) -> None:
        if self._relay is not None:
            self._relay.send(STOP, np.zeros(0, dtype=np.int64))
            self._relay = None


def _last_event(number: int, vector: NDArray[np.float32]) -> Event:
    """Return the last event of a request, with the request's vector. If the vector is not finite, the event reports a
    failure, because JSON cannot represent NaN or infinity."""
    if np.isfinite(vector).all():
        return Event(number, finish="stop", vector=vector)
    return Event(number, finish="failed", message=LOGITS_NOT_FINITE)


def follow(vectors: TextVectors, relay: Relay, pooling: Pooling) -> None:
    """Embed the rows that rank 0 sends, until rank 0 closes its engine. Errors: LostRank."""
    while True:
        kind, content = relay.hear()
        if kind == STOP:
            return
        try:
            vectors(unpacked(content), pooling)
        except RuntimeError as error:
            raise relay.explained(error) from None


def packed(rows: Sequence[Sequence[int]]) -> Integers:
    """Pack rows of ids into one array: the number of rows, the lengths of the rows, then all ids.

    >>> packed([[5, 6], [7]]).tolist()
    [2, 2, 1, 5, 6, 7]
    """
    lengths = [len(row) for row in rows]
    return np.array([len(rows), *lengths, *(token for row in rows for token in row)], dtype=np.int64)


def unpacked(content: Integers) -> list[list[int]]:
    """Restore the rows from an array that `packed` returned.

    >>> unpacked(packed([[5, 6], [7]]))
    [[5, 6], [7]]
    """
    count = int(content[0])
    ends = np.cumsum(content[1 : 1 + count])[:-1]
    return [row.tolist() for row in np.split(content[1 + count :], ends)]
