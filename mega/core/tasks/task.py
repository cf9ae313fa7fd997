"""What a benchmark is, and its score in any layout: examples shared over the data ranks, sums added up over all.

A benchmark is one file: it reads examples, makes batches of them, and judges what the model says. It knows no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from mega.core.batch import Batch, Terms, zigzag
from mega.core.parallel.collectives import all_gather, all_reduce
from mega.core.training.state import TrainState
from mega.core.training.step import output_step

Example = TypeVar("Example")


class Benchmark(Protocol[Example]):
    """name: as a user types it. terms: the names of what `measure` finds."""

    name: str
    terms: tuple[str, ...]

    def examples(self, path: Path) -> Sequence[Example]:
        """Everything that is scored, the same on every rank. Errors: ValueError naming file and line."""

    def batch(self, examples: Sequence[Example]) -> Batch:
        """One microbatch. Rows are padded to a length that tensor ranks (sequence parallelism) and context ranks can
        split."""

    def measure(self, batch: Any, outputs: torch.Tensor) -> Terms:
        """Sums over the examples of a batch of ours. outputs: logits [b, s, vocab], of all ranks."""


def score(state: TrainState, benchmark: Benchmark[Example], path: Path, micro_batch: int) -> dict[str, float]:
    """The mean of every term over all examples, the same on every rank; all ranks call it. NaN where nothing counts.

    1 every data rank takes its share; all play the same number of microbatches
    2 the ranks of the last stage gather the whole vocabulary and all columns, and measure
    3 sums are added up over all ranks

    Errors: ValueError where there are no examples.
    """
    examples = benchmark.examples(path)
    if not examples:
        raise ValueError(f"{path}: holds no examples for {benchmark.name}")
    sums = torch.zeros(len(benchmark.terms), 2, dtype=torch.float64, device=state.device.torch)
    # 1
    for turn in _turns(state, examples, micro_batch):
        batches = [benchmark.batch(group).to(state.device.torch) for group, _ in turn]
        # 2
        for number, outputs in enumerate(output_step(state, batches)):
            logits = _whole(state, outputs)
            if turn[number][1] and state.mesh.cp.first:
                found = benchmark.measure(batches[number], logits)
                sums += torch.stack([torch.stack([*found[name]]).double() for name in benchmark.terms])
    # 3
    all_reduce(sums, state.mesh.loss_group)
    return dict(zip(benchmark.terms, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))


def _turns(
    state: TrainState, examples: Sequence[Example], micro_batch: int
) -> Iterator[list[tuple[Sequence[Example], bool]]]:
    """Microbatches of this data rank that are in the pipeline together, and whether each counts.

    Ranks that are left without examples in the last turn play the first ones again, which do not count.
    """
    dp, together = state.mesh.dp, 4 * state.mesh.pp.size - 3
    groups = [examples[first : first + micro_batch] for first in range(0, len(examples), micro_batch)]
    own = [(group, True) for group in groups[dp.index :: dp.size]]
    own += [(groups[0], False)] * (-(-len(groups) // dp.size) - len(own))
    for first in range(0, len(own), together):
        yield own[first : first + together]


def _whole(state: TrainState, outputs: torch.Tensor) -> torch.Tensor:
    """[b, s of this context rank, ids of this tensor rank] -> [b, s, vocab]."""
    tp, cp = state.mesh.tp, state.mesh.cp
    logits = all_gather(outputs.movedim(2, 0), tp).movedim(0, 2)[..., : state.run.model.vocab]
    columns = torch.arange(logits.shape[1] * cp.size, device=logits.device)[None]
    order = torch.cat([zigzag(columns, index, cp.size)[0] for index in range(cp.size)]).argsort()
    return all_gather(logits.transpose(0, 1), cp)[order].transpose(0, 1)
