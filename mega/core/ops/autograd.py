"""Small conventions between ops and those who call them: where a weight's gradient goes, what is computed again, how
the backward pass is begun.

A weight may have a method `accumulate_grad(gradient)` that adds to a store of its own and returns None; an op hands its
weights' gradients over in full precision and lets the weight decide. A tensor may carry a recipe: an op that would keep
the tensor for the backward pass may keep the recipe instead and compute the tensor again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.autograd.function import FunctionCtx

Recipe = Callable[[], torch.Tensor]
State = TypeVar("State")


class FunctionContext(FunctionCtx, Generic[State]):
    """The `ctx` of an autograd function, as its types see it. state: what its forward leaves to its backward besides
    tensors, set once. recipe: of `keep`."""

    state: State
    recipe: Recipe | None
    saved_tensors: tuple[torch.Tensor, ...]

    if TYPE_CHECKING:  # torch's own types forget that one may be None

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


def deliver(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """Hand `gradient` to a weight that takes it; otherwise return it for autograd."""
    accumulate_grad = getattr(weight, "accumulate_grad", None)
    return gradient.to(weight.dtype) if accumulate_grad is None else accumulate_grad(gradient)


def with_recipe(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """`x`, which may be forgotten because `recipe()` gives it again."""
    x.recipe = recipe  # type: ignore[attr-defined]
    return x


def keep(ctx: FunctionContext[State], x: torch.Tensor) -> None:
    """In a forward: keep `x`, or how to get it, for `kept`."""
    ctx.recipe = getattr(x, "recipe", None)
    ctx.save_for_backward(*(() if ctx.recipe else (x,)))


def kept(ctx: FunctionContext[State]) -> torch.Tensor:
    """In the backward: the tensor that `keep` was given. Call it once."""
    recipe = ctx.recipe
    if recipe is None:
        (x,) = ctx.saved_tensors
        return x
    ctx.recipe = None  # what the recipe holds is freed with it
    with torch.no_grad():
        return recipe()


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """torch.autograd.backward(outputs, gradients) but for its look at shapes.

    That one compares them as symbols, by a package that takes a rank half as long to import as torch itself.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
