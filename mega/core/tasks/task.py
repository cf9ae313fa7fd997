"""What a benchmark is, and its score in any layout: examples shared over the data ranks, sums added up over all.

A benchmark is one file: it reads examples, makes batches of them, and judges what the model says. The benchmark
knows no ranks; this file does.
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
"""About how long ranks work between two moments at which they add up what they have."""
MOST_TURNS = 512


class Estimate(NamedTuple):
    """mean: of all examples. error: its standard error, the examples taken as a sample. weight: what the mean divides
    by (tokens, passages). examples: how many there are."""

    mean: float
    error: float
    weight: float
    examples: int


class Figure(NamedTuple):
    """One number of a score, and the ends of its 95 % confidence interval where it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def interval(name: str, found: Estimate, of: Callable[[float], float] = float) -> Figure:
    """A figure that is a growing function of a mean, with its 95 % confidence interval."""
    spread = 1.96 * found.error
    if math.isnan(spread):
        return Figure(name, of(found.mean))
    return Figure(name, of(found.mean), of(found.mean - spread), of(found.mean + spread))


def as_share(value: float) -> float:
    """A mean of zeros and ones, or an end of its interval, which may lie past what it can be."""
    return min(max(value, 0.0), 1.0)


class Benchmark(Protocol[Example]):
    """name: as a user types it. terms: the names of what `measure` finds. greedy: whether it needs to know of each
    label if the model's first choice was it. headline: the figures that Megatron-LM's line of results has."""

    name: str
    terms: tuple[str, ...]
    greedy: bool
    headline: tuple[str, ...]

    def examples(self, path: Path) -> Sequence[Example]:
        """Everything that is scored, the same on every rank. Errors: ValueError naming file and line."""

    def batch(self, examples: Sequence[Example]) -> Batch:
        """One microbatch. Rows are padded to a length that tensor ranks (sequence parallelism) and context ranks can
        split."""

    def measure(self, batch: Any, scores: Any) -> Terms:
        """Totals and weights of every example, [b], of a batch of ours. scores: `TokenScores` of its labels, [b, s]."""

    def figures(self, found: Mapping[str, Estimate]) -> list[Figure]:
        """What is reported of the terms, in order."""


@runtime_checkable
class RowBenchmark(Benchmark[Example], Protocol[Example]):
    """One that judges rows by the classes of the model's head: its scores are these logits, [b, classes]. Of every
    example the classes' shares are kept."""

    @property
    def classes(self) -> int: ...

    def numbers(self, batch: object) -> torch.Tensor:
        """Which examples a batch holds, among all: int64 [b]."""

    def predictions(self, probabilities: torch.Tensor) -> list[dict[str, object]]:
        """What is kept of every example, in order. probabilities: [examples, classes]."""


class Sums:
    """Of each term over examples: how many, totals, weights, and the squares and products that an error needs.

    values: float64 [terms, 6]. Sums of parts of the examples add up, so they may be kept and continued. shares: float64
    [examples, classes], of the examples so far, where a benchmark judges rows.
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
        """Of so many more examples, none of which has been added."""
        values = torch.zeros(len(self.names), 6, dtype=torch.float64, device=where)
        if self.shares is None:
            return Sums(self.names, values)
        return Sums(self.names, values, torch.zeros(examples, self.shares.shape[1], dtype=torch.float64, device=where))

    def join(self, part: Sums) -> None:
        """Add those of the examples that follow."""
        self.values += part.values.cpu()
        if self.shares is not None and part.shares is not None:
            self.shares = torch.cat([self.shares, part.shares.cpu()])

    def estimates(self) -> dict[str, Estimate]:
        """Of a ratio of sums, by linearisation (Cochran 1977, section 6.4). NaN where nothing counts."""
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
    """How far a score has come. examples: scored, the first ones. tokens: of all batches, padding included.
    seconds: spent here, in this process."""

    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0


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
    """Every term over all examples, the same on every rank; all ranks call it. NaN where nothing counts.

    1 every data rank takes its share of the next examples; all play the same number of microbatches
    2 the ranks of the last stage measure whole rows
    3 sums are added up over all ranks, and those of more examples follow

    sums, done: of an earlier process, which had done that much. after: is told so every few seconds.
    """
    mesh, where = scorer.mesh, scorer.device.torch
    kept = Sums(benchmark.terms) if sums is None else sums
    turns, turn_size = 1, micro_batch * mesh.dp.size * scorer.together
    while done.examples < len(examples):
        begin, tokens = time.monotonic(), 0
        stop = min(done.examples + turns * turn_size, len(examples))
        part = kept.zeros(stop - done.examples, where)
        # 1
        for first in range(done.examples, stop, turn_size):
            turn = [examples[number] for number in range(first, min(first + turn_size, stop))]
            groups = shares(turn, micro_batch, mesh.dp.index, mesh.dp.size)
            batches = [benchmark.batch(group) for group, _ in groups]
            tokens += sum(int(batch.tensors()["tokens"].numel()) for batch in batches)
            # 2
            found: Sequence[Any] = scorer.score(batches)
            for batch, scores, (_, counts) in zip(batches, found, groups, strict=False):
                if counts and mesh.cp.first:
                    part.add(benchmark.measure(batch.to(where), scores))
                    if part.shares is not None and isinstance(benchmark, RowBenchmark):
                        rows = benchmark.numbers(batch).to(where) - done.examples
                        part.shares[rows] = scores.double().softmax(-1)
        # 3
        all_reduce(part.values, mesh.loss_group)
        if part.shares is not None:
            all_reduce(part.shares, mesh.loss_group)
        kept.join(part)  # waits for the device, before time is taken
        spent = torch.tensor([time.monotonic() - begin, float(tokens)], dtype=torch.float64, device=where)
        all_reduce(spent, mesh.everyone, "max")
        seconds, fed = spent.tolist()
        done = Done(stop, done.tokens + int(fed) * mesh.dp.size, done.seconds + seconds)
        after(done, kept)
        turns = min(max(1, int(turns * SPAN_SECONDS / max(seconds, 1e-3))), 2 * turns, MOST_TURNS)
    return kept.estimates()


def shares(turn: Sequence[Example], micro_batch: int, index: int, size: int) -> list[tuple[Sequence[Example], bool]]:
    """Microbatches of one of `size` data ranks, and whether each counts.

    Ranks that are left without examples play the first ones again, which do not count.
    """
    groups = [turn[first : first + micro_batch] for first in range(0, len(turn), micro_batch)]
    own = [(group, True) for group in groups[index::size]]
    return own + [(groups[0], False)] * (-(-len(groups) // size) - len(own))
