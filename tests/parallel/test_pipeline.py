"""The executor against torch's own pipeline as a numerical oracle, and against a model that is not cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mega.core.batch import DecoderBatch, Term
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.parallel.pipeline import Pipeline, StageOutput
from mega.core.plan import plan
from mega.core.processes.pool import Pool
from tests.support.ranks import CPU, random

WIDTH, ROWS, COLUMNS, MICROBATCHES = 6, 2, 3, 5


class Piece(nn.Module):
    """Global stage `number`: a matrix and tanh. Two tensors travel, and every stage also has a loss of its own."""

    terms, metrics = ("main", "side"), ("largest",)

    def __init__(self, number: int, last: bool):
        super().__init__()
        self.number, self.last = number, last
        self.matrix = nn.Parameter(random(WIDTH, WIDTH, seed=number))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.matrix).tanh()

    def forward(
        self, batch: DecoderBatch, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        x, total = cargo if cargo else (source(batch), torch.zeros(ROWS, dtype=torch.float64))
        x = self.compute(x)
        total = total + x.sum((1, 2))
        side = Term(x.abs().sum(), torch.tensor(float(ROWS)))
        if not self.last:
            return StageOutput(cargo=(x, total), terms={"side": side})
        main = Term(x.square().sum() + total.sum(), batch.loss_weights.sum())
        largest = Term(x.detach().max(), torch.ones(()))
        return StageOutput((), {"main": main, "side": side}, {"largest": largest}, x if outputs else None)

    def cargo(self, batch: DecoderBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((*batch.tokens.shape, WIDTH), torch.float64), ((len(batch.tokens),), torch.float64)]


def source(batch: DecoderBatch) -> torch.Tensor:
    """float64 [ROWS, COLUMNS, WIDTH], other for every microbatch."""
    return random(ROWS, COLUMNS, WIDTH, seed=1000 + int(batch.samples[0]))


def batches() -> list[DecoderBatch]:
    ids = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
    weights = torch.ones(ROWS, COLUMNS)
    return [DecoderBatch(ids, ids, weights, ids, torch.full((ROWS,), number)) for number in range(MICROBATCHES)]


def through(pieces: list[Piece], batch: DecoderBatch) -> list[StageOutput]:
    """What every piece makes of a batch, one after the other."""
    found = [StageOutput()]
    for piece in pieces:
        found.append(piece(batch, *found[-1].cargo, outputs=True))
    return found[1:]


SCALES = [torch.tensor([1.0 / (number + 1), 0.5 + number], dtype=torch.float64) for number in range(MICROBATCHES)]
"""Factors of `main` and `side`."""


def uncut(stages: int) -> list[torch.Tensor]:
    """Gradients of all pieces on one process, microbatch i's losses scaled by `SCALES[i]`."""
    pieces = [Piece(number, number == stages - 1) for number in range(stages)]
    loss = torch.zeros((), dtype=torch.float64)
    for number, batch in enumerate(batches()):
        for out in through(pieces, batch):
            for name, scale in zip(Piece.terms, SCALES[number], strict=True):
                loss = loss + (out.terms[name].total * scale if name in out.terms else 0)
    loss.backward()
    gradients = [piece.matrix.grad for piece in pieces]
    return [gradient for gradient in gradients if gradient is not None]


