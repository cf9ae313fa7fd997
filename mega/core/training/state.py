"""What a run is at one moment: stages, gradients, optimizer, and how far it has come. And its form on disk.

`pieces` lists everything that must be kept as rectangles of logical tensors, so a checkpoint of one layout is read
by any other. Dropout and initial values are functions of the seed, so no random state exists to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from mega.core.checkpoint.pieces import Piece
from mega.core.config.run import RunConfig
from mega.core.device import DTYPES, Device, HostCopy
from mega.core.model.decoder import DecoderStage
from mega.core.optim.adam import AdamW
from mega.core.optim.optimizer import Optimizer
from mega.core.optim.scaler import LossScaler
from mega.core.parallel.gradients import GradBuffer
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.pipeline import Pipeline
from mega.core.parallel.weight import Weight
from mega.core.shard import span_rectangles
from mega.core.training.build import build_stages, chosen_ops


@dataclass
class Progress:
    """How far the run has come, in the units that decide what comes next."""

    step: int = 0
    consumed: int = 0
    """Training samples consumed: the data position."""
    consumed_valid: int = 0
    skipped: int = 0
    unscheduled: int = 0
    """Samples of skipped steps, which the learning rate's schedule does not count."""


class TrainState:
    """Everything of one rank that a step reads or changes."""

    def __init__(self, run: RunConfig, mesh: Mesh, device: Device):
        self.run, self.mesh, self.device = run, mesh, device
        self.progress = Progress()
        self.stages: list[DecoderStage] = build_stages(run, mesh, device.torch)
        grad_dtype = run.precision.grad_dtype
        assert grad_dtype is not None
        self.grads = GradBuffer(
            self.stages,
            mesh,
            dtype=DTYPES[grad_dtype],
            sequence=run.parallel.sequence_parallel,
            zero=run.parallel.zero,
            bucket_size=run.parallel.bucket_size,
            overlap=run.parallel.overlap_grad_reduce,
            overlap_gather=run.parallel.overlap_param_gather,
        )
        if run.parallel.zero >= 3:
            for stage in self.stages:
                stage.around = self.grads.around
        options = run.optimizer
        rule = AdamW(options.adam_beta1, options.adam_beta2, options.adam_eps)
        self.optimizer = Optimizer(self.grads, rule, options.clip_grad, chosen_ops(run, device.torch))
        self.scaler = _scaler(run, device.torch)
        self.pipeline = Pipeline(self.stages, mesh, device.torch)
        self.copy: HostCopy | None = None
        """What is being copied for a save; a step settles it before it changes anything."""

    def train(self, mode: bool = True) -> None:
        nn.ModuleList(self.stages).train(mode)

    # -- on disk

    def weight_pieces(self, *, mine: bool) -> Iterator[Piece]:
        """This rank's weights; with `mine`, only those that it writes (each element of the model once)."""
        for number, bucket in enumerate(self.grads.buckets):
            low, high = bucket.span
            for weight, begin, end in bucket.places:
                if self.grads.zero >= 3:  # nobody holds more than the span
                    if not mine or bucket.counted:
                        yield from _pieces(
                            "weights", weight, bucket.own_weights, low, max(begin, low), min(end, high), begin
                        )
                elif not mine or (bucket.counted and number % self.mesh.data.size == self.mesh.data.index):
                    yield from _pieces("weights", weight, bucket.weights, 0, begin, end)

    def optimizer_pieces(self, *, mine: bool) -> Iterator[Piece]:
        """Masters (where there are any) and moments of this rank's spans."""
        for number, owned in enumerate(self.optimizer.owned):
            bucket, (low, high) = owned.bucket, owned.bucket.span
            if mine and not bucket.counted:
                continue
            if mine and not self.grads.zero and number % self.mesh.data.size != self.mesh.data.index:
                continue
            state = {"moment1": owned.moment1, "moment2": owned.moment2}
            if owned.has_master:
                state["master"] = owned.master
            for weight, begin, end in bucket.places:
                for kind, flat in state.items():
                    yield from _pieces(kind, weight, flat, low, max(begin, low), min(end, high), begin)

    def gradient_pieces(self) -> Iterator[Piece]:
        """Reduced gradients of this rank's spans, for comparing layouts."""
        for bucket in self.grads.buckets:
            low, high = bucket.span
            for weight, begin, end in bucket.places:
                yield from _pieces("grads", weight, bucket.own_grads, low, max(begin, low), min(end, high), begin)


def _pieces(
    kind: str, weight: Weight, flat: torch.Tensor, base: int, begin: int, end: int, home: int | None = None
) -> Iterator[Piece]:
    """Elements [begin, end) of a bucket that lie in `weight`, as rectangles of its logical tensors.

    `weight` begins at element `home` of the bucket. flat[0] is element `base` of the bucket. Padding is left out.
    """
    home = begin if home is None else home
    row = weight.numel() // weight.shape[0]
    for slot in weight.slots:
        shard = slot.shard
        first = home + slot.offset * row
        low, high = max(begin, first), min(end, first + shard.elements)
        for start, size in span_rectangles(shard.local, low - first, high - first):
            real = tuple(max(0, min(n, have - at)) for at, n, have in zip(start, size, shard.size, strict=True))
            if not all(real):
                continue
            offset = first - base + start[0] * row + (start[1] if len(start) > 1 else 0)
            view = flat[offset : offset + prod(size)].view(size)
            for dim, length in enumerate(real):
                view = view.narrow(dim, 0, length)
            origin = tuple(a + b for a, b in zip(shard.start, start, strict=True))
            yield Piece(f"{kind}/{shard.name}", shard.whole, origin, view)


def _scaler(run: RunConfig, device: torch.device) -> LossScaler | None:
    """fp16 needs a loss scale that follows its overflows; a constant one may be asked for in any precision."""
    options = run.precision
    if options.loss_scale is not None:
        return LossScaler(initial=options.loss_scale, window=None, device=device)
    if options.dtype != "fp16":
        return None
    return LossScaler(
        initial=options.initial_loss_scale,
        window=options.loss_scale_window,
        hysteresis=options.hysteresis,
        least=options.min_loss_scale,
        device=device,
    )
