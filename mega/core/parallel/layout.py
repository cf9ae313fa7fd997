"""Buckets as data: which parameters lie together in one flat tensor, where, and how their gradients become whole.

Read by `GradBuffer`, which makes the buckets, and by the memory estimate, which counts them. Knows no torch, no ranks
and no model: parameters are described by the logical tensors that are stacked in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mega.core.architecture import Tensor, Unit

ALIGNMENT = 64
"""Elements at which every parameter starts, so that kernels read whole cache lines."""


class Reduction(NamedTuple):
    """What a gradient needs to become the whole batch's. Parameters that differ in it lie in different buckets.

    data: the data axis that it is summed over first.
    partial: axes over which each rank's gradient is still only a part.
    replicated: axes whose ranks hold equal copies of the parameter.
    stages: the pipeline stages that hold the parameter, where several do (tied tensors); each has a part.
    whole: it is updated as a whole matrix.
    """

    data: str = "dp"
    partial: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    whole: bool = False


class ParameterSpec(NamedTuple):
    """What decides where a parameter lies: its logical tensors, its elements on this rank, its dtype's name."""

    tensors: tuple[Tensor, ...]
    elements: int
    dtype: str


@dataclass(frozen=True)
class BucketRules:
    """What a layout determines of buckets.

    tensor: sizes of the tensor axes. sequence: their ranks split the sequence. shards: data axis -> its ranks, which
    each own a span; {}: every rank has everything. least: elements at which a bucket is full; None: one bucket for all
    alike. stages: name of a tensor that several pipeline stages hold -> those stages (`shared_stages`). matrices: those
    of layers are updated whole.
    """

    tensor: Mapping[str, int]
    sequence: bool
    shards: Mapping[str, int]
    least: int | None
    stages: Mapping[str, tuple[int, ...]]
    matrices: bool = False

    def reduction(self, tensor: Tensor) -> Reduction:
        """How the gradient of a parameter with `tensor` becomes whole."""
        axis = tensor.tensor_axis
        replicated = (axis,) if self.tensor[axis] > 1 and tensor.cut() is None else ()
        parts = replicated and ("tp" in tensor.partial or ("sequence" in tensor.partial and self.sequence))
        whole = self.matrices and tensor.hidden_matrix
        return Reduction(tensor.data, (axis,) if parts else (), replicated, self.stages.get(tensor.name, ()), whole)


@dataclass(frozen=True)
class BucketSpec:
    """One bucket. parameters: which of the given ones, decayed first; offsets: each one's [begin, end).

    length: elements, padding included. shard: elements that each data rank owns. decay_end: where decayed parameters
    end.
    """

    reduction: Reduction
    dtype: str
    parameters: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    length: int
    shard: int
    decay_end: int


def plan_buckets(parameters: Sequence[ParameterSpec], rules: BucketRules) -> Iterator[BucketSpec]:
    """The buckets of one unit or chunk: neighbouring parameters that reduce alike, at least `rules.least` elements
    where there are as many. A tied parameter has one for itself, so that it lies alike on every stage that holds it.
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
    """Name -> pipeline stages of every tensor that more than one of them holds.

    unit_stages: unit -> (stage, chunk), as of `unit_stages` in plan/layers.py.
    """
    found = {tensor.name: sorted({unit_stages[unit][0] for unit in tensor.units}) for tensor in tensors}
    return {name: tuple(stages) for name, stages in found.items() if len(stages) > 1}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
