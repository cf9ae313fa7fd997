"""Where a step was broken first: the rank and the tensor, once numbers are found not to be finite.

What every step leaves, without waiting for the device:

    outputs      for each unit (embedding, layer) of this rank's stages, the sum of what it put out
    gradients    for each weight, the norm of this rank's own gradient, before ranks add theirs up
    computed     when that was done, by which ranks are compared (stragglers.py)

A NaN spreads: to later layers, to tensor ranks with the next exchange, to all replicas with the gradients' sum. Its
origin is the first unit in the order of the model whose output is not finite, and the rank that had it there; or, where
all outputs are finite, the last unit in that order with a broken gradient. Weights, masters, moments and the batch are
looked at first: they are still there (guards/finite.py). It knows no state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn

from mega.core.activity import ACTIVITY
from mega.core.batch import Batch
from mega.core.device import Timestamp
from mega.core.parallel.gradients import Bucket, GradBuffer, units_of
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights


class ProbePoint(NamedTuple):
    """Of the model's order: stage counts through all chunks. name: of a unit, or of a weight's tensors."""

    stage: int
    unit: int
    name: str


class Probes:
    """The sums of one rank, from where its stages begin to be trained."""

    def __init__(self, stages: Sequence[nn.Module], grads: GradBuffer, mesh: Mesh, device: torch.device):
        units = list(_units(stages, mesh))
        self.outputs, self.gradients = [at for at, _ in units], list[ProbePoint]()
        of: dict[int, ProbePoint] = {}
        for at, unit in units:
            for weight in weights(unit):
                of.setdefault(id(weight), at)
        self._offsets: dict[int, int] = {}
        for bucket in grads.buckets:
            self._offsets[id(bucket)] = len(units) + len(self.gradients)
            for weight, _, _ in bucket.offsets:
                at = of.get(id(weight), ProbePoint(mesh.pp.index, 0, ""))
                names = [segment.shard.name for segment in weight.segments]
                self.gradients.append(ProbePoint(at.stage, at.unit, ", ".join(names)))
        self.sums = torch.zeros(len(units) + len(self.gradients), device=device)
        for number, (_, unit) in enumerate(units):
            unit.register_forward_hook(_Output(self.sums[number]))
        grads.before_reduce = self._gradient
        self.batch: torch.Tensor
        """bool [], whether the weights of the newest step's batch are finite."""
        self.computed: tuple[Timestamp, float] | None = None
        """When the newest step had its own gradients, and what the rank had worked by then."""

    def start(self) -> None:
        """A step begins."""
        self.sums.zero_()

    def end(self, factors: torch.Tensor) -> None:
        """The gradients of this rank are computed, and not all added up. factors: what losses were multiplied by: 0 for
        weights that are infinite. A stage without a loss does not use them."""
        self.batch = (torch.isfinite(factors) & (factors > 0)).all()
        self.computed = Timestamp(self.sums.device), ACTIVITY.worked()

    def _gradient(self, bucket: Bucket) -> None:
        assert bucket.grads is not None
        norms = torch._foreach_norm([bucket.grads[begin:end] for _, begin, end in bucket.offsets])
        first = self._offsets[id(bucket)]
        self.sums[first : first + len(norms)] += torch.stack(norms)

    def broken(self, sums: Sequence[float]) -> dict[str, list[ProbePoint]]:
        """Places whose sums are not finite. sums: `self.sums` as a step left them."""
        bad = [not (abs(value) < float("inf")) for value in sums]
        outputs = [place for place, is_bad in zip(self.outputs, bad, strict=False) if is_bad]
        gradients = [place for place, is_bad in zip(self.gradients, bad[len(self.outputs) :], strict=True) if is_bad]
        return {"outputs": outputs, "gradients": gradients}


class Damage(Protocol):
    """What a run that damages itself on purpose does in a step and a save (guards/inject.py)."""

    def before_step(self, step: int, batches: Sequence[Batch]) -> list[Batch]: ...
    def after_backward(self) -> None: ...
    def before_save(self, step: int) -> None: ...


