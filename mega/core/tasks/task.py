"""The interface of a benchmark, and its evaluation in any layout: examples are distributed over data ranks, and sums
are reduced.

A benchmark is one file, which reads examples, makes batches of examples, and measures the model's scores. Unlike this
module, a benchmark does not depend on ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from mega.core.batch import Batch, Terms
from mega.core.parallel.collectives import all_reduce
from mega.core.tasks.score import RowScorer, TokenScorer

Example = TypeVar("Example")
SPAN_SECONDS = 2.0
"""Approximate time between two reductions of the sums over all ranks, in seconds."""
MOST_TURNS = 512


class Estimate(NamedTuple):
    """A mean over examples, with the uncertainty of the mean."""

    mean: float
    error: float  # standard error of the mean, if the examples are a random sample
    weight: float  # the divisor of the mean: number of tokens or passages
    examples: int


class Figure(NamedTuple):
    """One figure of a result. low, high: the ends of the 95 % confidence interval, or None."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def interval(name: str, found: Estimate, of: Callable[[float], float] = float) -> Figure:
    """Return `of(mean)` as a figure with a 95 % confidence interval. `of` is an increasing function."""
    spread = 1.96 * found.error
    if math.isnan(spread):
        return Figure(name, of(found.mean))
    return Figure(name, of(found.mean), of(found.mean - spread), of(found.mean + spread))


def as_share(value: float) -> float:
    """Clamp a fraction, or an end of its confidence interval, to [0, 1]."""
    return min(max(value, 0.0), 1.0)


class Benchmark(Protocol[Example]):
    """A benchmark of texts or rows."""

    name: str  # name in --task
    terms: tuple[str, ...]  # the names of the terms that `measure` returns
    greedy: bool  # whether `measure` compares each label with the most likely id
    headline: tuple[str, ...]  # the figures in Megatron-LM's line of results

    def examples(self, path: Path) -> Sequence[Example]:
        """Return all examples to score, identical on every rank. Errors: ValueError naming file and line."""

    def batch(self, examples: Sequence[Example]) -> Batch:
        """Make one microbatch, with rows padded to a length that tensor ranks (sequence parallelism) and context ranks
        can split evenly."""

    def measure(self, batch: Any, scores: Any) -> Terms:
        """Return the total and the weight of each term for every example, [b]. batch: a batch that the method `batch`
        returned. scores: `TokenScores`, [b, s]."""

    def figures(self, found: Mapping[str, Estimate]) -> list[Figure]:
        """Return the figures to report, in order, computed from the estimates of all terms."""


@runtime_checkable
class RowBenchmark(Benchmark[Example], Protocol[Example]):
    """A benchmark that classifies rows with the model's head. The scores for `measure` are the logits of the classes,
    [b, classes]. The probabilities of the classes are stored for every example."""

    @property
    def classes(self) -> int: ...

    def numbers(self, batch: object) -> torch.Tensor:
        """Return the indices of a batch's examples among all examples, int64 [b]."""

    def predictions(self, probabilities: torch.Tensor) -> list[dict[str, object]]:
        """Return the prediction to store for every example, in order. probabilities: [examples, classes]."""


class Sums:
    """Sums over examples for each term: count, total, weight, and the squares and products for the standard error.

    values: float64 [terms, 6]. Sums over disjoint sets of examples can be added, so an interrupted evaluation can
    continue.
    shares: float64 [examples, classes], probabilities of the classes for the examples scored so far, if the benchmark
    classifies rows.
    """

    def __init__(self, names: Sequence[str], values: torch.Tensor | None = None, shares: torch.Tensor | None = None):
        self.names, self.shares = tuple(names), shares
        self.values = torch.zeros(len(self.names), 6, dtype=torch.float64) if values is None else values

    def add(self, found: Terms) -> None:
        for row, name in zip(self.values, self.names, strict=True):
            total, weight = (each.detach().double() for each in (found[name].total, found[name].weight))
            ones = torch.ones_like(total)
            row += torch.stack([ones, total, weight, total * total, total * weight, weight * weight]).sum(1)

    def zeros(self, examples: int, where: torch.device) -> Sums:
        """Return empty sums, with space for the probabilities of the next `examples` examples."""
        values = torch.zeros(len(self.names), 6, dtype=torch.float64, device=where)
        if self.shares is None:
            return Sums(self.names, values)
        return Sums(self.names, values, torch.zeros(examples, self.shares.shape[1], dtype=torch.float64, device=where))

    def join(self, part: Sums) -> None:
        """Add `part`, which contains the sums over the next examples."""
        self.values += part.values.cpu()
        if self.shares is not None and part.shares is not None:
            self.shares = torch.cat([self.shares, part.shares.cpu()])

    def estimates(self) -> dict[str, Estimate]:
        """Return the ratio of sums for each term, with a standard error by linearisation (Cochran 1977, section 6.4);
        NaN for a term whose total weight is 0."""
        return {name: _estimate(*row) for name, row in zip(self.names, self.values.tolist(), strict=True)}


