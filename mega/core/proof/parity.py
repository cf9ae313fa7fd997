"""Train one small model from one seed in many layouts, and compare losses and gradients by logical tensor.

The reference is a run of the same code on one rank. Losses and assembled gradients are compared at selected steps.
`LOSS_BOUND` and `GRADIENT_BOUND` are the tolerances, and `Measure` computes the error of a tensor's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mega.core import family
from mega.core.batch import Batch
from mega.core.checkpoint.own.pieces import Piece
from mega.core.config.resolve import microbatches
from mega.core.config.run import RunConfig
from mega.core.device import Device
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.pool import Pool
from mega.core.training.routing import balance
from mega.core.training.step import backward, means
from mega.core.training.wire import build_mesh, build_state

LOSS_BOUND = {"fp64": 1e-12, "fp32": 2e-6}
GRADIENT_BOUND = {"fp64": {1: 1e-10, 10: 1e-10}, "fp32": {1: 1e-5, 10: 2e-4}}
"""dtype -> step -> bound. All steps after the first use the bound for step 10."""
GRADIENT_FLOOR = 1e-6
"""Errors are relative to the largest element of the reference gradient, or to this fraction of the global gradient norm
if that is larger."""
ROUNDING = 4
"""A layout's error against fp64 may be up to this multiple of the reference's error against fp64. A different order of
summation causes up to 2 times the reference's error. Ring attention causes up to 2.8 times (GPT's key bias), because
its backward pass, like that of flash attention, computes the softmax sums from the rounded output."""


@dataclass(frozen=True)
class Snapshot:
    """Results of one step in one layout: loss, gradient norm, and assembled gradients by logical name."""

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepDifference:
    """The difference between a layout and the reference at one step."""

    step: int
    loss: float
    """Relative difference of the loss."""
    gradient: float
    """Relative error of the gradient of the worst tensor."""
    share: float
    """Error of the worst tensor's gradient as a fraction of the allowed error."""
    tensor: str
    """Name of the worst tensor."""


class Measure:
    """Computes the error of a tensor's gradient relative to the reference gradient.

    The error is the largest difference of an element, divided by the largest element of the reference, or by `floor` if
    that is larger. The error may be up to `bound`. This bound is not meaningful if the reference is only rounding
    noise. For example, the gradient of a key bias is zero in theory, and its fp32 value depends on the order of
    summation. If `exact`, the gradient in fp64, is given, a gradient therefore also passes if its distance to `exact`
    is at most `ROUNDING` times the reference's distance to `exact`. For an accurate reference, this second rule is
    stricter than the first and has no effect.
    """

    def __init__(self, reference: torch.Tensor, exact: torch.Tensor | None, bound: float, floor: float):
        self.reference, self.exact, self.bound = reference, exact, bound
        self.scale = max(float(reference.abs().max()), floor)
        self.rounding = 0.0 if exact is None else float((reference - exact).abs().max())

    def __call__(self, gradient: torch.Tensor, start: Sequence[int] | None = None) -> tuple[float, float]:
        """Return (error, fraction of the allowed error) for a whole gradient, or for a rectangle of the gradient that
        begins at `start`."""
        error = float((gradient - _cut(self.reference, start, gradient)).abs().max()) / self.scale
        share = error / self.bound
        if self.exact is not None and self.rounding > 0:
            distance = float((gradient - _cut(self.exact, start, gradient)).abs().max())
            share = min(share, distance / (ROUNDING * self.rounding))
        return error, share


def _cut(whole: torch.Tensor, start: Sequence[int] | None, like: torch.Tensor) -> torch.Tensor:
    for dim, first in enumerate(start or ()):
        whole = whole.narrow(dim, first, like.shape[dim])
    return whole


def synthetic_batch(run: RunConfig, samples: torch.Tensor) -> Batch:
    """Return a batch for the run's family that depends only on the sample indices. samples: int64 [b]."""
    return family.synthetic_batch(run, samples, seed=run.runtime.seed, documents=run.data.reset_attention)


def own_samples(run: RunConfig, mesh: Mesh, consumed: int) -> Iterator[torch.Tensor]:
    """Yield the sample indices of this data rank's microbatches in the step that starts at sample `consumed`."""
    size = run.batch.micro_batch
    for number in range(microbatches(run, mesh.world)):
        first = consumed + (number * mesh.dp.size + mesh.dp.index) * size
        yield torch.arange(first, first + size)


