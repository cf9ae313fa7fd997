"""Computing again what a backward pass needs, instead of keeping it.

What autograd would keep of a function is forgotten; when the backward pass asks for the first of it, the function runs
again, and each tensor is given away once. torch.utils.checkpoint does the same, and imports torch's compiler for it,
which takes about as long as torch itself.

Random state is not restored: what is computed again must be a function of its inputs. Knows no model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Forgotten:
    """In place of a tensor that is kept for a backward pass: empty until it is computed again."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None


class _Enough(Exception):
    """All that was forgotten is there again."""


class _Recomputation:
    """One run of a function, and what is forgotten of it, in order; what is needed no more is not computed."""

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
        left = len(self._forgotten)

        def fill(x: torch.Tensor) -> torch.Tensor:
            nonlocal left
            left -= 1
            place, x = next(waiting)(), x.detach()  # an op that kept its own result would never be freed
            if place is not None:  # its op may have been left out of the backward pass
                place.tensor = x
            if not left:
                raise _Enough
            return x

        return fill


def recompute(run: Callable[..., torch.Tensor], *inputs: object) -> torch.Tensor:
    """run(*inputs), of which autograd keeps the inputs only and computes the rest again, as far as it is needed.

    One within another keeps its own inputs besides, until the backward pass.

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> recompute(lambda x: x * x * x, x).backward()
    >>> x.grad
    tensor(12.)
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    kept = _Recomputation(run, inputs)
    with saved_tensors_hooks(kept.pack, kept.unpack):
        return run(*inputs)
