"""The layout of buckets as data. It describes which parameters share a flat tensor, at which offsets, and how their
gradients are reduced.

`GradBuffer` allocates buckets with this layout, and the memory estimate uses the same layout. This module does not
depend on torch, ranks or the model. A parameter is described by the logical tensors that are stacked in the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mega.core.architecture import Tensor, Unit

ALIGNMENT = 64
"""Every parameter starts at a multiple of this number of elements, so that kernels read whole cache lines."""


class Reduction(NamedTuple):
    """The sums that convert a local gradient to the gradient of the global batch. Parameters with different reductions
    are in different buckets."""

    data: str = "dp"
    """The data axis over which the gradient is summed first."""
    partial: tuple[str, ...] = ()
    """Axes over which each rank's gradient is still partial after the sum over `data`."""
    replicated: tuple[str, ...] = ()
    """Axes whose ranks hold equal copies of the parameter."""
    stages: tuple[int, ...] = ()
    """The pipeline stages that hold the parameter if it is tied, otherwise empty. Each stage computes one term of the
    gradient."""
    whole: bool = False
    """Whether the optimizer updates the parameter as a whole matrix."""


class ParameterSpec(NamedTuple):
    """The properties of a parameter that determine its bucket and offset."""

    tensors: tuple[Tensor, ...]  # the logical tensors stacked in the parameter
    elements: int  # number of elements on this rank
    dtype: str  # name of the parameter's dtype


@dataclass(frozen=True)
class BucketRules:
    """The properties of a parallel layout that determine buckets."""

    tensor: Mapping[str, int]
    """Size of each tensor axis."""
    sequence: bool
    """Whether tensor ranks split the sequence."""
    shards: Mapping[str, int]
    """Data axis -> number of its ranks, each of which owns a span (ZeRO). Empty without ZeRO."""
    least: int | None
    """Number of elements at which a bucket is full; None for one bucket for all parameters with equal reduction."""
    stages: Mapping[str, tuple[int, ...]]
    """Name of a tensor that several pipeline stages hold -> these stages (`shared_stages`)."""
    matrices: bool = False
    """Whether the optimizer updates the matrices of layers as whole matrices."""

    def reduction(self, tensor: Tensor) -> Reduction:
        """Return the gradient reduction for a parameter that holds `tensor`."""
        axis = tensor.tensor_axis
        replicated = (axis,) if self.tensor[axis] > 1 and tensor.cut() is None else ()
        parts = replicated and ("tp" in tensor.partial or ("sequence" in tensor.partial and self.sequence))
        whole = self.matrices and tensor.hidden_matrix
        return Reduction(tensor.data, (axis,) if parts else (), replicated, self.stages.get(tensor.name, ()), whole)


@dataclass(frozen=True)
class BucketSpec:
    """The layout of one bucket."""

    reduction: Reduction
    dtype: str
    parameters: tuple[int, ...]  # indices of the bucket's parameters, those with weight decay first
    offsets: tuple[tuple[int, int], ...]  # [begin, end) of each parameter
    length: int  # number of elements, padding included
    shard: int  # number of elements that each data rank owns
    decay_end: int  # end of the parameters with weight decay


def plan_buckets(parameters: Sequence[ParameterSpec], rules: BucketRules) -> Iterator[BucketSpec]:
    """Yield the buckets of one unit or chunk. A bucket contains neighbouring parameters with equal reduction and dtype.

    A bucket has at least `rules.least` elements, unless too few elements are left. A tied parameter has its own bucket,
    so that its offsets are the same on every stage that holds the parameter.
    """
    open_groups: dict[tuple[Reduction, str], list[int]] = {}
    sizes: Counter[tuple[Reduction, str]] = Counter()
    for number, parameter in enumerate(parameters):
        key = rules.reduction(parameter.tensors[0]), parameter.dtype
        open_groups.setdefault(key, []).append(number)
        sizes[key] += parameter.elements
        if key[0].stages or (rules.least is not None and sizes[key] >= rules.least):
            del sizes[key]
            yield _bucket(parameters, open_groups.pop(key), key, rules)
    for key, group in open_groups.items():
        yield _bucket(parameters, group, key, rules)


def _bucket(
    parameters: Sequence[ParameterSpec], group: list[int], key: tuple[Reduction, str], rules: BucketRules
) -> BucketSpec:
    group = sorted(group, key=lambda number: not parameters[number].tensors[0].decays)
    offsets, end, decay_end = [], 0, 0
    for number in group:
        parameter = parameters[number]
        offsets.append((end, end + parameter.elements))
        end = round_up(end + parameter.elements, ALIGNMENT)
        if parameter.tensors[0].decays:
            decay_end = end
    shards = rules.shards[key[0].data] if rules.shards else 1
    length = round_up(end, shards * ALIGNMENT)
    return BucketSpec(*key, tuple(group), tuple(offsets), length, length // shards, decay_end)


def shared_stages(tensors: Iterable[Tensor], unit_stages: Mapping[Unit, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Return a map from the name of every tensor that several pipeline stages hold to these stages.

    unit_stages: unit -> (stage, chunk), from `unit_stages` in plan/layers.py.
    """
    stages_of = {tensor.name: sorted({unit_stages[unit][0] for unit in tensor.units}) for tensor in tensors}
    return {name: tuple(stages) for name, stages in stages_of.items() if len(stages) > 1}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
