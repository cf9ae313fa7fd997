"""Runs the forward and backward pass of a microbatch as one CUDA graph, which is captured once and then replayed for
later microbatches.

The host takes about 2 ms to launch the kernels of a block. A device that finishes a block sooner would be idle, whereas
a graph needs only one launch.

    the first step             runs without a graph: kernels are compiled and chosen, exchanges allocate their memory;
                               so does the first step whose batch has different optional tensors
    each later microbatch      copy its tokens and loss scale into the graph's buffers; replay; read its sums
    a step's last microbatch   runs without a graph under data parallelism, because buckets start their reduction as
                               soon as their gradients are complete

This module supports only pipelines of one stage and one chunk, because with several stages or chunks, each microbatch
in flight would need separate graph memory. This module does not depend on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mega.core.activity import ACTIVITY
from mega.core.batch import Batch
from mega.core.config.resolve import eager_microbatches
from mega.core.device import Recorder
from mega.core.parallel.gradients import GradBuffer, zero_unwritten
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.peers import Peers
from mega.core.parallel.pipeline import Pipeline, Stage, backward, stacked
from mega.core.parallel.weight_casts import WeightCasts
from mega.core.plan import Plan, plan

ALONE = plan("1f1b", 1)
"""The plan of a step with a single microbatch."""


class Replayable(Protocol):
    def play(self) -> None: ...


class ReplayedPipeline(Pipeline):
    """A pipeline of one stage that replays the captured graph of a microbatch.

    Batches with different optional tensors have separate graphs, which share their memory.

    peers: the transport with which tensor ranks overlap exchanges and GEMMs, or None. record: function that captures a
    graph; None for a `Recorder`. casts: as in `Pipeline`.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        mesh: Mesh,
        device: torch.device,
        peers: Peers | None = None,
        record: Callable[[Callable[[], None]], Replayable] | None = None,
        casts: WeightCasts | None = None,
    ):
        super().__init__(chunks, mesh, device, casts)
        assert mesh.pp.size == len(self.chunks) == 1
        self._peers, self._record = peers, record or Recorder()
        self._compiled: set[tuple[str, ...]] = set()
        self._recorded: dict[tuple[str, ...], _Recorded] = {}

    def run(
        self,
        plan: Plan,
        batches: Sequence[Batch],
        scales: Sequence[torch.Tensor] | None = None,
        grads: GradBuffer | None = None,
    ) -> torch.Tensor:
        names = [tuple(batch.tensors()) for batch in batches]
        if scales is None or grads is None or not self._compiled.issuperset(names):
            if grads is not None:
                self._compiled.update(names)
            return super().run(plan, batches, scales, grads)
        with self.casts.shared():
            return self._replay(batches, scales, grads, names)

    def _replay(
        self,
        batches: Sequence[Batch],
        scales: Sequence[torch.Tensor],
        grads: GradBuffer,
        names: Sequence[tuple[str, ...]],
    ) -> torch.Tensor:
        """Run a training step whose batches have the optional tensors `names`, each of which has run before."""
        # Hooks do not run in a replay, so first wait for all weights, and finally mark all gradients as complete.
        grads.wait_param_gather()
        zero_unwritten(grads)
        self.casts.renew()
        sums = torch.empty(len(batches), len(self.names), 2, dtype=torch.float64, device=self.device)
        eager = eager_microbatches(grads.data_ranks, len(batches))
        replayed = len(batches) - eager
        for number, (batch, scale) in enumerate(zip(batches[:replayed], scales[:replayed], strict=True)):
            ACTIVITY.moves += 1
            if names[number] not in self._recorded:
                grads.final(False)
                recorded = _Recorded(self.chunks[0], batch, scale, self._peers, self._record)
                self._recorded[names[number]] = recorded
            sums[number] = self._recorded[names[number]].play(batch, scale)
        if eager:
            sums[replayed:] = super().run(ALONE, batches[replayed:], scales[replayed:], grads)
            return sums
        grads.all_ready()
        return sums

    def close(self) -> None:
        for recorded in self._recorded.values():
            recorded.close()
        self._recorded.clear()


class _Recorded:
    """The graph of one microbatch, with the buffers for its inputs and its sums."""

    def __init__(
        self,
        stage: Stage,
        batch: Batch,
        scale: torch.Tensor,
        peers: Peers | None,
        record: Callable[[Callable[[], None]], Replayable],
    ):
        # The graph uses fixed addresses, so inputs are copied to these buffers, and the sums also have a buffer.
        self._batch = batch.map(torch.clone)
        self._scale, self._peers = scale.clone(), peers
        names = (*stage.terms, *stage.metrics)
        self._sums = torch.zeros(len(names), 2, dtype=torch.float64, device=scale.device)
        self._exchanges = 0 if peers is None else peers.count

        def work() -> None:
            with torch.enable_grad():
                out = stage(self._batch, scales=self._scale)
            self._sums.copy_(stacked(names, out))
            backward(stage.terms, out, (), self._scale)
            if peers is not None:
                peers.join()

        try:
            self._record = record(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(f"--cuda-graph: this run cannot be recorded ({error}); give --no-cuda-graph") from error
        self._end = 0 if peers is None else peers.count

    def play(self, batch: Batch, scale: torch.Tensor) -> torch.Tensor:
        """Replay the graph for `batch`. Gradients are added to `main_grad`.

        Returns the sums of the microbatch as in `Pipeline.run`; the next call overwrites these sums.
        """
        for buffer, tensor in zip(self._batch.tensors().values(), batch.tensors().values(), strict=True):
            buffer.copy_(tensor)
        self._scale.copy_(scale)
        if self._peers is not None:
            self._peers.replay(self._exchanges)
        self._record.play()
        if self._peers is not None:
            self._peers.count = self._end
        return self._sums

    def close(self) -> None:
        del self._record  # NCCL cannot destroy a group while a graph that uses it exists
