"""Find the rank and the tensor in which a NaN or infinity appeared first.

Every step records on the device, without waiting for the device:

    outputs      for each unit (embedding, layer) of this rank's stages, the sum of its output
    gradients    for each weight, the norm of this rank's own gradient, before it is reduced over ranks
    computed     the time at which the gradients were computed, to compare ranks (stragglers.py)

A NaN spreads to later layers, to tensor ranks with the next exchange, and to all replicas with the gradient reduction.
The origin of a NaN is the first unit, in the order of the model, whose output is not finite, on the rank that reports
this output. If all outputs are finite, the origin is the last unit in this order whose gradient is not finite. Weights,
masters, moments and the batch are checked first, because they still exist (guards/finite.py). This module does not
depend on the training state.
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
    """A unit or weight, with its position in the order of the model."""

    stage: int
    """Index of the stage among the stages of all ranks and chunks."""
    unit: int
    """Index of the unit in its stage."""
    name: str
    """Name of the unit, or the names of the weight's tensors."""


class Probes:
    """Records output sums and gradient norms on one rank. `sums` has one element per unit, then one per weight."""

    def __init__(self, stages: Sequence[nn.Module], grads: GradBuffer, mesh: Mesh, device: torch.device):
        units = list(_units(stages, mesh))
        self.outputs, self.gradients = [point for point, _ in units], list[ProbePoint]()
        weight_points: dict[int, ProbePoint] = {}
        for point, unit in units:
            for weight in weights(unit):
                weight_points.setdefault(id(weight), point)
        self._offsets: dict[int, int] = {}
        for bucket in grads.buckets:
            self._offsets[id(bucket)] = len(units) + len(self.gradients)
            for weight, _, _ in bucket.offsets:
                point = weight_points.get(id(weight), ProbePoint(mesh.pp.index, 0, ""))
                names = [segment.shard.name for segment in weight.segments]
                self.gradients.append(ProbePoint(point.stage, point.unit, ", ".join(names)))
        self.sums = torch.zeros(len(units) + len(self.gradients), device=device)
        for number, (_, unit) in enumerate(units):
            unit.register_forward_hook(_Output(self.sums[number]))
        grads.before_reduce = self._gradient
        self.batch: torch.Tensor
        """bool [], whether the loss weights of the latest step's batch are finite."""
        self.computed: tuple[Timestamp, float] | None = None
        """The time at which the gradients of the latest step were complete, and the rank's working time until this
        time."""

    def start(self) -> None:
        """Reset the sums at the start of a step."""
        self.sums.zero_()

    def end(self, factors: torch.Tensor) -> None:
        """Record the end of the backward pass, before all gradients are reduced.

        factors: factors of the losses, which are 0 if the loss weights are infinite. The factors are checked because
        otherwise a stage without a loss would not detect infinite loss weights.
        """
        self.batch = (torch.isfinite(factors) & (factors > 0)).all()
        self.computed = Timestamp(self.sums.device), ACTIVITY.worked()

    def _gradient(self, bucket: Bucket) -> None:
        assert bucket.grads is not None
        norms = torch._foreach_norm([bucket.grads[begin:end] for _, begin, end in bucket.offsets])
        first = self._offsets[id(bucket)]
        self.sums[first : first + len(norms)] += torch.stack(norms)

    def broken(self, sums: Sequence[float]) -> dict[str, list[ProbePoint]]:
        """Return the units and weights whose sums are not finite. sums: `self.sums` after a step."""
        bad = [not (abs(value) < float("inf")) for value in sums]
        outputs = [place for place, is_bad in zip(self.outputs, bad, strict=False) if is_bad]
        gradients = [place for place, is_bad in zip(self.gradients, bad[len(self.outputs) :], strict=True) if is_bad]
        return {"outputs": outputs, "gradients": gradients}


class Damage(Protocol):
    """Injects faults for tests, in steps and saves (guards/inject.py)."""

    def before_step(self, step: int, batches: Sequence[Batch]) -> list[Batch]: ...
    def after_backward(self) -> None: ...
    def before_save(self, step: int) -> None: ...