def train_layout(
    groups: Groups, rank: int, run: RunConfig, world: int, steps: Sequence[int]
) -> list[tuple[float, float, list[Piece]]]:
    """Train on one rank up to the last of `steps`. Return (loss, gradient norm, this rank's pieces of gradients) for
    each of `steps`."""
    mesh = build_mesh(run, rank, world, groups)
    device = Device.choose(run.runtime.device, rank)
    state, results = build_state(run, mesh, device), []
    lr = run.optimizer.lr
    assert lr is not None
    for step in range(1, max(steps) + 1):
        consumed = (step - 1) * run.batch.global_batch
        batches = [synthetic_batch(run, rows.to(device.torch)) for rows in own_samples(run, mesh, consumed)]
        sums = backward(state, batches)
        pieces = []
        if step in steps:  # copied now, because the optimizer step overwrites gradients
            pieces = [
                Piece(piece.key, piece.whole, piece.start, piece.tensor.detach().cpu().clone())
                for piece in state.gradient_pieces()
            ]
        outcome = state.optimizer.step(lr, run.optimizer.weight_decay)
        balance(state, outcome.finite)
        loss = means(state, sums)[0]
        if step in steps:
            results.append((float(loss), float(outcome.grad_norm), pieces))
    state.grads.wait_param_gather()
    return results


def snapshots(pool: Pool, run: RunConfig, world: int, steps: Sequence[int]) -> list[Snapshot]:
    """Train `run` on `world` ranks of the pool, and return one snapshot for each of `steps`."""
    ranks = pool.run(train_layout, run, world, tuple(steps), world=world)
    return [
        Snapshot(at_step[0][0], at_step[0][1], assemble(piece for _, _, pieces in at_step for piece in pieces))
        for at_step in zip(*ranks, strict=True)
    ]


def assemble(pieces: Iterator[Piece]) -> dict[str, torch.Tensor]:
    """Assemble whole tensors from the rectangles that all ranks hold.

    Errors: RuntimeError if replicas are not bitwise equal, or if an element is missing on all ranks.
    """
    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for piece in pieces:
        if piece.key not in whole:
            whole[piece.key] = torch.zeros(piece.whole, dtype=piece.tensor.dtype)
            filled[piece.key] = torch.zeros(piece.whole, dtype=torch.bool)
        target, mask = whole[piece.key], filled[piece.key]
        for dim, (start, size) in enumerate(zip(piece.start, piece.tensor.shape, strict=True)):
            target, mask = target.narrow(dim, start, size), mask.narrow(dim, start, size)
        if not torch.equal(target[mask], piece.tensor[mask]):
            worst = float((target[mask] - piece.tensor[mask]).abs().max())
            raise RuntimeError(f"{piece.key}: replicas differ by up to {worst:.3g}")
        target.copy_(piece.tensor)
        mask.fill_(True)
    for name, mask in filled.items():
        if not bool(mask.all()):
            raise RuntimeError(f"{name}: {int((~mask).sum())} elements are held by no rank")
    return whole


def compare(
    dtype: str,
    steps: Sequence[int],
    reference: Sequence[Snapshot],
    other: Sequence[Snapshot],
    exact: Sequence[Snapshot] | None = None,
) -> list[StepDifference]:
    """Return the differences between `other` and `reference` at each step. exact: the reference in fp64, if `dtype` is
    fp32."""
    differences = []
    for number, (step, expected, actual) in enumerate(zip(steps, reference, other, strict=True)):
        if expected.gradients.keys() != actual.gradients.keys():
            missing = expected.gradients.keys() ^ actual.gradients.keys()
            raise RuntimeError(f"the layouts hold different tensors: {sorted(missing)}")
        bound, floor = gradient_bound(dtype, step), GRADIENT_FLOOR * expected.grad_norm
        errors = {}
        for name, gradient in expected.gradients.items():
            true_gradient = None if exact is None else exact[number].gradients[name]
            errors[name] = Measure(gradient, true_gradient, bound, floor)(actual.gradients[name])
        worst = max(errors, key=lambda name: _nan_is_worst(errors[name][1]))
        loss = abs(actual.loss - expected.loss) / abs(expected.loss)
        differences.append(StepDifference(step, loss, *errors[worst], worst))
    return differences


def _nan_is_worst(share: float) -> float:
    return math.inf if math.isnan(share) else share


def gradient_bound(dtype: str, step: int) -> float:
    bounds = GRADIENT_BOUND[dtype]
    return bounds[1] if step <= 1 else bounds[10]


def within(dtype: str, difference: StepDifference) -> bool:
    """Whether a difference is within the bounds for `dtype`. NaN is never within the bounds."""
    return difference.loss <= LOSS_BOUND[dtype] and difference.share <= 1
