"""One optimizer step: forward and backward over the microbatches, reductions, update. Numbered phases.

0 rows are cut over the context axis
1 weight of the global batch   known before the first backward, so that losses divide by it exactly once
2 the pipeline plays its plan  ready buckets leave while it runs
3 gradients become whole
4 their norm, unless weights or moments are broken
5 the loss of the global batch, and whether any rank has found something wrong
6 the update, where all is sound
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mega.core.batch import Batch
from mega.core.device import Reading
from mega.core.model.experts import ExpertLoad
from mega.core.parallel.bucket_sums import count_zeros, square_sum
from mega.core.parallel.collectives import all_reduce
from mega.core.plan import Plan, plan
from mega.core.training.policy import NO_LIMITS, SpikeLimits
from mega.core.training.routing import balance, finish_counting, start_counting
from mega.core.training.state import TrainState

SOUND_EVERY = 10
"""Steps of a GPU between two looks at weights and moments."""

LEAST_WEIGHT = 1e-30
"""What losses are divided by, at the least: a batch may be of prompts alone."""


@dataclass(frozen=True)
class StepReport:
    """What a step did, as device values: the host does not wait for them until they are read.

    loss: of the global batch. means: of each term and metric, by name. grad_norm: before clipping. finite: 0 if the
    update was skipped. scale: the loss scale that was in force. params_norm, zeros: of the weights after the update,
    and the share of zero gradients, where the run asks for them. tied: of the optimizer's `GradNorm`. load: of a model
    with experts. broken: whether gradients, weights or moments of any rank are not finite. sums: of `Probes`.
    """

    loss: torch.Tensor
    means: Mapping[str, torch.Tensor]
    grad_norm: torch.Tensor
    finite: torch.Tensor
    scale: torch.Tensor | None = None
    params_norm: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    tied: torch.Tensor | None = None
    load: ExpertLoad | None = None
    broken: torch.Tensor | None = None
    sums: torch.Tensor | None = None

    def start_reading(self) -> Reading:
        """All that there is, on its way to the host by the names that metrics have."""
        always = {"loss": self.loss, "grad_norm": self.grad_norm, "finite": self.finite}
        if self.broken is not None:
            always["broken"] = self.broken
        asked = {"loss_scale": self.scale, "params_norm": self.params_norm, "zeros": self.zeros}
        if self.tied is not None:
            asked |= {"tied": self.tied[0], "tied_hash": self.tied[1]}
        several = dict(self.means) if len(self.means) > 1 else {}
        if self.load is not None:
            several |= self.load.metrics()
        return Reading(always | {name: value for name, value in asked.items() if value is not None} | several)


def train_step(
    state: TrainState, batches: Sequence[Batch], lr: float, decay: float, limits: SpikeLimits = NO_LIMITS
) -> StepReport:
    """One step over this data coordinate's microbatches; every rank of the mesh takes part. One that is beyond
    `limits` is not applied."""
    return update(state, backward(state, batches), lr, decay, limits)


def update(
    state: TrainState, sums: torch.Tensor, lr: float, decay: float, limits: SpikeLimits = NO_LIMITS
) -> StepReport:
    """Phases 4 to 6, of the gradients and the loss sums of a `backward`."""
    # 4
    scaler = state.scaler
    scale = None if scaler is None else scaler.scale
    norm, tied = state.optimizer.grad_norm(scale, _sound(state))
    broken, beyond = ~torch.isfinite(norm), norm > limits.grad_norm
    # 5
    loss, by_name, (broken, beyond) = _means(state, sums, broken, beyond)
    spike = beyond | (loss > limits.loss)
    allowed = ~(broken | spike | ~torch.isfinite(loss))
    # 6
    if state.copy is not None:
        state.copy.settle()
    outcome = state.optimizer.step(lr, decay, scale, norm, allowed)
    balance(state, allowed)
    if scaler is not None:
        scaler.update(~broken, _counted(state, loss, broken, allowed) if state.options.guarded else None)
    return StepReport(
        loss,
        by_name,
        torch.where(broken, torch.nan, norm),
        outcome.finite,
        scale,
        params_norm=_params_norm(state) if state.options.params_norm else None,
        zeros=_share_of_zeros(state) if state.options.zeros else None,
        load=state.load,
        tied=tied,
        broken=broken,
        sums=None if state.probes is None else state.probes.sums,
    )


def _counted(state: TrainState, loss: torch.Tensor, broken: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """bool [], whether the loss scale follows a step: one that was applied, or whose gradients alone are not finite.

    Tensor ranks compute the loss of each its own copy of the batch, of which one may be damaged.
    """
    there = torch.isfinite(loss).double()
    all_reduce(there, state.mesh.everyone, "min")
    return allowed | (broken & (there > 0))


def _sound(state: TrainState) -> torch.Tensor:
    """bool [], whether the batch, weights and moments of this rank are finite; a device value.

    A pass over weights and moments is up to half of a fused update's traffic, so a GPU makes one every so many steps:
    what is broken in between is found by the loss of the next step, which it has made NaN.
    """
    batch = torch.ones((), dtype=torch.bool, device=state.device.torch) if state.probes is None else state.probes.batch
    looks = not state.device.is_cuda or state.progress.step % SOUND_EVERY == 0
    return batch & state.sound() if looks else batch


def backward(state: TrainState, batches: Sequence[Batch]) -> torch.Tensor:
    """Phases 0 to 3: gradients of the global loss in `state.grads`; returns this rank's loss sums."""
    mesh, options = state.mesh, state.options
    state.train()
    state.grads.start()
    start_counting(state)
    if state.probes is not None:
        state.probes.start()
    # 0
    batches = _own_columns(state, batches)
    # 1
    factors = _factors(batches, state)
    scales = _weighed(factors, state)
    if state.scaler is not None:
        scales = scales * state.scaler.scale
    # 2
    schedule = plan(options.schedule, mesh.pp.size, options.chunks, len(batches))
    sums = state.pipeline.run(schedule, batches, list(scales), state.grads)
    if state.probes is not None:
        state.probes.end(factors)
    # 3
    state.grads.finish()
    state.load = finish_counting(state)
    if state.injector is not None:
        state.injector.after_backward()
    return _sums_of_step(sums, factors, state)