class _Output:
    """A forward hook that adds the sum of the output of a model unit (such as a layer) to `total`. The hook can be
    captured in a CUDA graph."""

    def __init__(self, total: torch.Tensor):
        self._total = total

    def __call__(self, module: nn.Module, _: object, output: object) -> None:
        if module.training:
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                    self._total.add_(tensor.detach().sum(dtype=torch.float32))


def _units(stages: Sequence[nn.Module], mesh: Mesh) -> Iterator[tuple[ProbePoint, nn.Module]]:
    """Yield the units of the model (embedding, layers, head) in this rank's stages. A layer is named by the common
    prefix of its tensors' names; other units (the embedding, the head) are named by their attribute in the stage."""
    for chunk, stage in enumerate(stages):
        ends = {id(child): f"the {name}" for name, child in stage.named_children()}
        for number, unit in enumerate(units_of(stage)):
            names = [segment.shard.name.replace(".", "/") for weight in weights(unit) for segment in weight.segments]
            name = ends.get(id(unit)) or os.path.commonpath(names).replace("/", ".")
            yield ProbePoint(chunk * mesh.pp.size + mesh.pp.index, number, name), unit


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether every element of a non-empty tensor is finite, as a device value.

    >>> bool(all_finite(torch.ones(3))), bool(all_finite(torch.tensor([1.0, torch.nan, 2.0])))
    (True, False)
    """
    least, greatest = torch.aminmax(tensor.detach())
    return torch.isfinite(least) & torch.isfinite(greatest)


def broken_fields(batches: Sequence[Batch]) -> list[str]:
    """Return the names of the tensors of microbatches that contain a NaN or an infinity."""
    return [
        f"{name} of microbatch {number}"
        for number, batch in enumerate(batches)
        for name, tensor in batch.tensors().items()
        if tensor.is_floating_point() and not bool(all_finite(tensor))
    ]


class BrokenTensor(NamedTuple):
    """The origin of non-finite values. words: the description for messages. stays: whether these values are in weights
    or moments, so that skipping the batch does not remove them."""

    words: str
    stays: bool = False


def first_broken(reports: Sequence[Mapping[str, Sequence[object]]]) -> BrokenTensor | None:
    """Return the origin, given the reports of all ranks; None if the reports are empty.

    A report has names of tensors under "state" and "batch", points under "outputs" and "gradients", and names of
    reduced gradients under "reduced".

    >>> quiet = {"state": [], "batch": [], "outputs": [], "gradients": [], "reduced": []}
    >>> spread = {**quiet, "outputs": [(0, 3, "layers.2")], "gradients": [(0, 3, "layers.2.q")]}
    >>> first = {**spread, "outputs": [(0, 2, "layers.1"), (0, 3, "layers.2")]}
    >>> first_broken([quiet, spread, first]).words
    'the output of layers.1 (rank 2) holds numbers that are not finite'
    """
    for kind, words in (("state", ""), ("batch", "the batch's ")):
        names = [[str(name) for name in one[kind]] for one in reports]
        # Masters and moments are sorted before weights, because an update computes weights from them.
        candidates = [(name.startswith("weights/"), rank, name) for rank, broken in enumerate(names) for name in broken]
        if candidates:
            _, rank, name = min(candidates)
            count = len(names[rank]) - 1
            verb = f" and {count} more tensors hold" if count else " holds"
            return BrokenTensor(f"{words}{name} (rank {rank}){verb} numbers that are not finite", stays=kind == "state")
    for kind, words, first in (("outputs", "output", min), ("gradients", "own gradient", max)):
        points = [(ProbePoint(*cast(ProbePoint, each)), rank) for rank, one in enumerate(reports) for each in one[kind]]
        if points:
            stage, unit, _ = first(point for point, _ in points)
            origins = sorted((rank, point.name) for point, rank in points if point[:2] == (stage, unit))
            return _sentence(words, origins[0][1], [rank for rank, name in origins if name == origins[0][1]])
    reduced = sorted((str(name), rank) for rank, one in enumerate(reports) for name in one["reduced"])
    if reduced:
        return _sentence("reduced gradient", reduced[0][0], [rank for name, rank in reduced if name == reduced[0][0]])
    return None


def _sentence(what: str, name: str, ranks: Sequence[int]) -> BrokenTensor:
    rank_names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return BrokenTensor(f"the {what} of {name} ({rank_names}) holds numbers that are not finite")
