"""What a run is at one moment: stages, gradients, optimizer, and how far it has come. And its form on disk.

`pieces` lists everything that must be kept as rectangles of logical tensors, so a checkpoint of one layout is read
by any other. Dropout and initial values are functions of the seed, so no random state exists to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from mega.core.checkpoint.own.pieces import Piece
from mega.core.checkpoint.own.together import JsonExchange
from mega.core.config.run import RunConfig
from mega.core.device import Device, HostCopy
from mega.core.model.experts import ExpertLoad
from mega.core.optim.optimizer import Optimizer
from mega.core.optim.scaler import LossScaler
from mega.core.parallel.collectives import gather_json
from mega.core.parallel.gradients import Bucket, GradBuffer
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.pipeline import Pipeline
from mega.core.parallel.weight import weights
from mega.core.training.policy import GuardMemory
from mega.core.training.probes import Damage, Probes, all_finite


@dataclass
class Progress:
    """How far the run has come, in the units that decide what comes next."""

    step: int = 0
    consumed: int = 0
    """Training samples consumed: the data position."""
    consumed_valid: int = 0
    skipped: int = 0
    skipped_samples: int = 0
    """Samples of skipped steps, which the learning rate's schedule does not count."""

    @classmethod
    def from_meta(cls, progress: Mapping[str, float]) -> Progress:
        """From a checkpoint's meta["progress"], also of one that was written when the last field had another name.

        >>> Progress.from_meta({"step": 7, "consumed": 28, "unscheduled": 4}).skipped_samples
        4
        """
        return cls(
            **{"skipped_samples" if key == "unscheduled" else key: int(value) for key, value in progress.items()}
        )


@dataclass(frozen=True)
class StepOptions:
    """schedule, chunks: the plan's. normalizer: what losses are divided by, the "global" batch's weights or each
    "microbatch"'s own. params_norm, zeros: whether a step reports them. guarded: whether batches are left out for what
    a step finds, as if they had not been drawn. mixtures: number of each layer with experts -> how many it has.
    """

    schedule: str
    chunks: int = 1
    normalizer: str = "global"
    params_norm: bool = False
    zeros: bool = False
    guarded: bool = False
    mixtures: Mapping[int, int] = field(default_factory=dict)