def ours(groups: Groups, rank: int, ranks: int, chunks: int, kind: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sums and this rank's gradients, of the second of two steps: nothing may be left over from the first."""
    mesh = Mesh(rank, pp=ranks, groups=groups)
    stages = ranks * chunks
    pieces = [Piece(chunk * ranks + rank, chunk * ranks + rank == stages - 1) for chunk in range(chunks)]
    pipeline = Pipeline(pieces, mesh, CPU)
    schedule = plan(kind, ranks, chunks, MICROBATCHES)
    for _ in range(2):
        for piece in pieces:
            piece.matrix.grad = None
        sums = pipeline.run(schedule, batches(), SCALES).sum(0)
    gradients = [piece.matrix.grad for piece in pieces]
    return sums, [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks"),
    [("gpipe", 4, 1), ("1f1b", 1, 1), ("1f1b", 3, 1), ("1f1b", 4, 1), ("interleaved", 2, 3), ("interleaved", 4, 2)],
)
def test_cut_and_uncut(pool: Pool, kind: str, ranks: int, chunks: int) -> None:
    results = pool.run(ours, ranks, chunks, kind, world=ranks)
    expected = uncut(ranks * chunks)
    for rank, (_, gradients) in enumerate(results):
        assert len(gradients) == chunks
        for chunk, gradient in enumerate(gradients):
            torch.testing.assert_close(gradient, expected[chunk * ranks + rank], rtol=1e-12, atol=1e-12)
    sums = [result[0] for result in results]
    assert not any(one[[0, 2]].any() for one in sums[:-1]), "main and largest arise on the last stage"
    assert sums[-1][0, 1] == ROWS * COLUMNS * MICROBATCHES and sums[-1][2, 1] == MICROBATCHES
    assert sum(one[1, 1] for one in sums) == ROWS * MICROBATCHES * ranks * chunks


def forwards(groups: Groups, rank: int, ranks: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    mesh = Mesh(rank, pp=ranks, groups=groups)
    piece = Piece(rank, rank == ranks - 1)
    pipeline, schedule = Pipeline([piece], mesh, CPU), plan("forward", ranks, 1, MICROBATCHES)
    sums, outputs = pipeline.run(schedule, batches()).sum(0), pipeline.outputs(schedule, batches())
    assert piece.matrix.grad is None
    return sums, outputs


def test_forward_only(pool: Pool) -> None:
    results = pool.run(forwards, 3, world=3)
    pieces = [Piece(number, number == 2) for number in range(3)]
    expected = [through(pieces, batch) for batch in batches()]
    main = sum(float(outs[-1].terms["main"].total.detach()) for outs in expected)
    side = sum(float(out.terms["side"].total.detach()) for outs in expected for out in outs)
    assert float(results[-1][0][0, 0]) == pytest.approx(main, rel=1e-12)
    assert sum(float(sums[1, 0]) for sums, _ in results) == pytest.approx(side, rel=1e-12)
    assert [len(outputs) for _, outputs in results] == [0, 0, MICROBATCHES]
    for output, outs in zip(results[-1][1], expected, strict=True):
        assert outs[-1].outputs is not None and torch.equal(output, outs[-1].outputs.detach())


class _Plain(nn.Module):
    """A piece as torch's pipeline takes it: one tensor in, one out."""

    def __init__(self, piece: Piece):
        super().__init__()
        self.piece = piece

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.piece.compute(x)


class _Alone(Piece):
    """The same piece for our executor: one tensor in, one out."""

    terms, metrics = ("main",), ()

    def forward(
        self, batch: DecoderBatch, *cargo: torch.Tensor, outputs: bool = False, scales: torch.Tensor | None = None
    ) -> StageOutput:
        x = self.compute(cargo[0] if cargo else source(batch))
        term = Term(x.square().sum(), batch.loss_weights.sum())
        return StageOutput(terms={"main": term}) if self.last else StageOutput(cargo=(x,))

    def cargo(self, batch: DecoderBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((*batch.tokens.shape, WIDTH), torch.float64)]


def against_torch(groups: Groups, rank: int, ranks: int, kind: Any, chunks: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    numbers = range(rank, ranks * chunks, ranks)
    theirs = [_Plain(Piece(number, number == ranks * chunks - 1)) for number in numbers]
    stages = [PipelineStage(one, number, ranks * chunks, CPU) for one, number in zip(theirs, numbers, strict=True)]
    make: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}[kind]
    given: Any = stages if chunks > 1 else stages[0]
    schedule = make(given, MICROBATCHES, loss_fn=lambda y, _: y.square().sum(), scale_grads=False)
    whole = torch.cat([source(batch) for batch in batches()])
    if rank == 0:
        schedule.step(whole)
    elif rank == ranks - 1:
        schedule.step(target=whole)
    else:
        schedule.step()

    ours = [_Alone(number, number == ranks * chunks - 1) for number in numbers]
    scales = [torch.ones(1, dtype=torch.float64)] * MICROBATCHES
    pipeline = Pipeline(ours, Mesh(rank, pp=ranks, groups=groups), CPU)
    pipeline.run(plan(kind, ranks, chunks, MICROBATCHES), batches(), scales)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.matrix.grad, other.piece.matrix.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_torchs_pipeline_agrees(pool: Pool, kind: str, chunks: int) -> None:
    pool.run(against_torch, 3, kind, chunks, world=3)
