"""The state of a run on one rank: stages, gradients, optimizer and progress, and the representation of this state on
disk.

The `..._pieces` methods list all saved state as rectangles of logical tensors, so any layout can read the checkpoint of
any other layout. Dropout and initial values are functions of the seed, so checkpoints need no random state.
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
    """The progress of a run, which determines the next batch and the next learning rate."""

    step: int = 0
    consumed: int = 0
    """Number of training samples consumed, which is the data position."""
    consumed_valid: int = 0
    """Number of validation samples consumed."""
    skipped: int = 0
    """Number of skipped steps."""
    skipped_samples: int = 0
    """Number of samples in skipped steps, which the learning rate's schedule does not count."""

    @classmethod
    def from_meta(cls, progress: Mapping[str, float]) -> Progress:
        """Return the progress from meta["progress"] of a checkpoint. Old checkpoints have a different name for the last
        field.

        >>> Progress.from_meta({"step": 7, "consumed": 28, "unscheduled": 4}).skipped_samples
        4
        """
        return cls(
            **{"skipped_samples" if key == "unscheduled" else key: int(value) for key, value in progress.items()}
        )


@dataclass(frozen=True)
class StepOptions:
    """The options of a step."""

    schedule: str
    """Name of the pipeline schedule."""
    chunks: int = 1
    """Number of model chunks per rank."""
    normalizer: str = "global"
    """"global": divide losses by the loss weight of the global batch; "microbatch": by the loss weight of each
    microbatch."""
    params_norm: bool = False
    """Whether a step reports the norm of the weights."""
    zeros: bool = False
    """Whether a step reports the fraction of gradients that are zero."""
    guarded: bool = False
    """Whether the guards may skip batches, which then must not affect the state."""
    mixtures: Mapping[int, int] = field(default_factory=dict)
    """Index of each layer with experts -> number of experts in the layer."""


