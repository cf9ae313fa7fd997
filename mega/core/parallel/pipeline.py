"""The executor that plays any plan: computes, and moves cargo between stages. It knows no schedule and no model.

A stage is a callable `stage(batch, *cargo) -> StageOutput`. Cargo is a tuple of tensors whose shapes and dtypes the
stage states, so a family may send two tensors where another sends one; loss terms may come from any stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
from mega.core.plan import Compute, Exchange, Plan, Transfer

MAX_SENDS = 4
"""Sends that may be in flight before the oldest is waited for."""

Cargo = tuple[torch.Tensor, ...]
Key = tuple[str, int, int]
"""(kind, microbatch, chunk on this rank): one piece of cargo."""


@dataclass(frozen=True)
class StageOutput:
    """What a stage makes of one microbatch.

    cargo: for the next stage. terms: losses from which a backward pass begins, metrics: what is only reported, by the
    stage's names. outputs: what the last stage computes of the batch (logits), where it was asked for.
    auxiliary: losses whose backward pass begins inside that of the cargo or of `terms`.
    """

    cargo: Cargo = ()
    terms: Terms = field(default_factory=dict)
    metrics: Terms = field(default_factory=dict)
    outputs: torch.Tensor | None = None
    auxiliary: Terms = field(default_factory=dict)


class Stage(Protocol):
    """One chunk of the model on one rank.

    terms: name of each loss of the model, whichever stage it arises on -> what its mean is multiplied by in the loss of
    a step. metrics: names of what is only reported.
    """

    @property
    def terms(self) -> Mapping[str, float]: ...

    metrics: tuple[str, ...]

    def weights(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Name of each loss term -> weights whose sum is its divisor. Known before the first forward pass, and the same
        as the sum of the `Term.weight` that the stages find: one divides gradients, the other what is reported."""

    def __call__(
        self, batch: Any, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        """scales: float64 [terms], what totals are multiplied by before the backward pass, or None: not known. A stage
        that multiplies a term itself says so by its `root`."""

    def cargo(self, batch: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what this stage is given by the one before."""


class Pipeline:
    """The chunks of this rank and the links to its neighbours. One stage is the same path without links."""

    def __init__(self, chunks: Sequence[Stage], mesh: Mesh, device: torch.device):
        self.chunks, self.mesh, self.device = list(chunks), mesh, device
        self.names = (*self.chunks[0].terms, *self.chunks[0].metrics)
        assert len(set(self.names)) == len(self.names), f"losses and metrics share a name: {self.names}"

    def run(
        self,
        plan: Plan,
        batches: Sequence[Batch],
        scales: Sequence[torch.Tensor] | None = None,
        grads: GradBuffer | None = None,
    ) -> torch.Tensor:
        """Play `plan` over the microbatches; float64 [microbatches, names, 2], this rank's sums of each: total and
        weight of every term, then of every metric.

        scales: float64 [terms] a microbatch, what its terms' totals are multiplied by before its backward pass (none in
        a forward plan).
        """
        return _Step(self, plan, batches, scales, grads).play()

    def outputs(self, plan: Plan, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Play a forward plan; the last stage's output for every microbatch, in order. Empty on all other stages."""
        assert plan.kind == "forward"
        step = _Step(self, plan, batches, None, None, wants_outputs=True)
        step.play()
        return [step.last_outputs[number] for number in range(len(step.last_outputs))]

    def close(self) -> None:
        """Release what the device keeps in addition to tensors. Due before the process group goes."""


def stacked(names: Sequence[str], output: StageOutput) -> torch.Tensor:
    """float64 [names, 2]: totals and weights of an output's terms and metrics, zeros for those that arise elsewhere."""
    found = {
        name: torch.stack([one.total.detach(), one.weight]).double()
        for kind in (output.terms, output.metrics, output.auxiliary)
        for name, one in kind.items()
    }
    if len(names) == 1:
        return found[names[0]][None]
    nothing = torch.zeros_like(next(iter(found.values()))) if len(found) < len(names) else None
    return torch.stack([found.get(name, nothing) for name in names])  # type: ignore[misc]


class _Step:
    """What is in flight during one playing of a plan."""

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
            found, before = stacked(self.pipeline.names, out), self.sums.get(act.microbatch)
            self.sums[act.microbatch] = found if before is None else before + found
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
        arrived = self._take("B", act) if stage < self.stages - 1 else ()
        self.backwards[act.chunk] += 1
        if self.grads is not None:
            self.grads.final(self.backwards[act.chunk] == self.plan.microbatches)
            if self.splits:
                self.grads.wgrad.defer()
        backward(self.pipeline.chunks[act.chunk].terms, out, arrived, self._scale(act))
        if self.grads is not None and self.splits:
            self.deferred[key] = self.grads.wgrad.take()
        if stage:
            self._give("B", act, tuple(_gradient(tensor) for tensor in cargo), stage - 1)

    def _scale(self, act: Compute) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[act.microbatch]

    def _weights(self, act: Compute) -> None:
        """The weights' gradients that the backward pass of inputs left."""
        assert self.grads is not None
        self.weights[act.chunk] += 1
        self.grads.final(self.weights[act.chunk] == self.plan.microbatches)
        run_wgrad(self.deferred.pop((act.microbatch, act.chunk)))

    def _take(self, kind: str, act: Compute) -> Cargo:
        """Cargo that this compute needs; waits until it is here."""
        cargo, works = self.received.pop((kind, act.microbatch, act.chunk))
        for work in works:
            wait_for(work)
        return cargo

    def _give(self, kind: str, act: Compute, cargo: Cargo, to: int) -> None:
        """Put cargo where its consumer finds it: on this rank, or ready for the next exchange."""
        if to % self.plan.stages == self.rank:
            self.received[kind, act.microbatch, to // self.plan.stages] = (cargo, [])
        else:
            self.to_send[kind, act.microbatch, act.chunk] = cargo

    def _exchange(self, act: Exchange) -> None:
        """Start every send and receive; a receive is waited for by the compute that needs it."""
        for transfer in act.sends:
            for tensor in self.to_send.pop((transfer.kind, transfer.microbatch, transfer.chunk)):
                tensor = tensor.contiguous()
                work = dist.isend(tensor, self.ranks[transfer.peer], group=self._link(transfer.kind, transfer.peer))
                assert work is not None, "this rank is in the group of its link"
                self.sent.append((work, tensor))
        for transfer in act.recvs:
            self._receive(transfer)
        # The host runs ahead of a device and would hold on to every piece of a step; old ones have long been taken.
        while len(self.sent) > MAX_SENDS:
            wait_for(self.sent.popleft()[0])

    def _receive(self, transfer: Transfer) -> None:
        """An activation has the shape that the stage states, a gradient that of what the stage has sent."""
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


def backward(names: Iterable[str], out: StageOutput, arrived: Cargo, scale: torch.Tensor | None) -> None:
    """The backward pass of one microbatch on one stage: from its own terms, scaled, and from its cargo's gradients."""
    roots, factors = [], []
    for number, name in enumerate(names):
        if name not in out.terms:
            continue
        total, _, root = out.terms[name]
        assert scale is not None
        roots.append(total if root is None else root)
        factors.append(scale[number].to(total.dtype) if root is None else torch.empty_like(root))
    run_backward((*roots, *out.cargo), (*factors, *arrived))


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None, "a stage ignored its cargo"
    return tensor.grad
