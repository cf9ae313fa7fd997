"""A parameter that knows which logical tensors it holds, and where its gradient goes.

Layers may fuse logical tensors (query, key and value; gate and up) by stacking them along dim 0. The segments define
where each lies, so that code that initialises, saves, reduces or compares goes by logical name and never by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from mega.core.architecture import Tensor
from mega.core.ops.counter import key, normal_
from mega.core.ops.suite import REFERENCE, Ops
from mega.core.shard import Shard, shard


@dataclass(frozen=True)
class Segment:
    """One logical tensor's block inside a parameter: rows [offset, offset + shard.local[0])."""

    shard: Shard
    offset: int

    def real(self, local: torch.Tensor) -> torch.Tensor:
        """The view of the elements that exist in the logical tensor; `local` is shaped like the parameter."""
        view = local.narrow(0, self.offset, self.shard.size[0])
        return view.narrow(1, 0, self.shard.size[1]) if view.dim() > 1 else view


class Weight(nn.Parameter):
    """A parameter with segments. One whose tensors are not trainable takes no gradient.

    uses: how often its gradient arrives in one backward pass (2 for a tied embedding on one stage).
    main_grad: where gradients accumulate, shaped like the weight; None leaves them to autograd.
    on_main_grad: called before a gradient is added while `main_grad` is None; it may allocate it.
    on_grad_ready: called with the weight each time a gradient has been added to the main_grad.
    on_wgrad: takes a GEMM to compute it later; None has it computed at once.
    """

    segments: tuple[Segment, ...]
    ops: Ops
    uses: int
    main_grad: torch.Tensor | None
    on_main_grad: Callable[[Weight], None] | None
    on_grad_ready: Callable[[Weight], None] | None
    on_wgrad: Callable[[Weight, Any, torch.Tensor], None] | None

    def __new__(cls, data: torch.Tensor, segments: tuple[Segment, ...], ops: Ops = REFERENCE) -> Self:
        weight = super().__new__(cls, data, requires_grad=True)
        weight.segments, weight.ops, weight.uses = segments, ops, 1
        weight.requires_grad_(all(segment.shard.tensor.learned for segment in segments))
        weight.main_grad = weight.on_main_grad = weight.on_grad_ready = weight.on_wgrad = None
        return weight

    def add_wgrad(self, grad: Any, x: torch.Tensor) -> torch.Tensor | None:
        """The gradient of y = x W^T: grad [n, out] as our matmuls prepare it, x [n, in]. Into `main_grad`, or returned
        where there is none."""
        if not self.requires_grad:
            return None
        main_grad = self.open_main_grad()
        if main_grad is None:
            return self.ops.matmuls.wgrad(grad, x)
        if self.on_wgrad is not None:
            self.on_wgrad(self, grad, x)
            return None
        self.ops.matmuls.accumulate_wgrad(main_grad, grad, x)
        self.grad_ready()
        return None

    def accumulate_grad(self, grad: torch.Tensor) -> torch.Tensor | None:
        """A whole gradient in any precision. Into `main_grad`, or returned in our dtype where there is none."""
        if not self.requires_grad:
            return None
        main_grad = self.open_main_grad()
        if main_grad is None:
            return grad.to(self.dtype)
        main_grad.add_(grad)
        self.grad_ready()
        return None

    def add_rows(self, rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a look-up: grad [n, h] belongs to rows [n]."""
        if not self.requires_grad:
            return None
        main_grad = self.open_main_grad()
        into = torch.zeros_like(self) if main_grad is None else main_grad
        into.index_add_(0, rows, grad.to(into.dtype))
        if main_grad is None:
            return into
        self.grad_ready()
        return None

    def open_main_grad(self) -> torch.Tensor | None:
        """The main_grad, made now if somebody makes it on need."""
        if self.main_grad is None and self.on_main_grad is not None:
            self.on_main_grad(self)
        return self.main_grad

    def grad_ready(self) -> None:
        if self.on_grad_ready is not None:
            self.on_grad_ready(self)


@dataclass(frozen=True)
class ParameterFactory:
    """Makes the weights of one rank: `coordinates` as in `shard`, memory on `device`, values not set.

    embedding: dtype of the tables in front of the first block, where it is not `dtype`. ops: what the layers that hold
    the weights compute with. recompute: norms and activations are computed again in the backward pass, not kept.
    tied: the tensors of several units that this rank has made.
    """

    coordinates: Mapping[str, tuple[int, int]]
    dtype: torch.dtype
    device: torch.device
    ops: Ops = REFERENCE
    recompute: bool = False
    embedding: torch.dtype | None = None
    tied: dict[str, Weight] = field(default_factory=dict)

    @property
    def exact(self) -> ParameterFactory:
        """The same with GEMMs in the compute dtype, for the head."""
        return replace(self, ops=replace(self.ops, matmuls=self.ops.matmuls.exact()))

    def __call__(self, *tensors: Tensor) -> Weight:
        """One parameter that holds these tensors one after the other along dim 0.

        A tied tensor that this rank holds already is the same parameter, used once more.
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
    """The distinct weights of a module, in order of definition."""
    for parameter in module.parameters():
        assert isinstance(parameter, Weight), "every parameter is made by a ParameterFactory"
        yield parameter


def initialise(module: nn.Module, seed: int) -> None:
    """Set every weight to its initial value: the same whole tensors in every layout."""
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
    """Elements that this rank holds, padding included."""
    return sum(weight.numel() for weight in weights(module))
