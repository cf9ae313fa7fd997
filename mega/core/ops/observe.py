"""Who hears of an operation that does nothing on the meta device: kernels, attention, exchanges between ranks.

Ops of torch are seen by a dispatch mode. What we launch or exchange ourselves is not an op of torch: on the meta device
it returns shapes, and reports here what a device would do. It knows no cost; estimate/heard.py listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mega.core.ops.mask import AttentionMask


class Observer(Protocol):
    """What is reported, as it happens."""

    def kernel(self, name: str, arguments: Sequence[object]) -> None:
        """A launch with these arguments, tensors among them."""

    def attention(self, kernel: str, q: torch.Tensor, k: torch.Tensor, mask: AttentionMask, *, backward: bool) -> None:
        """q [b, s, heads, d], k [b, t, kv_heads, d]. kernel: "ours" or "window" (cuDNN's, which sees `k` in a band)."""

    def exchange(self, kind: str, size: int, ranks: Sequence[int]) -> Callable[[], None]:
        """A collective of `size` bytes in all begins; what is returned is called when it is waited for."""

    def send(self, exchange: int, size: int, blocks: int) -> None:
        """Copies of `blocks` blocks of `size` bytes each into the memory of other ranks, one after the other."""

    def receive(self, exchange: int, blocks: int) -> None:
        """The next `blocks` blocks of other ranks are waited for."""


_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Everything that runs on the meta device reports to `observer`."""
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
    """What to call at the wait; None without an observer."""
    found = [observer.exchange(kind, size, ranks) for observer in _observers]
    return found[-1] if found else None


def send(number: int, size: int, blocks: int) -> None:
    for observer in _observers:
        observer.send(number, size, blocks)


def receive(number: int, blocks: int) -> None:
    for observer in _observers:
        observer.receive(number, blocks)
