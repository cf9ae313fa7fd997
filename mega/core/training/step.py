"""One optimizer step: forward and backward over the microbatches, reductions, update. Told as numbered phases.

0 rows are cut over the context axis
1 weight of the global batch   known before the first backward, so that losses divide by it exactly once
2 the pipeline plays its plan  ready buckets leave while it runs
3 gradients become whole
4 the update
5 the loss of the global batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mega.core.batch import DecoderBatch
from mega.core.device import Reading
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.context import cut
from mega.core.plan import plan
from mega.core.training.state import TrainState

LEAST_WEIGHT = 1e-30
"""What losses are divided by, at the least: a batch may be of prompts alone."""


@dataclass(frozen=True)
class Report:
    """What a step did, as device values: nobody waits for them until they are read.

    loss: mean over the global batch's weighted tokens. grad_norm: before clipping. fine: 0 if skipped.
    scale: the loss scale that was in force. params_norm, zeros: of the weights behind the update, and the share of zero
    gradients, where the run asks for them.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    fine: torch.Tensor
    scale: torch.Tensor | None = None
    params_norm: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    def start_reading(self) -> Reading:
        """All that there is, on its way to the host by the names that metrics have."""
        always = {"loss": self.loss, "grad_norm": self.grad_norm, "fine": self.fine}
        asked = {"loss_scale": self.scale, "params_norm": self.params_norm, "zeros": self.zeros}
        return Reading(always | {name: value for name, value in asked.items() if value is not None})


def train_step(state: TrainState, batches: Sequence[DecoderBatch], lr: float, decay: float) -> Report:
    """One step over this data coordinate's microbatches; every rank of the mesh takes part."""
    sums = backward(state, batches)
    # 4
    if state.copy is not None:
        state.copy.settle()
    scaler = state.scaler
    outcome = state.optimizer.step(lr, decay, None if scaler is None else scaler.scale)
    scale = None if scaler is None else scaler.scale
    if scaler is not None:
        scaler.update(outcome.fine)
    # 5
    log = state.run.log
    return Report(
        mean_loss(state, sums),
        outcome.grad_norm,
        outcome.fine,
        scale,
        params_norm=_params_norm(state) if log.log_params_norm else None,
        zeros=_share_of_zeros(state) if log.log_zeros else None,
    )


def backward(state: TrainState, batches: Sequence[DecoderBatch]) -> torch.Tensor:
    """Phases 0 to 3: gradients of the global loss in `state.grads`; returns this rank's loss sums."""
    run, mesh = state.run, state.mesh
    state.train()
    state.grads.start()
    # 0
    batches = [cut(batch, mesh.cp) for batch in batches]
    # 1
    scales = _scales(run.batch.loss_normalizer, batches, state)
    if state.scaler is not None:
        scales = [scale * state.scaler.scale for scale in scales]
    # 2
    assert run.parallel.schedule is not None
    schedule = plan(run.parallel.schedule, mesh.pp.size, run.parallel.chunks, len(batches))
    sums = state.pipeline.run(schedule, batches, scales, state.grads)
    # 3
    state.grads.finish()
    return sums


def _scales(normalizer: str, batches: Sequence[DecoderBatch], state: TrainState) -> list[torch.Tensor]:
    """What each microbatch's summed loss is multiplied by."""
    own = torch.stack([batch.loss_weights.double().sum() for batch in batches])
    if normalizer == "microbatch":
        all_reduce(own, state.mesh.cp)
        return list(1.0 / (own.clamp(min=LEAST_WEIGHT) * len(batches) * state.mesh.dp.size))
    total = own.sum()
    all_reduce(total, state.mesh.data)
    return [1.0 / total.clamp(min=LEAST_WEIGHT)] * len(batches)


def _params_norm(state: TrainState) -> torch.Tensor:
    squares = state.grads.square_sum(weights=True)
    all_reduce(squares, state.grads.norm_axis)
    return squares.sqrt()


def _share_of_zeros(state: TrainState) -> torch.Tensor:
    counts = state.grads.zeros()
    all_reduce(counts, state.grads.norm_axis)
    return counts[0] / counts[1]


def evaluate_step(state: TrainState, batches: Sequence[DecoderBatch]) -> torch.Tensor:
    """[sum of weight x loss, sum of weight] of the global batch, without gradients or dropout."""
    state.train(False)
    batches = [cut(batch, state.mesh.cp) for batch in batches]
    schedule = plan("forward", state.mesh.pp.size, state.run.parallel.chunks, len(batches))
    sums = state.pipeline.run(schedule, batches)
    all_reduce(sums, state.mesh.reports)
    return sums


def mean_loss(state: TrainState, sums: torch.Tensor) -> torch.Tensor:
    """Loss of the global batch from the ranks' sums; 0 where no token of it counts."""
    all_reduce(sums, state.mesh.reports)
    return sums[0] / sums[1].clamp(min=LEAST_WEIGHT)
