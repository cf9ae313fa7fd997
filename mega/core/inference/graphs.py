"""Steps of one new token a sequence as graphs of the device: recorded once for a number of rows, then played.

Asking for a block's kernels takes the host longer than the device needs for one token. What a step is made of is put
where the graph reads it; rows that are missing are padded by tokens of no sequence. Prompts are computed without. It
knows a step and what decodes it; no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from mega.core.device import Recorder, Upload
from mega.core.inference.paged_cache import PagedCache
from mega.core.inference.step import Step
from mega.core.model.decode import DecodeStep
from mega.core.ops.trial import first_line
from mega.core.parallel.replay import Replayable

EIGHT = 8
"""From here on graphs are of multiples of so many rows; below, of powers of two."""

log = logging.getLogger(__name__)


Record = Callable[[Callable[[], None]], Replayable]


class DecodeGraphs:
    """graphs(step, cargo, chosen) -> what `decode` gives for it, until the next one. width: blocks of the longest
    sequence. chosen: as of `known`, where the step goes by it.

    The first step of a number of rows is computed as others are, and recorded. Where that fails, or the graph gives
    another result, no further one is recorded, and a line says why. record: what records (tests). agree: of a problem
    or None, the first that a rank of the same step has, on all of them: a graph that some only play waits for ever.
    """

    def __init__(
        self,
        decode: DecodeStep,
        cache: PagedCache,
        width: int,
        record: Record | None = None,
        agree: Callable[[str | None], str | None] = lambda problem: problem,
    ):
        self._decode, self._cache, self._width, self._record = decode, cache, width, record or Recorder()
        self._agree = agree
        self._recorded: dict[int, _Graph] = {}
        self._given_up = False

    def take(self, step: Step) -> bool:
        """Whether every run is of one token, whose logits are wanted."""
        return not self._given_up and len(step.tokens) == len(step.counts) == len(step.wanted)

    def __call__(self, step: Step, cargo: torch.Tensor | None, chosen: torch.Tensor | None = None) -> torch.Tensor:
        rows = graph_rows(len(step.tokens))
        if rows in self._recorded:
            return self._recorded[rows].play(step, cargo, chosen)
        made = _Graph(self._decode, self._cache, rows, self._width, cargo)
        out = made.compute(step, cargo, chosen).clone()
        problem = self._problem(lambda: made.record(self._record))
        problem = problem or self._problem(lambda: _check(made.play(step, cargo, chosen), out))
        if problem is None:
            self._recorded[rows] = made
        else:
            self._given_up = True
            log.warning("decoding continues without a graph of %d rows: %s", rows, problem)
        return out

    def _problem(self, work: Callable[[], None]) -> str | None:
        """What went wrong in `work`, on any rank."""
        problem = None
        try:
            work()
        except RuntimeError as error:
            problem = first_line(error)
        return self._agree(problem)

    def close(self) -> None:
        self._recorded.clear()  # NCCL ends no group while a graph that speaks through it lives


def graph_rows(rows: int) -> int:
    """Rows of the graph that takes so many.

    >>> [graph_rows(rows) for rows in (1, 3, 8, 9, 17)]
    [1, 4, 8, 16, 24]
    """
    return 1 << (rows - 1).bit_length() if rows < EIGHT else -(-rows // EIGHT) * EIGHT


def rows_of_graphs(most: int) -> set[int]:
    """Rows of all graphs of steps of up to so many.

    >>> sorted(rows_of_graphs(17))
    [1, 2, 4, 8, 16, 24]
    """
    return {graph_rows(rows) for rows in range(1, most + 1)}


def known(ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """ids, int64 [n], with what the step before chose, int64 [m], in the places of `from_row`."""
    return torch.where(ids < 0, chosen.index_select(0, (~ids).clamp_(min=0)), ids)


def _check(found: torch.Tensor, out: torch.Tensor) -> None:
    """Ids that are padding have -inf in both."""
    largest = float(out[out.isfinite()].abs().max())
    if not torch.allclose(found.float(), out.float(), rtol=0.0, atol=1e-3 * largest):
        raise RuntimeError("it gives other logits")


class _Graph:
    """A step of `rows` rows, with the places of what it is given and of what it finds."""

    def __init__(self, decode: DecodeStep, cache: PagedCache, rows: int, width: int, cargo: torch.Tensor | None):
        self._decode, self._cache, device = decode, cache, cache.pool.device
        # Tokens, positions, slots, lengths and tables, one after the other: one copy brings all of them.
        self._upload = Upload(rows * (4 + width), device)
        self._ids, self._positions, self._stored, lengths, tables = self._upload.there.split_with_sizes(
            [rows] * 4 + [rows * width]
        )
        ones, none = np.ones(rows, dtype=np.int64), np.zeros((rows, width), dtype=np.int64)
        (pages,) = cache.pages(ones, ones, none)
        self._pages = [pages._replace(lengths=lengths, tables=tables.view(rows, width))]
        self._wanted = torch.arange(rows, device=device)
        self._cargo = None if cargo is None else cargo.new_zeros(rows, *cargo.shape[1:])
        self._rows, self._out = rows, torch.empty(0)
        self._graph: Replayable | None = None

    def compute(self, step: Step, cargo: torch.Tensor | None, chosen: torch.Tensor | None) -> torch.Tensor:
        """Without the graph."""
        self._put(step, cargo, chosen)
        self._work()
        return self._out[: len(step.tokens)]

    def record(self, record: Record) -> None:
        self._graph = record(self._work)

    def play(self, step: Step, cargo: torch.Tensor | None, chosen: torch.Tensor | None) -> torch.Tensor:
        assert self._graph is not None
        self._put(step, cargo, chosen)
        self._graph.play()
        return self._out[: len(step.tokens)]

    def _work(self) -> None:
        self._cache.begin(self._stored, self._pages)
        cargo = () if self._cargo is None else (self._cargo,)
        self._out = self._decode(self._ids, self._positions, self._wanted, self._cache, *cargo)

    def _put(self, step: Step, cargo: torch.Tensor | None, chosen: torch.Tensor | None) -> None:
        """A row that is missing writes to SCRATCH, which is block 0, and sees one key of it."""
        given, rows, host = len(step.tokens), self._rows, self._upload.array()
        columns, tables = host[: 4 * rows].reshape(4, rows), host[4 * rows :].reshape(rows, -1)
        columns[:, :given] = step.tokens, step.positions, step.slots, step.lengths
        columns[:, given:] = [[0], [0], [0], [1]]
        tables[:given, : step.tables.shape[1]] = step.tables
        tables[given:] = 0
        self._upload.send()
        if chosen is not None:
            self._ids.copy_(known(self._ids, chosen))
        if cargo is not None and self._cargo is not None:
            self._cargo[:given].copy_(cargo)