def _factors(batches: Sequence[Batch], state: TrainState) -> torch.Tensor:
    """float64 [microbatches, terms]: what each microbatch's totals are multiplied by in the mean of the step."""
    stage, count = state.stages[0], len(batches)
    by_name = [stage.weights(batch) for batch in batches]
    sums = [weights[name].double().sum() for weights in by_name for name in stage.terms]
    weights = torch.stack(sums).view(count, len(stage.terms))
    if state.options.normalizer == "microbatch":
        all_reduce(weights, state.mesh.cp)
        return 1.0 / (weights.clamp(min=LEAST_WEIGHT) * count * state.mesh.dp.size)
    total = weights.sum(0)
    all_reduce(total, state.mesh.tokens)
    return (1.0 / total.clamp(min=LEAST_WEIGHT)).expand(count, -1)


def _weighed(means: torch.Tensor, state: TrainState) -> torch.Tensor:
    """What has a column for each term, times their coefficients."""
    return means if state.coefficients is None else means * state.coefficients


def _sums_of_step(sums: torch.Tensor, factors: torch.Tensor, state: TrainState) -> torch.Tensor:
    """float64 [names, 2] of [microbatches, names, 2]: totals and weights whose ratio is the loss of the step.

    By microbatch, each total and its weight are scaled alike, so that every microbatch weighs the same.
    """
    if state.options.normalizer == "microbatch":
        metrics = torch.ones_like(sums[:, factors.shape[1] :, 0])
        sums = sums * torch.cat([factors, metrics], 1)[..., None]
    return sums.sum(0)


def _params_norm(state: TrainState) -> torch.Tensor:
    return square_sum(state.grads, weights=True).sqrt()


def _share_of_zeros(state: TrainState) -> torch.Tensor:
    counts = count_zeros(state.grads)
    return counts[0] / counts[1]


def evaluate_step(state: TrainState, batches: Sequence[Batch]) -> torch.Tensor:
    """float64 [names, 2]: total and weight of every term and metric over the global batch, without dropout; by
    microbatch, shares of a mean (`_sums_of_step`)."""
    schedule, batches = _forward_only(state, batches)
    sums = state.pipeline.run(schedule, batches)
    microbatch = state.options.normalizer == "microbatch"
    sums = _sums_of_step(sums, _factors(batches, state), state) if microbatch else sums.sum(0)
    all_reduce(sums, state.mesh.loss_group)
    return sums


def output_step(state: TrainState, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """The model's output for each microbatch, on the ranks of the last stage; [] on others. Without dropout."""
    schedule, batches = _forward_only(state, batches)
    return state.pipeline.outputs(schedule, batches)


def _forward_only(state: TrainState, batches: Sequence[Batch]) -> tuple[Plan, list[Batch]]:
    mesh = state.mesh
    state.train(False)
    return plan("forward", mesh.pp.size, state.options.chunks, len(batches)), _own_columns(state, batches)


def _own_columns(state: TrainState, batches: Sequence[Batch]) -> list[Batch]:
    """What this context rank holds of each batch."""
    where, split = (state.mesh.cp.index, state.mesh.cp.size), getattr(state.stages[0], "split", None)
    return [batch.split(*where) if split is None else split(batch, *where) for batch in batches]


def means(state: TrainState, sums: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of the global batch from the ranks' sums, and each term and metric; 0 where nothing of one counts."""
    loss, by_name, _ = _means(state, sums)
    return loss, by_name


def _means(
    state: TrainState, sums: torch.Tensor, *flags: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
    """As of `means`, and for each flag, bool [], whether it is set on any rank, by the same exchange."""
    rows = [torch.stack([flag.double(), flag.double()]) for flag in flags]
    sums = torch.cat([sums, torch.stack(rows)]) if rows else sums
    all_reduce(sums, state.mesh.loss_group)
    sums, counts = sums[: len(sums) - len(flags)], sums[len(sums) - len(flags) :, 0]
    found = sums[:, 0] / sums[:, 1].clamp(min=LEAST_WEIGHT)
    names, terms = state.pipeline.names, len(state.stages[0].terms)
    loss = found[0] if terms == 1 else _weighed(found[:terms], state).sum()
    return loss, dict(zip(names, found, strict=True)), [count > 0 for count in counts]
