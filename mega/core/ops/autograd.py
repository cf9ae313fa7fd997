"""Conventions between ops and their callers: accumulating weight gradients, recipes for recomputation, and starting a
backward pass.

A weight may have a method `accumulate_grad(gradient)` that adds the gradient to a main_grad and returns None. Ops pass
weight gradients to this method in full precision. A tensor may have a recipe, a function that recomputes the tensor. An
op may save the recipe for the backward pass instead of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.autograd.function import FunctionCtx

Recipe = Callable[[], torch.Tensor]
State = TypeVar("State")


class FunctionContext(FunctionCtx, Generic[State]):
    """The type of the context `ctx` in an autograd function.

    state: the values other than tensors that `forward` passes to `backward`. recipe: the function that recomputes the
    tensor passed to `keep`, or None.
    """

    state: State
    recipe: Recipe | None
    saved_tensors: tuple[torch.Tensor, ...]

    if TYPE_CHECKING:  # torch's type annotations do not allow None, although None works

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


def deliver(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """Pass `gradient` to the weight's `accumulate_grad`, or return `gradient` for autograd if the weight has no such
    method."""
    accumulate_grad = getattr(weight, "accumulate_grad", None)
    return gradient.to(weight.dtype) if accumulate_grad is None else accumulate_grad(gradient)


def with_recipe(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Attach a recipe to `x`, so that ops may free `x` and recompute it by calling `recipe()`."""
    x.recipe = recipe  # type: ignore[attr-defined]
    return x


def keep(ctx: FunctionContext[State], x: torch.Tensor) -> None:
    """Save `x`, or the recipe of `x`, so that `kept` can return `x` in `backward`. Call this function in `forward`."""
    ctx.recipe = getattr(x, "recipe", None)
    ctx.save_for_backward(*(() if ctx.recipe else (x,)))


def kept(ctx: FunctionContext[State]) -> torch.Tensor:
    """Return the tensor that was passed to `keep`. Call this function in `backward`, and only once."""
    recipe = ctx.recipe
    if recipe is None:
        (x,) = ctx.saved_tensors
        return x
    ctx.recipe = None  # frees the tensors that the recipe references
    with torch.no_grad():
        return recipe()


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Run `torch.autograd.backward(outputs, gradients)` without torch's check of shapes.

    The check imports a package for symbolic shapes, which takes half as long as importing torch itself.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
