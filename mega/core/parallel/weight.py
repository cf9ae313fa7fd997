"""A parameter that records its logical tensors and the tensor in which its gradient is accumulated.

Layers may fuse logical tensors (query, key and value; gate and up) by stacking them along dim 0:

    weight [out of this rank, in]   | q rows | k rows | v rows |     one segment each

Code that initialises, saves, reduces or compares weights uses the segments' logical names and does not depend on
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.ops.counter import key, normal_
from mega.core.ops.operand import Input
from mega.core.ops.suite import REFERENCE, Ops
from mega.core.shard import Shard, shard


@dataclass(frozen=True)
class Segment:
    """The shard of one logical tensor inside a parameter: rows [offset, offset + shard.local[0])."""

    shard: Shard
    offset: int

    def real(self, local: torch.Tensor) -> torch.Tensor:
        """Return the view of the segment's elements in `local`, without padding. `local` has the parameter's shape."""
        view = local.narrow(0, self.offset, self.shard.size[0])
        return view.narrow(1, 0, self.shard.size[1]) if view.dim() > 1 else view


class Weight(nn.Parameter):
    """A parameter with segments. The parameter requires a gradient if all its tensors are trainable."""

    segments: tuple[Segment, ...]
    ops: Ops
    uses: int
    """The number of gradients per backward pass (2 for a tied embedding on one stage)."""
    main_grad: torch.Tensor | None
    """The accumulated gradient, shaped like the weight; None if autograd handles the gradient."""
    unwritten: bool
    """Whether the elements of `main_grad` are undefined, because the step has computed no gradient yet."""
    on_main_grad: Callable[[Weight], None] | None
    """Function that is called before a gradient is added while `main_grad` is not set. It may allocate `main_grad`."""
    on_grad_ready: Callable[[Weight], None] | None
    """Function that is called each time a gradient has been added to `main_grad`."""
    on_wgrad: Callable[[Weight, Any, Input], None] | None
    """Function that defers a wgrad GEMM; None if GEMMs run immediately."""
    shared_cast: Callable[[], object] | None
    """Function that returns the fp8 cast of the weight, which the passes of a step share; None if GEMMs cast the
    weight."""

    def __new__(cls, data: torch.Tensor, segments: tuple[Segment, ...], ops: Ops = REFERENCE) -> Self:
        weight = super().__new__(cls, data, requires_grad=True)
        weight.segments, weight.ops, weight.uses = segments, ops, 1
        weight.requires_grad_(all(segment.shard.tensor.learned for segment in segments))
        weight.main_grad = weight.on_main_grad = weight.on_grad_ready = weight.on_wgrad = None
        weight.shared_cast, weight.unwritten = None, False
        return weight

    def add_wgrad(self, grad: Any, x: Input) -> torch.Tensor | None:
        """Add the gradient of y = x W^T to `main_grad`, or return the gradient if `main_grad` is not set.

        grad: [n, out], as prepared by `ops.matmuls`. x: [n, in], or the second result of `ops.matmuls.operands`.
        """
        if not self.requires_grad:
            return None
        overwrite, self.unwritten = self.unwritten, False
        main_grad = self.open_main_grad()
        if main_grad is None:
            return self.ops.matmuls.wgrad(grad, x).to(self.dtype)
        if self.on_wgrad is not None:
            self.unwritten = overwrite
            self.on_wgrad(self, grad, x)
            return None
        if overwrite:
            self.ops.matmuls.write_wgrad(main_grad, grad, x)
        else:
            self.ops.matmuls.accumulate_wgrad(main_grad, grad, x)
        self.grad_ready()
        return None

    def accumulate_grad(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Add a whole gradient, of any dtype, to `main_grad`, or return it in the weight's dtype if `main_grad` is not
        set."""
        if not self.requires_grad:
            return None
        main_grad = self.open_main_grad()
        if main_grad is None:
            return grad.to(self.dtype)
        main_grad.add_(grad)
        self.grad_ready()
        return None

    def add_rows(self, rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """Add the gradient of a look-up, grad [n, h], for the rows with indices `rows` [n]."""
        if not self.requires_grad:
            return None
        main_grad = self.open_main_grad()
        into = torch.zeros_like(self) if main_grad is None else main_grad
        self.ops.add_rows(into, rows, grad)
        if main_grad is None:
            return into
        self.grad_ready()
        return None

    def open_main_grad(self) -> torch.Tensor | None:
        """Return `main_grad`, to which the caller may add. If it is not set, `on_main_grad` may allocate it first."""
        if self.main_grad is None and self.on_main_grad is not None:
            self.on_main_grad(self)
        if self.unwritten and self.main_grad is not None:
            self.main_grad.zero_()
            self.unwritten = False
        return self.main_grad

    def grad_ready(self) -> None:
        if self.on_grad_ready is not None:
            self.on_grad_ready(self)


@dataclass(frozen=True)
class ParameterFactory:
    """Creates the weights of one rank, without setting their values."""

    coordinates: Mapping[str, tuple[int, int]]
    """Axis -> (index, size), as in `shard`."""
    dtype: torch.dtype
    device: torch.device
    ops: Ops = REFERENCE
    """The implementations used by the layers that hold the weights."""
    recompute: bool = False
    """Whether norms and activations are recomputed in the backward pass instead of saved."""
    embedding: torch.dtype | None = None
    """The dtype of the embedding tables; None for `dtype`."""
    tied: dict[str, Weight] = field(default_factory=dict)
    """Name -> weight, for the weights created so far whose tensors belong to several units."""

    @property
    def exact(self) -> ParameterFactory:
        """A copy of this factory with GEMMs in the compute dtype (no fp8), for the head."""
        return replace(self, ops=replace(self.ops, matmuls=self.ops.matmuls.exact()))

    def __call__(self, *tensors: Tensor) -> Weight:
        """Return one parameter with these tensors stacked along dim 0.

        For a tied tensor that this rank already holds, return the existing parameter and increment its `uses`.
        """
        if tensors[0].name in self.tied:
            weight = self.tied[tensors[0].name]
            weight.uses += 1
            return weight
        segments, offset = [], 0
        for tensor in tensors:
            block = shard(tensor, self.coordinates)
            segments.append(Segment(block, offset))
            offset += block.local[0]
        shape = (offset, *segments[0].shard.local[1:])
        table = "embedding" in tensors[0].units
        dtype = self.embedding if self.embedding is not None and table else self.dtype
        if tensors[0].counted:
            dtype = torch.promote_types(dtype, torch.float32)
        weight = Weight(torch.empty(shape, dtype=dtype, device=self.device), tuple(segments), self.ops)
        if len(tensors[0].units) > 1:
            self.tied[tensors[0].name] = weight
        return weight


def weights(module: nn.Module) -> Iterator[Weight]:
    """Yield the distinct weights of a module, in order of definition."""
    for parameter in module.parameters():
        assert isinstance(parameter, Weight), "every parameter is made by a ParameterFactory"
        yield parameter


def initialise(module: nn.Module, seed: int) -> None:
    """Set every weight to its initial value. Initial values do not depend on the parallel layout."""
    with torch.no_grad():
        for weight in weights(module):
            weight.zero_()
            for segment in weight.segments:
                block, init = segment.real(weight), segment.shard.tensor.init
                if init.std:
                    normal_(
                        block, key(seed, "init", segment.shard.name), segment.shard.start, segment.shard.whole, init.std
                    )
                else:
                    block.fill_(init.constant)


def local_parameters(module: nn.Module) -> int:
    """Return the number of elements that this rank holds, padding included."""
    return sum(weight.numel() for weight in weights(module))
