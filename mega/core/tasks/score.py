"""How likely a model holds every token of a text, in any layout. Batches in, numbers out: it knows no tokenizer.

The last stage turns its logits into two numbers a token where they arise, so that no vocabulary is ever gathered, and
no logits wait for the pipeline's other microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mega.core.architecture import architecture
from mega.core.batch import Batch, DecoderBatch, zigzag
from mega.core.config.sections import ModelConfig
from mega.core.device import Device
from mega.core.family import ModelStage
from mega.core.ops.suite import Ops
from mega.core.parallel.collectives import all_gather
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.pipeline import Pipeline, Stage, StageOutput
from mega.core.parallel.vocab import TokenScores, score_labels
from mega.core.plan import plan


class _Scorer:
    """A model in its layout. stages: this rank's, in evaluation. together: microbatches that keep the pipeline busy."""

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, device: Device):
        self.mesh, self.device, self.together = mesh, device, 4 * mesh.pp.size - 3
        self._pipeline = Pipeline(stages, mesh, device.torch)

    @torch.no_grad()
    def _outputs(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """What the last stage gives of each batch's columns of this context rank; [] on other stages.

        All ranks call this with the same number of batches; those of one data coordinate with the same batches.
        """
        mesh, pipeline = self.mesh, self._pipeline
        own = [batch.to(self.device.torch).split(mesh.cp.index, mesh.cp.size) for batch in batches]
        return pipeline.outputs(plan("forward", mesh.pp.size, len(pipeline.chunks), len(own)), own)


class TokenScorer(_Scorer):
    """greedy: say too whether a label is the likeliest id. reads: adds to a batch what the model reads besides."""

    def __init__(
        self,
        model: ModelConfig,
        stages: Sequence[ModelStage],
        mesh: Mesh,
        device: Device,
        ops: Ops,
        *,
        greedy: bool,
        reads: Callable[[DecoderBatch], DecoderBatch] | None = None,
    ):
        vocab = architecture(model).input.vocab
        super().__init__([_Judge(stage, vocab, mesh.tp, ops, greedy) for stage in stages], mesh, device)
        self._greedy, self._reads = greedy, reads

    def score(self, batches: Sequence[Batch]) -> list[TokenScores]:
        """Of the labels of each batch, [b, s], whole rows on every rank of the last stage."""
        if self._reads is not None:
            rows = [each for each in batches if isinstance(each, DecoderBatch)]
            assert len(rows) == len(batches), "only decoders read neighbours"
            batches = [self._reads(each) for each in rows]
        whole = [_whole_rows(each, self.mesh.cp) for each in self._outputs(batches)]
        return [TokenScores(each[..., 0], each[..., 1].bool() if self._greedy else None) for each in whole]


class RowScorer(_Scorer):
    """A model whose head judges whole rows."""

    def score(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Logits of the classes, [rows, classes], on every rank of the last stage, right on the first context rank."""
        return self._outputs(batches)


class _Judge:
    """A stage whose output is what it says of the labels of a batch, [b, s, 2]: nll and greedy."""

    def __init__(self, stage: ModelStage, vocab: int, axis: Axis, ops: Ops, greedy: bool):
        self._stage, self._vocab, self._axis, self._ops, self._greedy = stage, vocab, axis, ops, greedy
        self.terms, self.metrics = stage.terms, stage.metrics

    def cargo(self, batch: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return self._stage.cargo(batch)

    def weights(self, batch: Any) -> Mapping[str, torch.Tensor]:
        return self._stage.weights(batch)

    def __call__(
        self, batch: Any, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        output = self._stage(batch, *cargo, outputs=outputs)
        if output.outputs is None:
            return output
        logits, labels = output.outputs.flatten(0, 1), batch.labels.flatten()
        found = score_labels(logits, labels, self._vocab, self._axis, self._ops, greedy=self._greedy)
        greedy = torch.zeros_like(found.nll) if found.greedy is None else found.greedy.to(found.nll.dtype)
        return replace(output, outputs=torch.stack([found.nll, greedy], -1).view(*batch.labels.shape, 2))


def _whole_rows(part: torch.Tensor, cp: Axis) -> torch.Tensor:
    """[b, columns of this context rank, ...] -> [b, s, ...]."""
    if cp.size == 1:
        return part
    columns = torch.arange(part.shape[1] * cp.size, device=part.device)[None]
    order = torch.cat([zigzag(columns, index, cp.size)[0] for index in range(cp.size)]).argsort()
    return all_gather(part.transpose(0, 1), cp)[order].transpose(0, 1)
