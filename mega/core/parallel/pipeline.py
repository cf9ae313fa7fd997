"""Executes a pipeline plan by running its compute steps and moving activations and gradients between stages. This
module does not depend on the schedule or the model.

A stage is a callable `stage(batch, *cargo) -> StageOutput`. The cargo is the tuple of tensors (activations or their
gradients) that one stage sends to another. The stage declares the shapes and dtypes of these tensors, so the number of
tensors may differ between model families. Loss terms may come from any stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mega.core.activity import ACTIVITY
from mega.core.batch import Batch, Terms
from mega.core.ops.autograd import run_backward
from mega.core.parallel.collectives import CollectiveHandle, wait_for
from mega.core.parallel.deferred import DeferredWgrad, run_wgrad
from mega.core.parallel.gradients import GradBuffer
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight_casts import WeightCasts
from mega.core.plan import Compute, Exchange, Plan, Transfer

MAX_SENDS = 4
"""Maximum number of sends in flight. If there are more, the executor waits for the oldest send."""

Cargo = tuple[torch.Tensor, ...]
Key = tuple[str, int, int]
"""The key of stored activations or gradients: (kind, microbatch, chunk on this rank)."""


@dataclass(frozen=True)
class StageOutput:
    """The results of a stage for one microbatch."""

    cargo: Cargo = ()
    """Tensors for the next stage."""
    terms: Terms = field(default_factory=dict)
    """Losses (by name) at which the backward pass begins."""
    metrics: Terms = field(default_factory=dict)
    """Metrics by name, for reports only."""
    outputs: torch.Tensor | None = None
    """The outputs of the last stage (logits), if they were requested."""
    auxiliary: Terms = field(default_factory=dict)
    """Losses (by name) whose backward pass begins within the backward pass of `cargo` or of `terms`."""


class Stage(Protocol):
    """One chunk of the model on one rank.

    terms: name of each loss of the model, on any stage -> the coefficient of its mean in the step's total loss.
    metrics: names of the values that are only reported.
    """

    @property
    def terms(self) -> Mapping[str, float]: ...

    metrics: tuple[str, ...]

    def weights(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return a map from the name of each loss term to its weights. The sum of a term's weights is its divisor.

        The weights are needed before the first forward pass. Their sum divides gradients, and the sum of the stages'
        `Term.weight` values divides reported losses, so both sums must be equal.
        """

    def __call__(
        self, batch: Any, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        """Run the forward pass of one microbatch.

        scales: float64 [terms], factors by which the totals are multiplied before the backward pass; None if the
        factors are unknown. A stage that has already applied the factor of a term returns the term with a `root`.
        """

    def cargo(self, batch: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the activations that this stage receives from the previous stage."""


class Pipeline:
    """The chunks of this rank and the links to its neighbours. A pipeline of one stage has no links.

    casts: the casts of weights that the microbatches of a training step share.
    """

    def __init__(
        self, chunks: Sequence[Stage], mesh: Mesh, device: torch.device, casts: WeightCasts | None = None
    ) -> None:
        self.chunks, self.mesh, self.device = list(chunks), mesh, device
        self.casts = casts or WeightCasts()
        self.names = (*self.chunks[0].terms, *self.chunks[0].metrics)
        assert len(set(self.names)) == len(self.names), f"losses and metrics share a name: {self.names}"

    def run(
        self,
        plan: Plan,
        batches: Sequence[Batch],
        scales: Sequence[torch.Tensor] | None = None,
        grads: GradBuffer | None = None,
    ) -> torch.Tensor:
        """Execute `plan` over the microbatches.

        Returns float64 [microbatches, names, 2], this rank's total and weight of every term, then of every metric.
        scales: for each microbatch, float64 [terms], the factors of its totals in the backward pass; None for a forward
        plan.
        """
        with nullcontext() if grads is None else self.casts.shared():
            return _Step(self, plan, batches, scales, grads).play()

    def outputs(self, plan: Plan, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Execute a forward plan. Return the outputs of every microbatch on the last stage, and an empty list on other
        stages."""
        assert plan.kind == "forward"
        step = _Step(self, plan, batches, None, None, wants_outputs=True)
        step.play()
        return [step.last_outputs[number] for number in range(len(step.last_outputs))]

    def close(self) -> None:
        """Release device resources other than tensors, such as CUDA graphs. Call this before the process group is
        destroyed."""


def stacked(names: Sequence[str], output: StageOutput) -> torch.Tensor:
    """Return the totals and weights of an output's terms and metrics, float64 [names, 2], with zeros for those of other
    stages."""
    sums = {
        name: torch.stack([term.total.detach(), term.weight]).double()
        for kind in (output.terms, output.metrics, output.auxiliary)
        for name, term in kind.items()
    }
    if len(names) == 1:
        return sums[names[0]][None]
    nothing = torch.zeros_like(next(iter(sums.values()))) if len(sums) < len(names) else None
    return torch.stack([sums.get(name, nothing) for name in names])  # type: ignore[misc]


class _Step:
    """The state of one execution of a plan: tensors in flight, inputs and outputs of microbatches, and sums."""

    def __init__(
        self,
        pipeline: Pipeline,
        plan: Plan,
        batches: Sequence[Batch],
        scales: Sequence[torch.Tensor] | None,
        grads: GradBuffer | None,
        wants_outputs: bool = False,
    ):
        assert plan.microbatches == len(batches) and plan.stages == pipeline.mesh.pp.size
        self.pipeline, self.plan, self.batches, self.scales, self.grads = pipeline, plan, batches, scales, grads
        self.rank, self.ranks = pipeline.mesh.pp.index, pipeline.mesh.pp.ranks
        self.stages = plan.stages * plan.chunks
        self.received: dict[Key, tuple[Cargo, list[CollectiveHandle]]] = {}
        self.to_send: dict[Key, Cargo] = {}
        self.sent: deque[tuple[CollectiveHandle, torch.Tensor]] = deque()
        self.inputs: dict[tuple[int, int], Cargo] = {}
        self.outputs: dict[tuple[int, int], StageOutput] = {}
        self.backwards, self.weights = [0] * plan.chunks, [0] * plan.chunks
        self.deferred: dict[tuple[int, int], list[DeferredWgrad]] = {}
        self.splits = any(isinstance(act, Compute) and act.kind == "W" for act in plan.acts[self.rank])
        self.sums: dict[int, torch.Tensor] = {}
        self.wants_outputs = wants_outputs
        self.last_outputs: dict[int, torch.Tensor] = {}

    def play(self) -> torch.Tensor:
        for act in self.plan.acts[self.rank]:
            ACTIVITY.act, ACTIVITY.moves = act, ACTIVITY.moves + 1
            if isinstance(act, Exchange):
                self._exchange(act)
            elif act.kind == "F":
                self._forward(act)
            elif act.kind == "B":
                self._backward(act)
            else:
                self._weights(act)
        for work, _ in self.sent:
            wait_for(work)
        assert not (self.received or self.to_send or self.outputs), "cargo left over"
        if not self.sums:
            shape = (len(self.batches), len(self.pipeline.names), 2)
            return torch.zeros(shape, dtype=torch.float64, device=self.pipeline.device)
        return torch.stack([self.sums[number] for number in range(len(self.batches))])

    def _forward(self, act: Compute) -> None:
        batch, chunk = self.batches[act.microbatch], self.pipeline.chunks[act.chunk]
        stage = act.chunk * self.plan.stages + self.rank
        cargo = self._take("F", act) if stage else ()
        trains = self.plan.kind != "forward"
        for tensor in cargo:
            tensor.requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            out = chunk(batch, *cargo, outputs=self.wants_outputs, scales=self._scale(act))
        if out.terms or out.metrics or out.auxiliary:
            sums, before = stacked(self.pipeline.names, out), self.sums.get(act.microbatch)
            self.sums[act.microbatch] = sums if before is None else before + sums
        if stage < self.stages - 1:
            self._give("F", act, tuple(tensor.detach() for tensor in out.cargo), stage + 1)
        if out.outputs is not None:
            self.last_outputs[act.microbatch] = out.outputs
        if trains:
            self.inputs[act.microbatch, act.chunk], self.outputs[act.microbatch, act.chunk] = cargo, out

    def _backward(self, act: Compute) -> None:
        key = (act.microbatch, act.chunk)
        stage = act.chunk * self.plan.stages + self.rank
        out, cargo = self.outputs.pop(key), self.inputs.pop(key)
        cargo_grads = self._take("B", act) if stage < self.stages - 1 else ()
        self.backwards[act.chunk] += 1
        if self.grads is not None:
            self.grads.final(self.backwards[act.chunk] == self.plan.microbatches)
            if self.splits:
                self.grads.wgrad.defer()
        backward(self.pipeline.chunks[act.chunk].terms, out, cargo_grads, self._scale(act))
        if self.grads is not None and self.splits:
            self.deferred[key] = self.grads.wgrad.take()
        if stage:
            self._give("B", act, tuple(_gradient(tensor) for tensor in cargo), stage - 1)

    def _scale(self, act: Compute) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[act.microbatch]

    def _weights(self, act: Compute) -> None:
        """Run the deferred weight gradients of a microbatch."""
        assert self.grads is not None
        self.weights[act.chunk] += 1
        self.grads.final(self.weights[act.chunk] == self.plan.microbatches)
        run_wgrad(self.deferred.pop((act.microbatch, act.chunk)))

    def _take(self, kind: str, act: Compute) -> Cargo:
        """Wait for the received activations or gradients that this compute step needs, and return them."""
        cargo, works = self.received.pop((kind, act.microbatch, act.chunk))
        for work in works:
            wait_for(work)
        return cargo

    def _give(self, kind: str, act: Compute, cargo: Cargo, to: int) -> None:
        """Store activations or gradients for stage `to`, either for a compute step of this rank or for the next
        exchange."""
        if to % self.plan.stages == self.rank:
            self.received[kind, act.microbatch, to // self.plan.stages] = (cargo, [])
        else:
            self.to_send[kind, act.microbatch, act.chunk] = cargo

    def _exchange(self, act: Exchange) -> None:
        """Start every send and receive of `act`. A compute step waits for the tensors that it needs."""
        for transfer in act.sends:
            for tensor in self.to_send.pop((transfer.kind, transfer.microbatch, transfer.chunk)):
                tensor = tensor.contiguous()
                work = dist.isend(tensor, self.ranks[transfer.peer], group=self._link(transfer.kind, transfer.peer))
                assert work is not None, "this rank is in the group of its link"
                self.sent.append((work, tensor))
        for transfer in act.recvs:
            self._receive(transfer)
        # The host runs ahead of the device, so without a limit it would keep the sent tensors of the whole step alive.
        # Waiting for the oldest sends takes no time, because they have already been received.
        while len(self.sent) > MAX_SENDS:
            wait_for(self.sent.popleft()[0])

    def _receive(self, transfer: Transfer) -> None:
        """Start a receive. The stage declares the shapes of activations; gradients have the shapes of the activations
        that the stage sent."""
        key = transfer.microbatch, transfer.chunk
        if transfer.kind == "F":
            shapes = self.pipeline.chunks[transfer.chunk].cargo(self.batches[transfer.microbatch])
        else:
            shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in self.outputs[key].cargo]
        cargo = tuple(torch.empty(shape, dtype=dtype, device=self.pipeline.device) for shape, dtype in shapes)
        group = self._link(transfer.kind, self.rank)
        works = (dist.irecv(tensor, self.ranks[transfer.peer], group=group) for tensor in cargo)
        self.received[transfer.kind, *key] = (cargo, [work for work in works if work is not None])

    def _link(self, kind: str, target: int) -> dist.ProcessGroup | None:
        return self.pipeline.mesh.p2p[kind, target].group


def backward(names: Iterable[str], out: StageOutput, cargo_grads: Cargo, scale: torch.Tensor | None) -> None:
    """Run the backward pass of one microbatch on one stage, starting from the stage's scaled loss terms and the
    gradients of the activations that the stage sent."""
    roots, factors = [], []
    for number, name in enumerate(names):
        if name not in out.terms:
            continue
        total, _, root = out.terms[name]
        assert scale is not None
        roots.append(total if root is None else root)
        factors.append(scale[number].to(total.dtype) if root is None else torch.empty_like(root))
    run_backward((*roots, *out.cargo), (*factors, *cargo_grads))


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None, "a stage ignored its cargo"
    return tensor.grad
