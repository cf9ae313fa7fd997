"""The executor that plays any plan: computes, and moves cargo between stages. It knows no schedule and no model.

A stage is a callable `stage(batch, *cargo) -> cargo`; the last one of the model returns a `Loss`. Cargo is a tuple
of tensors whose shapes and dtypes the stage states, so a family may send two tensors where another sends one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mega.core.batch import DecoderBatch
from mega.core.parallel.gradients import GradBuffer, Product
from mega.core.parallel.mesh import Mesh
from mega.core.plan import Compute, Exchange, Plan, Transfer

SENT = 4
"""Sends that may be on their way before the oldest is waited for."""

Cargo = tuple[torch.Tensor, ...]
Key = tuple[str, int, int]
"""(kind, microbatch, chunk on this rank): one piece of cargo."""


@dataclass(frozen=True)
class Loss:
    """Sums over one microbatch: weight x negative log-likelihood, and weight."""

    total: torch.Tensor
    weight: torch.Tensor

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.total + other.total, self.weight + other.weight)


class Stage(Protocol):
    """One chunk of the model on one rank."""

    def __call__(self, batch: DecoderBatch, *cargo: torch.Tensor) -> Cargo | Loss: ...

    def cargo(self, rows: int, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]]: ...


class Pipeline:
    """The chunks of this rank and the links to its neighbours. One stage is the same path without links."""

    def __init__(self, chunks: Sequence[Stage], mesh: Mesh, device: torch.device):
        self.chunks, self.mesh, self.device = list(chunks), mesh, device

    def run(
        self,
        plan: Plan,
        batches: Sequence[DecoderBatch],
        scales: Sequence[torch.Tensor] | None = None,
        grads: GradBuffer | None = None,
    ) -> torch.Tensor:
        """Play `plan` over the microbatches; [sum of weight x loss, sum of weight], zeros but on the last stage.

        scales: what each microbatch's summed loss is multiplied by before its backward pass (none in a forward plan).
        """
        return _Step(self, plan, batches, scales, grads).play()

    def close(self) -> None:
        """Let go of what the device keeps besides tensors. Due before the process group goes."""


class _Step:
    """What is in flight during one playing of a plan."""

    def __init__(
        self,
        pipeline: Pipeline,
        plan: Plan,
        batches: Sequence[DecoderBatch],
        scales: Sequence[torch.Tensor] | None,
        grads: GradBuffer | None,
    ):
        assert plan.microbatches == len(batches) and plan.stages == pipeline.mesh.pp.size
        self.pipeline, self.plan, self.batches, self.scales, self.grads = pipeline, plan, batches, scales, grads
        self.rank, self.ranks = pipeline.mesh.pp.index, pipeline.mesh.pp.ranks
        self.stages = plan.stages * plan.chunks
        self.arriving: dict[Key, tuple[Cargo, list[Any]]] = {}
        self.leaving: dict[Key, Cargo] = {}
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()
        self.inputs: dict[tuple[int, int], Cargo] = {}
        self.outputs: dict[tuple[int, int], Cargo] = {}
        self.backwards, self.weights = [0] * plan.chunks, [0] * plan.chunks
        self.products: dict[tuple[int, int], list[Product]] = {}
        self.splits = any(isinstance(act, Compute) and act.kind == "W" for act in plan.acts[self.rank])
        self.sums: list[torch.Tensor] = []

    def play(self) -> torch.Tensor:
        for act in self.plan.acts[self.rank]:
            if isinstance(act, Exchange):
                self._exchange(act)
            elif act.kind == "F":
                self._forward(act)
            elif act.kind == "B":
                self._backward(act)
            else:
                self._weights(act)
        for work, _ in self.sent:
            work.wait()
        assert not (self.arriving or self.leaving or self.outputs), "cargo left over"
        if not self.sums:
            return torch.zeros(2, dtype=torch.float64, device=self.pipeline.device)
        return torch.stack(self.sums).sum(0)

    def _forward(self, act: Compute) -> None:
        batch, chunk = self.batches[act.microbatch], self.pipeline.chunks[act.chunk]
        stage = act.chunk * self.plan.stages + self.rank
        cargo = self._take("F", act) if stage else ()
        trains = self.plan.kind != "forward"
        for tensor in cargo:
            tensor.requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            out = chunk(batch, *cargo)
        if isinstance(out, Loss):
            self.sums.append(torch.stack([out.total.detach(), out.weight]).double())
            out = (out.total,)
        else:
            self._give("F", act, tuple(tensor.detach() for tensor in out), stage + 1)
        if trains:
            self.inputs[act.microbatch, act.chunk], self.outputs[act.microbatch, act.chunk] = cargo, out

    def _backward(self, act: Compute) -> None:
        key = (act.microbatch, act.chunk)
        stage = act.chunk * self.plan.stages + self.rank
        out, cargo = self.outputs.pop(key), self.inputs.pop(key)
        if stage == self.stages - 1:
            assert self.scales is not None
            grads: Cargo = (self.scales[act.microbatch].to(out[0].dtype),)
        else:
            grads = self._take("B", act)
        self.backwards[act.chunk] += 1
        if self.grads is not None:
            self.grads.final(self.backwards[act.chunk] == self.plan.microbatches)
            if self.splits:
                self.grads.hold()
        torch.autograd.backward(out, grads)
        if self.grads is not None and self.splits:
            self.products[key] = self.grads.release()
        if stage:
            self._give("B", act, tuple(_gradient(tensor) for tensor in cargo), stage - 1)

    def _weights(self, act: Compute) -> None:
        """The weights' gradients that the backward pass of inputs left."""
        assert self.grads is not None
        self.weights[act.chunk] += 1
        self.grads.final(self.weights[act.chunk] == self.plan.microbatches)
        self.grads.compute(self.products.pop((act.microbatch, act.chunk)))

    def _take(self, kind: str, act: Compute) -> Cargo:
        """Cargo that this compute needs; waits until it is here."""
        cargo, works = self.arriving.pop((kind, act.microbatch, act.chunk))
        for work in works:
            work.wait()
        return cargo

    def _give(self, kind: str, act: Compute, cargo: Cargo, to: int) -> None:
        """Put cargo where its consumer finds it: on this rank, or at the door for the next exchange."""
        if to % self.plan.stages == self.rank:
            self.arriving[kind, act.microbatch, to // self.plan.stages] = (cargo, [])
        else:
            self.leaving[kind, act.microbatch, act.chunk] = cargo

    def _exchange(self, act: Exchange) -> None:
        """Start every send and receive; a receive is waited for by the compute that needs it."""
        for transfer in act.sends:
            for tensor in self.leaving.pop((transfer.kind, transfer.microbatch, transfer.chunk)):
                tensor = tensor.contiguous()
                work = dist.isend(tensor, self.ranks[transfer.peer], group=self._link(transfer.kind, transfer.peer))
                self.sent.append((work, tensor))
        for transfer in act.recvs:
            self._receive(transfer)
        # The host runs ahead of a device and would hold on to every piece of a step; old ones have long been taken.
        while len(self.sent) > SENT:
            self.sent.popleft()[0].wait()

    def _receive(self, transfer: Transfer) -> None:
        rows, columns = self.batches[transfer.microbatch].tokens.shape
        shapes = self.pipeline.chunks[transfer.chunk].cargo(rows, columns)
        cargo = tuple(torch.empty(shape, dtype=dtype, device=self.pipeline.device) for shape, dtype in shapes)
        group = self._link(transfer.kind, self.rank)
        works = [dist.irecv(tensor, self.ranks[transfer.peer], group=group) for tensor in cargo]
        self.arriving[transfer.kind, transfer.microbatch, transfer.chunk] = (cargo, works)

    def _link(self, kind: str, target: int) -> dist.ProcessGroup | None:
        return self.pipeline.mesh.links[kind, target].group


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None, "a stage ignored its cargo"
    return tensor.grad
