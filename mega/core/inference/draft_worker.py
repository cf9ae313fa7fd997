"""Run one rank's share of the steps that guess tokens with the model's own multi-token prediction layers.

The layers are on the ranks of the last pipeline stage. They have a pool of keys and values with the same slots as the
model's pool, so a token has the same slot in both pools. Each step of the model also stores the output of the final
norm for each slot. This output is the input of the first layer:

    the model's step    keys and values of the stage's layers; output of the final norm -> slot
    step of depth 0     output of the final norm <- slot; keys and values of layer 1; output of layer 1; guesses
    step of depth 1     output of layer 1; keys and values of layer 2; ...

Guesses stay on the device until the steps of all depths have started. A step depends only on the content of tensors, so
steps are captured as CUDA graphs like the model's steps (graphs.py). This module does not depend on requests.
"""

from __future__ import annotations

import torch

from mega.core.device import HostArray
from mega.core.inference.graphs import StepGraphs
from mega.core.inference.step import Step
from mega.core.inference.worker import Launched, Worker, begin_step, graphs_of, keep_latest, paged_cache
from mega.core.model.decode_ahead import AheadStep

RUNS = 64
"""Maximum number of sequences in a step that guesses tokens, and maximum number of tokens in a captured step."""

CHUNK = 512
"""Maximum number of tokens in a step that guesses tokens."""


class AheadWorker:
    """Runs the steps that guess tokens on one rank of the model. Ranks of earlier stages only receive the results.

    worker: this rank's worker, whose steps this class changes to store hidden states. blocks, block: number and size of
    the blocks in the worker's cache. graphs: whether to capture steps as CUDA graphs, if the attention implementation
    supports this.
    """

    def __init__(self, worker: Worker, blocks: int, block: int, *, graphs: bool):
        model, device, dtype = worker.stage.architecture, worker.device, worker.stage.dtype
        self._worker, self.depths = worker, len(model.output.ahead)
        self._steps: list[AheadStep] = []
        self.graphs: list[StepGraphs] = []
        """The graphs of each depth; empty if steps are not captured."""
        if not worker.mesh.pp.last:
            return
        windows = [each.layer.attention.window for each in model.output.ahead]
        pool, tp = (blocks, block), worker.mesh.tp
        self.cache = paged_cache(worker.stage, windows, device, pool, len(model.layers), tp=tp)
        self.states = torch.zeros(blocks * block, model.hidden, dtype=dtype, device=device)
        """The output of the model's final norm for each slot of the cache."""
        worker.decode.keep = self._store
        self._latest = torch.zeros(worker.requests * self.depths + 1, dtype=torch.long, device=device)
        self._streams = [torch.zeros(CHUNK, model.hidden, dtype=dtype, device=device) for _ in range(self.depths - 1)]
        for depth in range(self.depths):
            step = AheadStep(worker.stage, depth, worker.decode.parts, self._read, self._keep)
            self._steps.append(step)
            if graphs and self.cache.attention.graphs:
                self.graphs.append(graphs_of(worker, step, self.cache, self._latest, (True, True), RUNS, 0))

    def _store(self, normed: torch.Tensor) -> None:
        """Store the output of the final norm, [tokens, h], for the tokens of the model's current step."""
        self.states.index_copy_(0, self._worker.cache.slots, normed)

    def _read(self, depth: int) -> torch.Tensor:
        """Return the input of the layer at the given depth, [tokens, h], for the tokens of the current step."""
        if depth == 0:
            return self.states.index_select(0, self.cache.slots)
        return self._streams[depth - 1][: len(self.cache.slots)]

    def _keep(self, depth: int, stream: torch.Tensor) -> None:
        """Copy the output of the layer at the given depth, [tokens, h], for the step of the next depth."""
        # The copy must not overwrite the input of the same depth, because each depth is computed twice when its graph
        # is captured.
        if depth < len(self._streams):
            self._streams[depth][: len(stream)].copy_(stream)

    @torch.inference_mode()
    def launch(self, depth: int, step: Step) -> Launched:
        """Start a step of one depth on the device. `step.requests` contains the index request * depths + depth for each
        guess. Errors: the same as for the model's steps."""
        worker, result = self._worker, None
        if worker.mesh.pp.last:
            logits = self._computed(depth, step)
            if len(step.wanted):
                result = worker.choose(logits, step)
                if depth + 1 < self.depths:
                    keep_latest(self._latest, result, step, worker.mesh.tp)
        if not len(step.wanted):
            return Launched(step, None)
        if worker.mesh.pp.size == 1:
            return Launched(step, HostArray(result) if result is not None else None)
        arriving = worker.transfer(result, step)
        return Launched(step, arriving if arriving.found is not None else None)

    def _computed(self, depth: int, step: Step) -> torch.Tensor:
        shape = self.graphs[depth].shape_of(step) if self.graphs else None
        if shape is not None:
            return self.graphs[depth](step, None, shape)
        return self._steps[depth](*begin_step(step, self.cache, self._latest, None), self.cache)

    def close(self) -> None:
        for graphs in self.graphs:
            graphs.close()
