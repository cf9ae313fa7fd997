"""A stand-in for a CUDA graph on a CPU: records the operations on tensors that some work makes, and makes them again.

As with a graph, no Python code of the work runs when the tape is played: numbers of the host keep the values that they
had in the recording, and the operations read and write the same memory as in the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_RECORDING: list[Tape] = []


class Tape(TorchDispatchMode):
    """In a graph's place. work: makes the operations."""

    played = 0

    def __init__(self, work: Callable[[], None]):
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        _RECORDING.append(self)
        with self:
            work()
        _RECORDING.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = function(*args, **kwargs)
        self._calls.append((function, args, kwargs, out))
        return out

    def play(self) -> None:
        Tape.played += 1
        for function, args, kwargs, out in self._calls:
            for found, recorded in zip(tree_leaves(function(*args, **kwargs)), tree_leaves(out), strict=True):
                if isinstance(recorded, torch.Tensor) and recorded.data_ptr() != found.data_ptr():
                    recorded.copy_(found)


def one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a tape record a function as a whole, as it does not see what a Triton kernel writes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _RECORDING:
            return function(*args, **kwargs)
        with _disable_current_modes():
            return _RECORDING[-1].call(function, args, kwargs)

    return call
