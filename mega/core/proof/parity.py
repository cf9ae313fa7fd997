"""Are all layouts one model? Trains one small model from one seed in many layouts and compares them by logical tensor.

The reference is the same code on one rank. Losses and whole gradients are compared at chosen steps, with the bounds
below; `Measure` defines how far one tensor's gradient may be from the reference's.
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
"""dtype -> step -> bound; steps between take the later bound."""
GRADIENT_FLOOR = 1e-6
"""A tensor's own size counts from this share of the global norm on."""
ROUNDING = 4
"""How many times the reference's own error against fp64 is rounding too. Another order of sums reaches twice; the ring,
whose backward takes softmax's sums from the rounded output as flash attention does, 2.8 times (GPT's key bias)."""


@dataclass(frozen=True)
class Snapshot:
    """One step of one layout: loss, gradient norm and whole gradients by logical name."""

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepDifference:
    """How far a layout is from the reference at one step.

    loss: relative. gradient: the worst tensor's error against its size. share: of what it was allowed. tensor: which.
    """

    step: int
    loss: float
    gradient: float
    share: float
    tensor: str


class Measure:
    """One tensor's gradient as the reference has it, and how far another may be from it.

    The error is the largest difference of an element, against the tensor's largest element or `floor` where that is
    larger. It may reach `bound`. Where the reference itself is rounding, no bound on it is meaningful: a key bias's
    gradient is zero in theory, and what fp32 has there is noise that no other order of sums repeats. So where `exact`
    is given, the same gradient in fp64, a tensor is also let pass if it is at most `ROUNDING` times as far from that as
    the reference is. Where the reference is accurate, this is the stricter of the two and changes nothing.
    """

    def __init__(self, mine: torch.Tensor, exact: torch.Tensor | None, bound: float, floor: float):
        self.mine, self.exact, self.bound = mine, exact, bound
        self.scale = max(float(mine.abs().max()), floor)
        self.rounding = 0.0 if exact is None else float((mine - exact).abs().max())

    def __call__(self, theirs: torch.Tensor, start: Sequence[int] | None = None) -> tuple[float, float]:
        """(error, share of what is allowed) of `theirs`: the whole tensor, or its rectangle that begins at `start`."""
        error = float((theirs - _cut(self.mine, start, theirs)).abs().max()) / self.scale
        share = error / self.bound
        if self.exact is not None and self.rounding > 0:
            away = float((theirs - _cut(self.exact, start, theirs)).abs().max())
            share = min(share, away / (ROUNDING * self.rounding))
        return error, share


def _cut(whole: torch.Tensor, start: Sequence[int] | None, like: torch.Tensor) -> torch.Tensor:
    for dim, first in enumerate(start or ()):
        whole = whole.narrow(dim, first, like.shape[dim])
    return whole


def synthetic_batch(run: RunConfig, samples: torch.Tensor) -> Batch:
    """A batch of the run's family that is a function of the sample numbers alone. samples: int64 [b]."""
    return family.synthetic_batch(run, samples, seed=run.runtime.seed, documents=run.data.reset_attention)


def own_samples(run: RunConfig, mesh: Mesh, consumed: int) -> Iterator[torch.Tensor]:
    """Sample numbers of this data coordinate's microbatches of the step that starts at `consumed`."""
    size = run.batch.micro_batch
    for number in range(microbatches(run, mesh.world)):
        first = consumed + (number * mesh.dp.size + mesh.dp.index) * size
        yield torch.arange(first, first + size)


