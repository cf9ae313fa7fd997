"""On the meta device, reports operations that are not torch ops (kernels, attention, and exchanges between ranks) to an
observer.

A dispatch mode intercepts torch ops. mega's kernels and exchanges are not torch ops. On the meta device, they return
tensors without data, and call this module with the operations that they would run on a real device. This module does
not compute costs; the observer is in estimate/operation_log.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mega.core.ops.mask import AttentionMask


class Observer(Protocol):
    """Receives the operations that are reported on the meta device."""

    def kernel(self, name: str, arguments: Sequence[object]) -> None:
        """Record a kernel launch with these arguments, including tensors."""

    def gemm(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, blocks: bool) -> None:
        """Record a GEMM a [m, k] b [k, n] whose result is written to `out`. blocks: whether scales belong to blocks."""

    def attention(self, kernel: str, q: torch.Tensor, k: torch.Tensor, mask: AttentionMask, *, backward: bool) -> None:
        """Record an attention call with q [b, s, heads, d] and k [b, t, kv_heads, d]. kernel: "ours" (Triton) or
        "window" (cuDNN)."""

    def exchange(self, kind: str, size: int, ranks: Sequence[int]) -> Callable[[], None]:
        """Record the start of a collective of `size` bytes in total. The caller calls the returned function when it
        waits for the result."""

    def send(self, exchange: int, size: int, blocks: int) -> None:
        """Record that `blocks` blocks of `size` bytes each are copied to other ranks' memory, one after the other."""

    def receive(self, exchange: int, blocks: int) -> None:
        """Record a wait for the next `blocks` blocks from other ranks."""


_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Report operations on the meta device to `observer` within this context."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


def kernel(name: str, arguments: Sequence[object]) -> None:
    for observer in _observers:
        observer.kernel(name, arguments)


def gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, blocks: bool = False) -> None:
    for observer in _observers:
        observer.gemm(a, b, out, blocks=blocks)


def attention(name: str, q: torch.Tensor, k: torch.Tensor, mask: AttentionMask, *, backward: bool = False) -> None:
    for observer in _observers:
        observer.attention(name, q, k, mask, backward=backward)


def exchange(kind: str, size: int, ranks: Sequence[int]) -> Callable[[], None] | None:
    """Report a collective, and return the function to call when waiting for the result, or None if there is no
    observer."""
    waits = [observer.exchange(kind, size, ranks) for observer in _observers]
    return waits[-1] if waits else None


def send(number: int, size: int, blocks: int) -> None:
    for observer in _observers:
        observer.send(number, size, blocks)


def receive(number: int, blocks: int) -> None:
    for observer in _observers:
        observer.receive(number, blocks)