@dataclass
class TrainState:
    """Everything of one rank that a step reads or changes.

    run: the config that it was built from, which checkpoints keep; a step does not read it. stages: this rank's chunks
    of the model, each a `ModelStage`. copy: what is being copied for a save; a step settles it before it changes
    anything.
    """

    run: RunConfig
    mesh: Mesh
    device: Device
    stages: list[Any]
    grads: GradBuffer
    optimizer: Optimizer
    pipeline: Pipeline
    scaler: LossScaler | None
    options: StepOptions
    progress: Progress = field(default_factory=Progress)
    guard: GuardMemory = field(default_factory=GuardMemory)
    probes: Probes | None = None
    """What tells where a step was broken first; None where a state is not trained by a run."""
    injector: Damage | None = None
    """What damages this rank on purpose."""
    copy: HostCopy | None = None
    load: ExpertLoad | None = None
    """Of the experts in the last step, where the model has any."""
    reference: str | None = None
    """What tells the weights that training began with from all others, where its loss needs them (dpo.py)."""
    base: Mapping[str, str] | None = None
    """Where the weights lie that are not trained (checkpoint/own/base.py): checkpoints name it instead of them."""

    @cached_property
    def coefficients(self) -> torch.Tensor | None:
        """float64 [terms], what their means are multiplied by in the loss; None where all are 1."""
        terms: Mapping[str, float] = self.stages[0].terms
        if all(coefficient == 1 for coefficient in terms.values()):
            return None
        return torch.tensor(list(terms.values()), dtype=torch.float64, device=self.device.torch)

    @property
    def exchange(self) -> JsonExchange:
        """Plain JSON values of all ranks, for what is done together."""
        return partial(gather_json, axis=self.mesh.everyone, device=self.device.torch)

    def train(self, mode: bool = True) -> None:
        nn.ModuleList(self.stages).train(mode)

    @property
    def dropout_rule(self) -> int:
        """How dropout is decided: of ops/counter.py. A run keeps the one that it began under."""
        return int(self.stages[0].options.dropout_rule)

    @dropout_rule.setter
    def dropout_rule(self, rule: int) -> None:
        for stage in self.stages:
            stage.options = replace(stage.options, dropout_rule=rule)

    # -- is it sound

    def flats(self) -> Iterator[torch.Tensor]:
        """All weights and optimizer state that this rank holds, flat; what several hold is on each of them."""
        for bucket in self.grads.buckets:
            yield bucket.own_weights if self.grads.zero else bucket.weights
        for owned in self.optimizer.shards:
            yield from (tensor for tensor in owned.tensors() if tensor.numel())

    def sound(self) -> torch.Tensor:
        """bool [], whether everything here that an update reads is finite, but for the gradients that the norm counts;
        a device value."""
        uncounted = (bucket.own_grads for bucket in self.grads.buckets if not bucket.counted)
        flats = [flat for flat in (*self.flats(), *uncounted) if flat.numel()]
        return torch.stack([all_finite(flat).to(self.device.torch) for flat in flats]).all()

    # -- on disk

    def weight_pieces(self, *, mine: bool) -> Iterator[Piece]:
        """This rank's trained weights; with `mine`, only those that it writes (each element of the model once)."""
        yield from self._counted_pieces(mine=mine)
        for number, bucket in enumerate(self.grads.buckets):
            # Under zero 3 no rank holds more than the span; under 1 and 2 the rest may still be on its way.
            if self.grads.zero >= 3 or (self.grads.zero and mine):
                if not mine or bucket.counted:
                    yield from _pieces("weights", bucket, bucket.own_weights, bucket.span[0])
            elif not mine or (bucket.counted and _our_turn(number, bucket)):
                yield from _pieces("weights", bucket, bucket.weights, 0)

    def _counted_pieces(self, *, mine: bool) -> Iterator[Piece]:
        """What steps set by counting. All ranks of a stage hold the same."""
        if mine and not self.mesh.stage.first:
            return
        for weight in (weight for stage in self.stages for weight in weights(stage)):
            for segment in weight.segments:
                shard = segment.shard
                if shard.tensor.counted and shard.tensor.trainable:
                    yield Piece(f"weights/{shard.name}", shard.whole, shard.start, segment.real(weight.data))

    def frozen_pieces(self) -> Iterator[Piece]:
        """This rank's weights that are not trained. They lie whole, in no bucket."""
        for stage in self.stages:
            for weight in weights(stage):
                for segment in weight.segments:
                    shard = segment.shard
                    if shard.tensor.trainable:
                        continue
                    yield Piece(f"weights/{shard.name}", shard.whole, shard.start, segment.real(weight.data))

    def optimizer_pieces(self, *, mine: bool) -> Iterator[Piece]:
        """Masters (where they say more than weights), moments and factors of this rank's spans."""
        for number, owned in enumerate(self.optimizer.shards):
            bucket = owned.bucket
            if mine and not bucket.counted:
                continue
            if not mine or (_our_turn(number, bucket) and bucket.data.parts.first):  # all ranks of the stage have them
                for key, factor in owned.factors.items():
                    yield Piece(key, tuple(factor.shape), (0,), factor)
            if mine and not self.grads.zero and not _our_turn(number, bucket):
                continue
            if owned.has_master:
                assert owned.master is not None
                yield from _pieces("master", bucket, owned.master, bucket.span[0])
            for kind, flat in owned.moments.items():
                yield from _pieces(kind, bucket, flat.values, flat.begin)

    def gradient_pieces(self) -> Iterator[Piece]:
        """Reduced gradients of this rank's spans, for comparing layouts."""
        for bucket in self.grads.buckets:
            yield from _pieces("grads", bucket, bucket.own_grads, bucket.span[0])


def _our_turn(number: int, bucket: Bucket) -> bool:
    """Whether this rank writes what all ranks of the bucket's data axis hold of it. number: the bucket's."""
    return number % bucket.data.axis.size == bucket.data.axis.index


def _pieces(kind: str, bucket: Bucket, flat: torch.Tensor, base: int) -> Iterator[Piece]:
    """`flat`, whose first element is number `base` of the bucket, as rectangles of logical tensors."""
    for shard, origin, view in bucket.rectangles(flat, base):
        yield Piece(f"{kind}/{shard.name}", shard.whole, origin, view)
