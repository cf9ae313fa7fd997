"""Conventions between ops and their callers: accumulation of weight gradients, recompute recipes, the start of a
backward pass.

A weight may have a method `accumulate_grad(gradient)` that adds the gradient to a main_grad and returns None. Ops pass
gradients of weights to this method in full precision. A tensor may have a recipe: an op that would save the tensor for
the backward pass may save the recipe instead and recompute the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.autograd.function import FunctionCtx

Recipe = Callable[[], torch.Tensor]
State = TypeVar("State")


class FunctionContext(FunctionCtx, Generic[State]):
    """The type of `ctx` in an autograd function.

    state: everything except tensors that `forward` passes to `backward`, set once. recipe: set by `keep`.
    """

    state: State
    recipe: Recipe | None
    saved_tensors: tuple[torch.Tensor, ...]

    if TYPE_CHECKING:  # torch's types do not allow None, although None works

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


def deliver(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """Pass `gradient` to the weight's `accumulate_grad`; without such a method return `gradient` for autograd."""
    accumulate_grad = getattr(weight, "accumulate_grad", None)
    return gradient.to(weight.dtype) if accumulate_grad is None else accumulate_grad(gradient)


def with_recipe(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Attach a recipe to `x`: callers may free `x` and call `recipe()` to recompute it."""
    x.recipe = recipe  # type: ignore[attr-defined]
    return x


def keep(ctx: FunctionContext[State], x: torch.Tensor) -> None:
    """In a `forward`: save `x`, or its recipe, for `kept`."""
    ctx.recipe = getattr(x, "recipe", None)
    ctx.save_for_backward(*(() if ctx.recipe else (x,)))


def kept(ctx: FunctionContext[State]) -> torch.Tensor:
    """In the `backward`: the tensor passed to `keep`. Call this function only once."""
    recipe = ctx.recipe
    if recipe is None:
        (x,) = ctx.saved_tensors
        return x
    ctx.recipe = None  # frees the tensors that the recipe references
    with torch.no_grad():
        return recipe()


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """torch.autograd.backward(outputs, gradients) without its check of shapes.

    The check compares symbolic shapes by a package whose import takes half as long as the import of torch itself.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
