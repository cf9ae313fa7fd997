"""One optimizer step, in numbered phases: forward and backward over the microbatches, reductions, update.

0 cut rows over the context axis
1 weight of the global batch    computed before the first backward pass, so that losses are divided by it exactly once
2 the pipeline runs its plan    the reduction of a bucket starts when the bucket is complete
3 finish the gradient reduction
4 gradient norm                 NaN if weights or moments are not finite
5 loss of the global batch      and whether any rank has found a fault
6 update                        skipped if a rank has found a fault
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
"""Number of steps between two checks of weights and moments on a GPU."""

LEAST_WEIGHT = 1e-30
"""Lower bound of the divisor of losses. A batch, for example of prompts only, may have no token with a loss weight."""


@dataclass(frozen=True)
class StepReport:
    """The results of a step, as device values, so that the host waits only when it reads the values."""

    loss: torch.Tensor
    """The loss of the global batch."""
    means: Mapping[str, torch.Tensor]
    """Name of each term and metric -> its mean."""
    grad_norm: torch.Tensor
    """The gradient norm before clipping."""
    finite: torch.Tensor
    """0 if the update was skipped."""
    scale: torch.Tensor | None = None
    """The loss scale of this step."""
    params_norm: torch.Tensor | None = None
    """Norm of the weights after the update, if the run reports it."""
    zeros: torch.Tensor | None = None
    """Fraction of gradients that are zero, if the run reports it."""
    tied: torch.Tensor | None = None
    """The value of `GradNorm.tied` from the optimizer."""
    load: ExpertLoad | None = None
    """Load of the experts, if the model has experts."""
    broken: torch.Tensor | None = None
    """Whether gradients, weights or moments of any rank are not finite."""
    sums: torch.Tensor | None = None
    """The sums of `Probes`."""

    def start_reading(self) -> Reading:
        """Start copying all values to the host. The copies are keyed by metric name."""
        always = {"loss": self.loss, "grad_norm": self.grad_norm, "finite": self.finite}
        if self.broken is not None:
            always["broken"] = self.broken
        optional = {"loss_scale": self.scale, "params_norm": self.params_norm, "zeros": self.zeros}
        if self.tied is not None:
            optional |= {"tied": self.tied[0], "tied_hash": self.tied[1]}
        means = dict(self.means) if len(self.means) > 1 else {}
        if self.load is not None:
            means |= self.load.metrics()
        return Reading(always | {name: value for name, value in optional.items() if value is not None} | means)


def train_step(
    state: TrainState, batches: Sequence[Batch], lr: float, decay: float, limits: SpikeLimits = NO_LIMITS
) -> StepReport:
    """Perform one step over this data rank's microbatches. All ranks of the mesh must call this function together. The
    update is skipped if the loss or the gradient norm exceeds `limits`."""
    return update(state, backward(state, batches), lr, decay, limits)


def update(
    state: TrainState, sums: torch.Tensor, lr: float, decay: float, limits: SpikeLimits = NO_LIMITS
) -> StepReport:
    """Perform phases 4 to 6, after `backward`. sums: the result of `backward`."""
    # 4 gradient norm
    scaler = state.scaler
    scale = None if scaler is None else scaler.scale
    norm, tied = state.optimizer.grad_norm(scale, _sound(state))
    broken, beyond = ~torch.isfinite(norm), norm > limits.grad_norm
    # 5 loss of the global batch
    loss, by_name, (broken, beyond) = _means(state, sums, broken, beyond)
    spike = beyond | (loss > limits.loss)
    allowed = ~(broken | spike | ~torch.isfinite(loss))
    # 6 update
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
    """Return bool []: whether a step updates the loss scale. This is the case if the step was applied, or if its
    gradients are not finite but its loss is.

    The loss must be finite on all ranks, because each tensor rank has its own copy of the batch, which may be damaged.
    """
    loss_is_finite = torch.isfinite(loss).double()
    all_reduce(loss_is_finite, state.mesh.everyone, "min")
    return allowed | (broken & (loss_is_finite > 0))


def _sound(state: TrainState) -> torch.Tensor:
    """Return a device value, bool []: whether the batch, weights and moments of this rank are finite.

    A pass over weights and moments costs up to half of the memory traffic of a fused update, so a GPU makes this pass
    only every SOUND_EVERY steps. Damage between two passes makes the loss of the next step NaN, and that step detects
    the NaN.
    """
    batch = torch.ones((), dtype=torch.bool, device=state.device.torch) if state.probes is None else state.probes.batch
    looks = not state.device.is_cuda or state.progress.step % SOUND_EVERY == 0
    return batch & state.sound() if looks else batch


def backward(state: TrainState, batches: Sequence[Batch]) -> torch.Tensor:
    """Perform phases 0 to 3: compute the gradients of the global loss in `state.grads`, and return this rank's loss
    sums."""
    mesh, options = state.mesh, state.options
    state.train()
    state.grads.start()
    start_counting(state)
    if state.probes is not None:
        state.probes.start()
    # 0 cut rows
    batches = _own_columns(state, batches)
    # 1 weight of the global batch
    factors = _factors(batches, state)
    scales = _weighed(factors, state)
    if state.scaler is not None:
        scales = scales * state.scaler.scale
    # 2 forward and backward
    schedule = plan(options.schedule, mesh.pp.size, options.chunks, len(batches))
    sums = state.pipeline.run(schedule, batches, list(scales), state.grads)
    if state.probes is not None:
        state.probes.end(factors)
    # 3 finish the reduction
    state.grads.finish()
    state.load = finish_counting(state)
    if state.injector is not None:
        state.injector.after_backward()
    return _sums_of_step(sums, factors, state)


def _factors(batches: Sequence[Batch], state: TrainState) -> torch.Tensor:
    """Return float64 [microbatches, terms]: the factors of each microbatch's totals in the mean of the step."""
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
    """Multiply `means`, [..., terms], by the coefficients of the terms."""
    return means if state.coefficients is None else means * state.coefficients


