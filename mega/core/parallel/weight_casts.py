"""fp8 casts of weights, which the forward and backward passes of a step share.

    the pipeline starts        all casts are out of date
    first GEMM with a weight   casts the weight, by rows and by columns, to buffers that never move
    later GEMMs                read the cast
    the pipeline ends          GEMMs cast weights themselves again, for example in an evaluation

A step updates weights after its pipeline has ended, so a cast is never older than its weight. A captured CUDA graph
reads the buffers but contains no casts; `renew` makes the casts before a replay. This module does not depend on the
kind of cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic

from torch import nn

from mega.core.ops.fp8 import AnyCast, NarrowMatmuls
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.weight import Weight


class WeightCasts:
    """The casts of all weights of linear layers with fp8 GEMMs. modules: the layers' modules; without modules, nothing
    is shared."""

    def __init__(self, modules: Iterable[nn.Module] = ()):
        layers = (layer for module in modules for layer in module.modules())
        matrices = {id(layer.weight): layer.weight for layer in layers if isinstance(layer, ColumnLinear | RowLinear)}
        pairs = ((weight, weight.ops.matmuls) for weight in matrices.values())
        self._casts = [_Cast(weight, matmuls) for weight, matmuls in pairs if isinstance(matmuls, NarrowMatmuls)]
        self._open = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share casts within this context, in which weights must not change. Nested contexts share the casts of the
        outermost context."""
        if self._open:
            yield
            return
        self._open = True
        try:
            for cast in self._casts:
                cast.open()
            yield
        finally:
            self._open = False
            for cast in self._casts:
                cast.close()

    def renew(self) -> None:
        """Make all casts that are out of date. Call this method within `shared`."""
        assert self._open
        for cast in self._casts:
            cast.current()


class _Cast(Generic[AnyCast]):
    """The cast of one weight. The buffers are allocated by the first cast."""

    def __init__(self, weight: Weight, matmuls: NarrowMatmuls[AnyCast]):
        self._weight, self._matmuls = weight, matmuls
        self._buffers: AnyCast | None = None
        self._fresh = False

    def open(self) -> None:
        self._fresh, self._weight.shared_cast = False, self.current

    def close(self) -> None:
        self._weight.shared_cast = None

    def current(self) -> AnyCast:
        """Return the cast. If it is out of date, the weight is cast again."""
        if self._buffers is None or not self._fresh:
            self._buffers = self._matmuls.cast_weight(self._weight, rows=True, columns=True, into=self._buffers)
            self._fresh = True
        return self._buffers
