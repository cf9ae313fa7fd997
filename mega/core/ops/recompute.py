"""Activation recomputation: saved tensors are recomputed in the backward pass instead of being stored.

Tensors that autograd would save are dropped. When the backward pass needs the first dropped tensor, the function runs
again, and each recomputed tensor is used only once. `torch.utils.checkpoint` does the same, but imports torch's
compiler, which takes about as long as importing torch itself.

Random state is not restored, so the function must depend only on its inputs. This module does not depend on the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Forgotten:
    """A placeholder for a saved tensor. The placeholder is empty until the tensor is recomputed."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None


class _Enough(Exception):
    """Raised to end a recomputation early, when all dropped tensors have been recomputed."""


class _Recomputation:
    """One call of a function, with placeholders for its saved tensors, in order."""

    def __init__(self, run: Callable[..., torch.Tensor], inputs: tuple[object, ...]) -> None:
        self._run, self._inputs, self._done = run, inputs, False
        self._forgotten: list[weakref.ref[_Forgotten]] = []

    def pack(self, _: torch.Tensor) -> _Forgotten:
        place = _Forgotten()
        self._forgotten.append(weakref.ref(place))
        return place

    def unpack(self, place: _Forgotten) -> torch.Tensor:
        if not self._done:
            self._done = True
            self._compute()
        tensor, place.tensor = place.tensor, None
        assert tensor is not None, (
            "a backward pass that ran twice, or a function that computes something else each time"
        )
        return tensor

    def _compute(self) -> None:
        inputs = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in self._inputs
        ]
        fill = self._fill(iter(self._forgotten))
        with suppress(_Enough), torch.enable_grad(), saved_tensors_hooks(fill, lambda x: x):
            self._run(*inputs)

    def _fill(self, waiting: Iterator[weakref.ref[_Forgotten]]) -> Callable[[torch.Tensor], torch.Tensor]:
        missing = len(self._forgotten)

        def fill(x: torch.Tensor) -> torch.Tensor:
            nonlocal missing
            missing -= 1
            place, x = next(waiting)(), x.detach()  # a tensor with a reference to its own op would never be freed
            if place is not None:  # if None, the backward pass does not need this tensor
                place.tensor = x
            if not missing:
                raise _Enough
            return x

        return fill


def recompute(run: Callable[..., torch.Tensor], *inputs: object) -> torch.Tensor:
    """Return `run(*inputs)`. Only the inputs are saved; other saved tensors are recomputed when the backward pass needs
    them.

    If calls are nested, the inputs of the inner call are also saved until the backward pass.

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> recompute(lambda x: x * x * x, x).backward()
    >>> x.grad
    tensor(12.)
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    recomputation = _Recomputation(run, inputs)
    with saved_tensors_hooks(recomputation.pack, recomputation.unpack):
        return run(*inputs)