@dataclass
class TrainState:
    """Everything on one rank that a step reads or changes."""

    run: RunConfig
    """The config of the run. Checkpoints store the config; steps do not read it."""
    mesh: Mesh
    device: Device
    stages: list[Any]
    """This rank's chunks of the model, each a `ModelStage`."""
    grads: GradBuffer
    optimizer: Optimizer
    pipeline: Pipeline
    scaler: LossScaler | None
    options: StepOptions
    progress: Progress = field(default_factory=Progress)
    guard: GuardMemory = field(default_factory=GuardMemory)
    probes: Probes | None = None
    """Finds the origin of a NaN; None if the state does not belong to a training run."""
    injector: Damage | None = None
    """Injects faults on this rank, for tests."""
    copy: HostCopy | None = None
    """The host copy for a save in progress. A step waits for the copy before it changes any tensor."""
    load: ExpertLoad | None = None
    """Load of the experts in the latest step; None if the model has no experts."""
    reference: str | None = None
    """A digest of the initial weights, if the loss needs these weights (dpo.py)."""
    base: Mapping[str, str] | None = None
    """The location of the frozen weights (checkpoint/own/base.py). Checkpoints store this location instead of the
    weights."""

    @cached_property
    def coefficients(self) -> torch.Tensor | None:
        """float64 [terms], the coefficients of the terms' means in the loss; None if all are 1."""
        terms: Mapping[str, float] = self.stages[0].terms
        if all(coefficient == 1 for coefficient in terms.values()):
            return None
        return torch.tensor(list(terms.values()), dtype=torch.float64, device=self.device.torch)

    @property
    def exchange(self) -> JsonExchange:
        """A function that gathers a JSON value from all ranks."""
        return partial(gather_json, axis=self.mesh.everyone, device=self.device.torch)

    def train(self, mode: bool = True) -> None:
        nn.ModuleList(self.stages).train(mode)

    @property
    def dropout_rule(self) -> int:
        """The version of the dropout rule (ops/counter.py). A run keeps the rule with which it started."""
        return int(self.stages[0].options.dropout_rule)

    @dropout_rule.setter
    def dropout_rule(self, rule: int) -> None:
        for stage in self.stages:
            stage.options = replace(stage.options, dropout_rule=rule)

    @property
    def overlaps(self) -> bool:
        """Whether tensor ranks exchange tokens while they compute GEMMs. This affects rounding, so a resumed run keeps
        the value."""
        return self.stages[0].region.transport is not None

    # -- checks

    def flats(self) -> Iterator[torch.Tensor]:
        """Yield all weights and optimizer state of this rank as flat tensors, including replicas of other ranks'
        tensors."""
        for bucket in self.grads.buckets:
            yield bucket.own_weights if self.grads.zero else bucket.weights
        for owned in self.optimizer.shards:
            yield from (tensor for tensor in owned.tensors() if tensor.numel())

    def sound(self) -> torch.Tensor:
        """Return a device value, bool []: whether all tensors of this rank that an update reads are finite, except
        gradients that the gradient norm already includes."""
        uncounted = (bucket.own_grads for bucket in self.grads.buckets if not bucket.counted)
        flats = [flat for flat in (*self.flats(), *uncounted) if flat.numel()]
        return torch.stack([all_finite(flat).to(self.device.torch) for flat in flats]).all()

    # -- the state on disk

    def weight_pieces(self, *, mine: bool) -> Iterator[Piece]:
        """Yield this rank's trained weights. mine: yield only the weights that this rank writes to a checkpoint,
        because each element is written by one rank."""
        yield from self._counted_pieces(mine=mine)
        for number, bucket in enumerate(self.grads.buckets):
            # With ZeRO 3 a rank holds only its span; with ZeRO 1 and 2 the other spans may still be in flight.
            if self.grads.zero >= 3 or (self.grads.zero and mine):
                if not mine or bucket.counted:
                    yield from _pieces("weights", bucket, bucket.own_weights, bucket.span[0])
            elif not mine or (bucket.counted and _our_turn(number, bucket)):
                yield from _pieces("weights", bucket, bucket.weights, 0)

    def _counted_pieces(self, *, mine: bool) -> Iterator[Piece]:
        """Yield the weights that are computed from token counts (the experts' biases). They are identical on all ranks
        of a stage."""
        if mine and not self.mesh.stage.first:
            return
        for weight in (weight for stage in self.stages for weight in weights(stage)):
            for segment in weight.segments:
                shard = segment.shard
                if shard.tensor.counted and shard.tensor.trainable:
                    yield Piece(f"weights/{shard.name}", shard.whole, shard.start, segment.real(weight.data))

    def frozen_pieces(self) -> Iterator[Piece]:
        """Yield this rank's frozen weights, which are neither in buckets nor sharded by ZeRO."""
        for stage in self.stages:
            for weight in weights(stage):
                for segment in weight.segments:
                    shard = segment.shard
                    if shard.tensor.trainable:
                        continue
                    yield Piece(f"weights/{shard.name}", shard.whole, shard.start, segment.real(weight.data))

    def optimizer_pieces(self, *, mine: bool) -> Iterator[Piece]:
        """Yield masters (if they are more precise than the weights), moments and factors of this rank's spans."""
        for number, owned in enumerate(self.optimizer.shards):
            bucket = owned.bucket
            if mine and not bucket.counted:
                continue
            # Factors are whole vectors that are identical on all ranks of the stage, so one rank writes them.
            if not mine or (_our_turn(number, bucket) and bucket.data.parts.first):
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
        """Yield the reduced gradients of this rank's spans, for comparing layouts."""
        for bucket in self.grads.buckets:
            yield from _pieces("grads", bucket, bucket.own_grads, bucket.span[0])


def _our_turn(number: int, bucket: Bucket) -> bool:
    """Whether this rank writes bucket `number`, of which all ranks of its data axis hold replicas."""
    return number % bucket.data.axis.size == bucket.data.axis.index


def _pieces(kind: str, bucket: Bucket, flat: torch.Tensor, base: int) -> Iterator[Piece]:
    """Divide `flat` into rectangles of logical tensors. base: offset of the first element of `flat` in the bucket."""
    for shard, origin, view in bucket.rectangles(flat, base):
        yield Piece(f"{kind}/{shard.name}", shard.whole, origin, view)