class _Output:
    """Adds what a unit puts out to a place of its own; a graph of the device may record it."""

    def __init__(self, total: torch.Tensor):
        self._total = total

    def __call__(self, module: nn.Module, _: object, output: object) -> None:
        if module.training:
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                    self._total.add_(tensor.detach().sum(dtype=torch.float32))


def _units(stages: Sequence[nn.Module], mesh: Mesh) -> Iterator[tuple[ProbePoint, nn.Module]]:
    """A layer is named by what its tensors' names begin with, what is before and after layers by what it is."""
    for chunk, stage in enumerate(stages):
        ends = {id(child): f"the {name}" for name, child in stage.named_children()}
        for number, unit in enumerate(units_of(stage)):
            names = [segment.shard.name.replace(".", "/") for weight in weights(unit) for segment in weight.segments]
            name = ends.get(id(unit)) or os.path.commonpath(names).replace("/", ".")
            yield ProbePoint(chunk * mesh.pp.size + mesh.pp.index, number, name), unit


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether every element of a tensor that has any is finite; a device value.

    >>> bool(all_finite(torch.ones(3))), bool(all_finite(torch.tensor([1.0, torch.nan, 2.0])))
    (True, False)
    """
    least, greatest = torch.aminmax(tensor.detach())
    return torch.isfinite(least) & torch.isfinite(greatest)


def broken_fields(batches: Sequence[Batch]) -> list[str]:
    """The tensors of microbatches that hold a number that is not finite."""
    return [
        f"{name} of microbatch {number}"
        for number, batch in enumerate(batches)
        for name, tensor in batch.tensors().items()
        if tensor.is_floating_point() and not bool(all_finite(tensor))
    ]


class BrokenTensor(NamedTuple):
    """In words. stays: it is in weights or moments, so that leaving a batch out does not heal it."""

    words: str
    stays: bool = False


def first_broken(reports: Sequence[Mapping[str, Sequence[object]]]) -> BrokenTensor | None:
    """Rank and tensor, from what each rank has found: "state", "batch": names; "outputs", "gradients": places;
    "reduced": names of reduced gradients. None where nothing was found.

    >>> quiet = {"state": [], "batch": [], "outputs": [], "gradients": [], "reduced": []}
    >>> spread = {**quiet, "outputs": [(0, 3, "layers.2")], "gradients": [(0, 3, "layers.2.q")]}
    >>> first = {**spread, "outputs": [(0, 2, "layers.1"), (0, 3, "layers.2")]}
    >>> first_broken([quiet, spread, first]).words
    'the output of layers.1 (rank 2) holds numbers that are not finite'
    """
    for kind, words in (("state", ""), ("batch", "the batch's ")):
        names = [[str(name) for name in one[kind]] for one in reports]
        named = [(name.startswith("weights/"), rank, name) for rank, held in enumerate(names) for name in held]
        if named:
            _, rank, name = min(named)
            others = len(names[rank]) - 1
            more = f" and {others} more tensors hold" if others else " holds"
            return BrokenTensor(f"{words}{name} (rank {rank}){more} numbers that are not finite", stays=kind == "state")
    for kind, words, first in (("outputs", "output", min), ("gradients", "own gradient", max)):
        points = [(ProbePoint(*cast(ProbePoint, at)), rank) for rank, one in enumerate(reports) for at in one[kind]]
        if points:
            stage, unit, _ = first(point for point, _ in points)
            there = sorted((rank, point.name) for point, rank in points if point[:2] == (stage, unit))
            return _sentence(words, there[0][1], [rank for rank, name in there if name == there[0][1]])
    reduced = sorted((str(name), rank) for rank, one in enumerate(reports) for name in one["reduced"])
    if reduced:
        return _sentence("reduced gradient", reduced[0][0], [rank for name, rank in reduced if name == reduced[0][0]])
    return None


def _sentence(what: str, name: str, ranks: Sequence[int]) -> BrokenTensor:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return BrokenTensor(f"the {what} of {name} ({who}) holds numbers that are not finite")