def train_layout(
    groups: Groups, rank: int, run: RunConfig, world: int, steps: Sequence[int]
) -> list[tuple[float, float, list[Piece]]]:
    """Job of one rank: train to the last of `steps`; per listed step loss, gradient norm and this rank's pieces."""
    mesh = build_mesh(run, rank, world, groups)
    device = Device.choose(run.runtime.device, rank)
    state, found = build_state(run, mesh, device), []
    lr = run.optimizer.lr
    assert lr is not None
    for step in range(1, max(steps) + 1):
        consumed = (step - 1) * run.batch.global_batch
        batches = [synthetic_batch(run, rows.to(device.torch)) for rows in own_samples(run, mesh, consumed)]
        sums = backward(state, batches)
        pieces = []
        if step in steps:
            pieces = [
                Piece(piece.key, piece.whole, piece.start, piece.tensor.detach().cpu().clone())
                for piece in state.gradient_pieces()
            ]
        outcome = state.optimizer.step(lr, run.optimizer.weight_decay)
        balance(state, outcome.finite)
        loss = means(state, sums)[0]
        if step in steps:
            found.append((float(loss), float(outcome.grad_norm), pieces))
    state.grads.wait_param_gather()
    return found


def snapshots(pool: Pool, run: RunConfig, world: int, steps: Sequence[int]) -> list[Snapshot]:
    """Train `run` on `world` ranks of the pool; one snapshot per listed step."""
    ranks = pool.run(train_layout, run, world, tuple(steps), world=world)
    return [
        Snapshot(at_step[0][0], at_step[0][1], assemble(piece for _, _, pieces in at_step for piece in pieces))
        for at_step in zip(*ranks, strict=True)
    ]


def assemble(pieces: Iterator[Piece]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' pieces. Replicas must agree bit for bit; a gap or a disagreement is an error."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for piece in pieces:
        if piece.key not in whole:
            whole[piece.key] = torch.zeros(piece.whole, dtype=piece.tensor.dtype)
            seen[piece.key] = torch.zeros(piece.whole, dtype=torch.bool)
        into, known = whole[piece.key], seen[piece.key]
        for dim, (start, size) in enumerate(zip(piece.start, piece.tensor.shape, strict=True)):
            into, known = into.narrow(dim, start, size), known.narrow(dim, start, size)
        if not torch.equal(into[known], piece.tensor[known]):
            worst = float((into[known] - piece.tensor[known]).abs().max())
            raise RuntimeError(f"{piece.key}: replicas differ by up to {worst:.3g}")
        into.copy_(piece.tensor)
        known.fill_(True)
    for name, known in seen.items():
        if not bool(known.all()):
            raise RuntimeError(f"{name}: {int((~known).sum())} elements are held by no rank")
    return whole


def compare(
    dtype: str,
    steps: Sequence[int],
    reference: Sequence[Snapshot],
    other: Sequence[Snapshot],
    exact: Sequence[Snapshot] | None = None,
) -> list[StepDifference]:
    """Relative loss difference and the worst gradient at each step; `exact` is the reference in fp64."""
    found = []
    for number, (step, ours, theirs) in enumerate(zip(steps, reference, other, strict=True)):
        if ours.gradients.keys() != theirs.gradients.keys():
            missing = ours.gradients.keys() ^ theirs.gradients.keys()
            raise RuntimeError(f"the layouts hold different tensors: {sorted(missing)}")
        bound, floor = gradient_bound(dtype, step), GRADIENT_FLOOR * ours.grad_norm
        judged = {}
        for name, mine in ours.gradients.items():
            true = None if exact is None else exact[number].gradients[name]
            judged[name] = Measure(mine, true, bound, floor)(theirs.gradients[name])
        worst = max(judged, key=lambda name: _nan_is_worst(judged[name][1]))
        found.append(StepDifference(step, abs(theirs.loss - ours.loss) / abs(ours.loss), *judged[worst], worst))
    return found


def _nan_is_worst(share: float) -> float:
    return math.inf if math.isnan(share) else share


def gradient_bound(dtype: str, step: int) -> float:
    bounds = GRADIENT_BOUND[dtype]
    return bounds[1] if step <= 1 else bounds[10]


def within(dtype: str, difference: StepDifference) -> bool:
    """Whether a difference is inside the bounds for this dtype; NaN never is."""
    return difference.loss <= LOSS_BOUND[dtype] and difference.share <= 1
