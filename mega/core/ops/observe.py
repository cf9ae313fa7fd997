"""Observers of operations on the meta device that torch does not see: kernels, attention, exchanges between ranks.

A dispatch mode sees the ops of torch. Our own kernels and exchanges are not ops of torch: on the meta device they
return tensors with shapes only, and report to this module the operations that they would run on a real device. This
module does not compute costs; the observer is in estimate/operation_log.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mega.core.ops.mask import AttentionMask


class Observer(Protocol):
    """Receives reports of operations."""

    def kernel(self, name: str, arguments: Sequence[object]) -> None:
        """A kernel launch with these arguments, tensors included."""

    def attention(self, kernel: str, q: torch.Tensor, k: torch.Tensor, mask: AttentionMask, *, backward: bool) -> None:
        """An attention over q [b, s, heads, d] and k [b, t, kv_heads, d]. kernel: "ours" or "window" (cuDNN's)."""

    def exchange(self, kind: str, size: int, ranks: Sequence[int]) -> Callable[[], None]:
        """A collective of `size` bytes in total begins. The returned function is called at the wait."""

    def send(self, exchange: int, size: int, blocks: int) -> None:
        """Copies of `blocks` blocks of `size` bytes each to the memory of other ranks, one after the other."""

    def receive(self, exchange: int, blocks: int) -> None:
        """A wait for the next `blocks` blocks from other ranks."""


_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """A context in which operations on the meta device report to `observer`."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


def kernel(name: str, arguments: Sequence[object]) -> None:
    for observer in _observers:
        observer.kernel(name, arguments)


def attention(name: str, q: torch.Tensor, k: torch.Tensor, mask: AttentionMask, *, backward: bool = False) -> None:
    for observer in _observers:
        observer.attention(name, q, k, mask, backward=backward)


def exchange(kind: str, size: int, ranks: Sequence[int]) -> Callable[[], None] | None:
    """Report a collective. Returns the function to call at the wait; None if nothing observes."""
    waits = [observer.exchange(kind, size, ranks) for observer in _observers]
    return waits[-1] if waits else None


def send(number: int, size: int, blocks: int) -> None:
    for observer in _observers:
        observer.send(number, size, blocks)


def receive(number: int, blocks: int) -> None:
    for observer in _observers:
        observer.receive(number, blocks)
