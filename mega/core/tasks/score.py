"""Compute the log-likelihood of every token of a text, in any layout. This module maps batches to numbers and does not
depend on the tokenizer.

The last stage immediately reduces logits to two numbers per token, so that no rank gathers logits of the whole
vocabulary, and no logits are stored while other microbatches are in the pipeline.
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
    """A model in a parallel layout. stages: this rank's stages, in evaluation mode. together: number of microbatches
    per call, chosen to keep the pipeline busy."""

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, device: Device):
        self.mesh, self.device, self.together = mesh, device, 4 * mesh.pp.size - 3
        self._pipeline = Pipeline(stages, mesh, device.torch)

    @torch.no_grad()
    def _outputs(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return, for each batch, the last stage's output for this context rank's columns; [] on other stages.

        All ranks must call this method with the same number of batches; ranks with the same data coordinate must pass
        the same batches.
        """
        mesh, pipeline = self.mesh, self._pipeline
        split_batches = [batch.to(self.device.torch).split(mesh.cp.index, mesh.cp.size) for batch in batches]
        return pipeline.outputs(plan("forward", mesh.pp.size, len(pipeline.chunks), len(split_batches)), split_batches)


class TokenScorer(_Scorer):
    """A scorer of labels. greedy: whether to compare each label with the most likely id. reads: function that adds
    neighbours to a batch, for a model with a retriever."""

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
        """Return the scores [b, s] of the labels of each batch, with whole rows on every rank of the last stage."""
        if self._reads is not None:
            rows = [each for each in batches if isinstance(each, DecoderBatch)]
            assert len(rows) == len(batches), "only decoders read neighbours"
            batches = [self._reads(each) for each in rows]
        whole = [_whole_rows(each, self.mesh.cp) for each in self._outputs(batches)]
        return [TokenScores(each[..., 0], each[..., 1].bool() if self._greedy else None) for each in whole]


class RowScorer(_Scorer):
    """A scorer of rows, for a model whose head classifies rows."""

    def score(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return class logits [rows, classes] on every rank of the last stage; only the logits on the first context
        rank are valid."""
        return self._outputs(batches)


class _Judge:
    """A stage that outputs the negative log-likelihood and the greedy flag of each label, [b, s, 2]."""

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
        scores = score_labels(logits, labels, self._vocab, self._axis, self._ops, greedy=self._greedy)
        greedy = torch.zeros_like(scores.nll) if scores.greedy is None else scores.greedy.to(scores.nll.dtype)
        return replace(output, outputs=torch.stack([scores.nll, greedy], -1).view(*batch.labels.shape, 2))


def _whole_rows(part: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Gather rows over context ranks: [b, columns of this context rank, ...] -> [b, s, ...]."""
    if cp.size == 1:
        return part
    columns = torch.arange(part.shape[1] * cp.size, device=part.device)[None]
    order = torch.cat([zigzag(columns, index, cp.size)[0] for index in range(cp.size)]).argsort()
    return all_gather(part.transpose(0, 1), cp)[order].transpose(0, 1)