def _estimate(count: float, total: float, weight: float, squares: float, cross: float, weights: float) -> Estimate:
    """
    >>> _estimate(4, 2, 4, 2, 2, 4)  # two of four right: sqrt(1/4 / 3)
    Estimate(mean=0.5, error=0.28867513459481287, weight=4, examples=4)
    """
    mean = total / weight if weight else math.nan
    spread = max(squares - 2 * mean * cross + mean * mean * weights, 0.0) if weight else math.nan
    error = math.sqrt(count / (count - 1) * spread) / weight if weight and count > 1 else math.nan
    return Estimate(mean, error, weight, int(count))


@dataclass(frozen=True)
class Done:
    """The progress of an evaluation."""

    examples: int = 0
    """Number of scored examples, counted from the first example."""
    tokens: int = 0
    """Number of tokens in all batches, including padding."""
    seconds: float = 0.0
    """Time spent in this process, in seconds."""


def score(
    scorer: TokenScorer | RowScorer,
    benchmark: Benchmark[Example],
    examples: Sequence[Example],
    micro_batch: int,
    *,
    sums: Sums | None = None,
    done: Done = Done(),
    after: Callable[[Done, Sums], None] = lambda done, sums: None,
) -> dict[str, Estimate]:
    """Score all examples. Return one estimate per term, identical on all ranks; NaN if the term's total weight is 0.

    1 every data rank batches its share of the next examples; all ranks run the same number of microbatches
    2 the ranks of the last stage measure whole rows
    3 the sums are reduced over all ranks; 1 to 3 are repeated for the next examples

    sums, done: results and progress of an earlier process. after: called every few seconds with the current values.
    """
    mesh, device = scorer.mesh, scorer.device.torch
    total_sums = Sums(benchmark.terms) if sums is None else sums
    turns, turn_size = 1, micro_batch * mesh.dp.size * scorer.together
    while done.examples < len(examples):
        begin, tokens = time.monotonic(), 0
        stop = min(done.examples + turns * turn_size, len(examples))
        part = total_sums.zeros(stop - done.examples, device)
        # 1
        for first in range(done.examples, stop, turn_size):
            turn = [examples[number] for number in range(first, min(first + turn_size, stop))]
            groups = shares(turn, micro_batch, mesh.dp.index, mesh.dp.size)
            batches = [benchmark.batch(group) for group, _ in groups]
            tokens += sum(int(batch.tensors()["tokens"].numel()) for batch in batches)
            # 2
            batch_scores: Sequence[Any] = scorer.score(batches)
            for batch, scores, (_, counts) in zip(batches, batch_scores, groups, strict=False):
                if counts and mesh.cp.first:
                    part.add(benchmark.measure(batch.to(device), scores))
                    if part.shares is not None and isinstance(benchmark, RowBenchmark):
                        rows = benchmark.numbers(batch).to(device) - done.examples
                        part.shares[rows] = scores.double().softmax(-1)
        # 3
        all_reduce(part.values, mesh.loss_group)
        if part.shares is not None:
            all_reduce(part.shares, mesh.loss_group)
        total_sums.join(part)  # copies to the host, and so waits for the device before the time is measured
        spent = torch.tensor([time.monotonic() - begin, float(tokens)], dtype=torch.float64, device=device)
        all_reduce(spent, mesh.everyone, "max")
        seconds, most_tokens = spent.tolist()
        done = Done(stop, done.tokens + int(most_tokens) * mesh.dp.size, done.seconds + seconds)
        after(done, total_sums)
        turns = min(max(1, int(turns * SPAN_SECONDS / max(seconds, 1e-3))), 2 * turns, MOST_TURNS)
    return total_sums.estimates()


def shares(turn: Sequence[Example], micro_batch: int, index: int, size: int) -> list[tuple[Sequence[Example], bool]]:
    """Split examples into the microbatches of data rank `index` of `size`, and return each microbatch and whether its
    scores are used.

    Ranks without enough examples repeat the first microbatch, whose scores are ignored.
    """
    groups = [turn[first : first + micro_batch] for first in range(0, len(turn), micro_batch)]
    microbatches = [(group, True) for group in groups[index::size]]
    return microbatches + [(groups[0], False)] * (-(-len(groups) // size) - len(microbatches))