def _sums_of_step(sums: torch.Tensor, factors: torch.Tensor, state: TrainState) -> torch.Tensor:
    """Sum [microbatches, names, 2] to float64 [names, 2]: totals and weights whose ratio is the loss of the step.

    With the normalizer "microbatch" each total and its weight have the same factor, so all microbatches count equally.
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
    """Return float64 [names, 2]: total and weight of every term and metric over the global batch, without dropout. With
    the normalizer "microbatch", the sums are scaled as in `_sums_of_step`."""
    schedule, batches = _forward_only(state, batches)
    sums = state.pipeline.run(schedule, batches)
    microbatch = state.options.normalizer == "microbatch"
    sums = _sums_of_step(sums, _factors(batches, state), state) if microbatch else sums.sum(0)
    all_reduce(sums, state.mesh.loss_group)
    return sums


def output_step(state: TrainState, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Return the model's output for each microbatch, without dropout, on ranks of the last stage; [] on other ranks."""
    schedule, batches = _forward_only(state, batches)
    return state.pipeline.outputs(schedule, batches)


def _forward_only(state: TrainState, batches: Sequence[Batch]) -> tuple[Plan, list[Batch]]:
    mesh = state.mesh
    state.train(False)
    return plan("forward", mesh.pp.size, state.options.chunks, len(batches)), _own_columns(state, batches)


def _own_columns(state: TrainState, batches: Sequence[Batch]) -> list[Batch]:
    """Return this context rank's columns of each batch."""
    index_and_size, split = (state.mesh.cp.index, state.mesh.cp.size), getattr(state.stages[0], "split", None)
    return [batch.split(*index_and_size) if split is None else split(batch, *index_and_size) for batch in batches]


def means(state: TrainState, sums: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of the global batch, and the mean of each term and metric, from the sums of all ranks. A mean is
    0 if its total weight is 0."""
    loss, by_name, _ = _means(state, sums)
    return loss, by_name


def _means(
    state: TrainState, sums: torch.Tensor, *flags: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the result of `means`, and for each flag (bool []) whether it is set on any rank. This function needs only
    one all-reduce."""
    rows = [torch.stack([flag.double(), flag.double()]) for flag in flags]
    sums = torch.cat([sums, torch.stack(rows)]) if rows else sums
    all_reduce(sums, state.mesh.loss_group)
    sums, counts = sums[: len(sums) - len(flags)], sums[len(sums) - len(flags) :, 0]
    ratios = sums[:, 0] / sums[:, 1].clamp(min=LEAST_WEIGHT)
    names, terms = state.pipeline.names, len(state.stages[0].terms)
    loss = ratios[0] if terms == 1 else _weighed(ratios[:terms], state).sum()
    return loss, dict(zip(names, ratios, strict=True)), [count > 0 for count in counts]
