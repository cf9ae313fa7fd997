"""Conventions between ops and their callers: accumulating weight gradients, recipes for recomputation, and starting a
backward pass.

A weight may have a method `accumulate_grad(gradient)` that adds the gradient to a main_grad and returns None. Ops pass
weight gradients to this method in full precision. A tensor may have a recipe, a function that recomputes the tensor. An
op may save the recipe for the backward pass instead of the tensor. The output of an activation may have a slope, which
the next GEMM applies in the backward pass. A linear layer in fp8 may save its input as an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.autograd.function import FunctionCtx

from mega.core.ops.operand import Input, Operand

Recipe = Callable[[], torch.Tensor]
State = TypeVar("State")


class FunctionContext(FunctionCtx, Generic[State]):
    """The type of the context `ctx` in an autograd function.

    state: the values other than tensors that `forward` passes to `backward`. recipe: the function that recomputes the
    tensor passed to `keep`, or None. others: the number of other tensors that were passed to `keep`.
    """

    state: State
    recipe: Recipe | None
    others: int
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


def keep(ctx: FunctionContext[State], x: Input | None, *others: torch.Tensor) -> None:
    """Save `others`, and `x` or its recipe, so that `kept` can return them in `backward`. Call this function in
    `forward`."""
    ctx.recipe, ctx.others = getattr(x, "recipe", None), len(others)
    parts = () if x is None or ctx.recipe else x if isinstance(x, Operand) else (x,)
    ctx.save_for_backward(*others, *parts)


def kept(ctx: FunctionContext[State]) -> tuple[Input | None, tuple[torch.Tensor, ...]]:
    """Return `x` and `others` as they were passed to `keep`. Call this function in `backward`, and only once."""
    saved, recipe = ctx.saved_tensors, ctx.recipe
    others, parts = saved[: ctx.others], saved[ctx.others :]
    if recipe is not None:
        ctx.recipe = None  # frees the tensors that the recipe references
        with torch.no_grad():
            return recipe(), others
    if not parts:
        return None, others
    return Operand(*parts) if len(parts) > 1 else parts[0], others


@dataclass(eq=False)
class Activation:
    """An activation that the GEMM before it may compute in its epilogue."""

    kind: str
    output: torch.Tensor | None = None
    """[n, f], without a gradient; None if the GEMM has not computed it."""


@dataclass(eq=False)
class Slope:
    """An activation whose slope the GEMM after the activation applies, in the epilogue of its dgrad.

    The gradient that the GEMM returns for its input is then the gradient of the activation's input.
    """

    before: torch.Tensor | None
    """The activation's input [n, f], including the bias; None once the GEMM has taken it."""
    kind: str

    def take(self) -> torch.Tensor:
        """Return `before`, which the caller must save, and from then on must apply the slope."""
        before, self.before = self.before, None
        assert before is not None
        return before


def with_slope(active: torch.Tensor, slope: Slope) -> torch.Tensor:
    """Attach a slope to the output of an activation."""
    active.slope = slope  # type: ignore[attr-defined]
    return active


def slope_of(active: torch.Tensor) -> Slope | None:
    return getattr(active, "slope", None)


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Run `torch.autograd.backward(outputs, gradients)` without torch's check of shapes.

    The check imports a package for symbolic shapes, which takes half as long as importing torch itself.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
