"""Run steps as CUDA graphs, which are captured once per number of rows or tokens and then replayed.

For one token, the host needs more time to launch a layer's kernels than the device needs to run them. With tensor
parallelism, this is true even for a prompt. A step's arrays are copied to the graph's input memory and padded with
tokens that belong to no sequence. There are three kinds of graphs:

    single   one token per sequence, all with logits; keys are stored during the pass
    few      a few tokens per sequence; after all keys have been stored, each token is a separate run
    many     prompts and single tokens of other sequences, up to `size` tokens in total

This module does not depend on requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from mega.core.device import Recorder, Upload
from mega.core.inference.paged_cache import PagedCache, Pages
from mega.core.inference.step import Step
from mega.core.ops.paged_attention import Integers, RaggedGraph
from mega.core.ops.trial import first_line
from mega.core.parallel.replay import Replayable

EIGHT = 8
"""The number of rows in a graph is a multiple of this value, or a smaller power of two."""

FEW = (4, 8, 16, 32, 64)
"""Token counts for which graphs of kind `few` are captured."""

FEW_KEYS = 1 << 15
"""Maximum number of keys that a step of kind `few` reads. Each token reads its keys separately, so a key that several
tokens read is counted several times."""

MANY = (128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Token counts for which graphs of kind `many` are captured."""

log = logging.getLogger(__name__)


Record = Callable[[Callable[[], None]], Replayable]

Decode = Callable[..., torch.Tensor]
"""decode(ids, positions, wanted, cache, *cargo): the computation of a step; see `DecodeStep`. The launched kernels
depend only on the number of tokens and on the content of tensors."""


class GraphShape(NamedTuple):
    """The kind and size of a graph. kind: single, few or many. size: number of rows or tokens."""

    kind: str
    size: int


class StepGraphs:
    """The graphs of a stage. Calling the object with a step and the previous stage's hidden states (`cargo`) returns
    the output of `decode` for the step, valid until the next call.

    width: maximum number of blocks in a sequence. latest: int64 [requests], the last token of each request (see
    `known`). ends: whether this stage is the first stage, and whether it is the last. runs: maximum number of runs in a
    step. most: maximum number of tokens in a captured step with prompts. record: function that captures a graph
    (replaced in tests). agree: function that returns, on all ranks of the step, the error of the first rank that
    failed. Ranks must agree, because a graph that only some ranks replay would wait forever.

    The first step of a shape is computed without a graph, then captured. If the capture fails or the graph produces a
    different result, capturing is disabled and the reason is logged as a warning.
    """

    def __init__(
        self,
        decode: Decode,
        cache: PagedCache,
        width: int,
        latest: torch.Tensor,
        ends: tuple[bool, bool] = (True, True),
        runs: int = 0,
        most: int = 0,
        record: Record | None = None,
        agree: Callable[[str | None], str | None] = lambda problem: problem,
    ):
        self._decode, self._cache, self._latest, self._record = decode, cache, latest, record or Recorder()
        self._width, self._ends, self._runs, self._agree = width, ends, runs, agree
        self.many = tuple(size for size in MANY if size < most) + ((most,) if most else ())
        self._recorded: dict[GraphShape, _Graph] = {}
        self._given_up = False

    def shapes(self, rows: int) -> Iterator[GraphShape]:
        """Yield the shapes of all graphs, for steps with up to `rows` rows and for steps with prompts, in order of
        decreasing size within each kind."""
        if self._cache.attention.ragged is not None and self._runs:
            yield from (GraphShape("many", size) for size in reversed(self.many))
            yield from (GraphShape("few", size) for size in reversed(FEW))
        yield from (GraphShape("single", size) for size in sorted(rows_of_graphs(rows), reverse=True))

    def shape_of(self, step: Step) -> GraphShape | None:
        """Return the shape of the graph for a step; None if no graph fits."""
        tokens, runs, wanted_rows = len(step.tokens), len(step.counts), len(step.wanted)
        if self._given_up:
            return None
        if tokens == runs == wanted_rows:
            return GraphShape("single", graph_rows(tokens))
        if self._cache.attention.ragged is None or runs > self._runs:
            return None
        if tokens <= FEW[-1] and int((step.counts * step.lengths).sum()) <= FEW_KEYS:
            return GraphShape("few", next(size for size in FEW if size >= tokens))
        if wanted_rows > max(self._runs, FEW[-1]):
            return None
        return next((GraphShape("many", size) for size in self.many if size >= tokens), None)

    def __call__(self, step: Step, cargo: torch.Tensor | None, shape: GraphShape) -> torch.Tensor:
        if shape in self._recorded:
            return self._recorded[shape].play(step, cargo)
        graph = _Graph(self._decode, self._cache, self._parts(shape), self._latest, self._ends, cargo)
        out = graph.compute(step, cargo).clone()
        if not out.numel():  # no output to compare, so a later step is captured
            return out
        problem = self._problem(lambda: graph.record(self._record))
        problem = problem or self._problem(lambda: _check(graph.play(step, cargo), out))
        if problem is None:
            self._recorded[shape] = graph
        else:
            self._given_up = True
            log.warning("steps continue without a graph of %d rows: %s", shape.size, problem)
        return out

    def _parts(self, shape: GraphShape) -> _Parts:
        common = self._cache, shape.size, self._width
        if shape.kind == "single":
            return _SingleParts(*common)
        if shape.kind == "few":
            return _FewParts(*common)
        return _ManyParts(*common, self._runs)

    def _problem(self, work: Callable[[], None]) -> str | None:
        """Run `work`, and return the error of the first rank on which `work` failed, or None."""
        problem = None
        try:
            work()
        except RuntimeError as error:
            problem = first_line(error)
        return self._agree(problem)

    def close(self) -> None:
        self._recorded.clear()  # NCCL cannot destroy a group that a graph still uses


def graph_rows(rows: int) -> int:
    """Return the number of rows in the graph for a step of `rows` single tokens.

    >>> [graph_rows(rows) for rows in (1, 3, 8, 9, 17)]
    [1, 4, 8, 16, 24]
    """
    return 1 << (rows - 1).bit_length() if rows < EIGHT else -(-rows // EIGHT) * EIGHT


def rows_of_graphs(most: int) -> set[int]:
    """Return the row counts for which graphs are captured, for steps of up to `most` rows.

    >>> sorted(rows_of_graphs(17))
    [1, 2, 4, 8, 16, 24]
    """
    return {graph_rows(rows) for rows in range(1, most + 1)}


def known(ids: torch.Tensor, latest: torch.Tensor) -> torch.Tensor:
    """In ids, int64 [n], replace each `from_request` placeholder with the request's last token in `latest`, int64
    [requests]."""
    return torch.where(ids < 0, latest.index_select(0, (~ids).clamp_(min=0)), ids)


def _check(replayed: torch.Tensor, out: torch.Tensor) -> None:
    """Compare the logits of a graph with those computed without the graph; logits of padding ids are -inf in both.
    Errors: RuntimeError if they differ."""
    largest = float(out[out.isfinite()].abs().max())
    if not torch.allclose(replayed.float(), out.float(), rtol=0.0, atol=1e-3 * largest):
        raise RuntimeError("it gives other logits")


class _Parts:
    """The inputs of a graph: a step's arrays on the host, and its tensors on the device.

    tokens: number of tokens in the graph. wanted: number of rows of logits. extra: number of integers after tokens,
    positions, slots and wanted rows.

        upload   | tokens | positions | slots | wanted rows | extra |     int64, one array, copied in one operation
    """

    def __init__(self, cache: PagedCache, tokens: int, wanted: int, extra: int):
        self.tokens, self.wanted = tokens, wanted
        # All inputs are in one array, so that a single copy transfers them.
        self._upload = Upload(3 * tokens + wanted + extra, cache.pool.device)
        self.ids, self.positions, self.stored, self.rows, self._extra = self._upload.there.split_with_sizes(
            [tokens] * 3 + [wanted, extra]
        )
        self.pages: Pages = {}

    def put(self, step: Step) -> None:
        """Copy a step into the inputs. Padding tokens write their keys to block SCRATCH."""
        host, tokens, wanted_rows = self._upload.array(), len(step.tokens), len(step.wanted)
        columns = host[: 3 * self.tokens].reshape(3, self.tokens)
        columns[:, :tokens] = step.tokens, step.table_rows, step.slots
        columns[:, tokens:] = 0
        rows = host[3 * self.tokens : 3 * self.tokens + self.wanted]
        rows[:wanted_rows], rows[wanted_rows:] = step.wanted, 0
        self.fill(step, host[3 * self.tokens + self.wanted :])
        self._upload.send()

    def fill(self, step: Step, extra: Integers) -> None:
        """Fill the extra integers."""
        raise NotImplementedError


class _SingleParts(_Parts):
    """Inputs of a graph of kind `single`. Each padding row reads one key of block SCRATCH."""

    def __init__(self, cache: PagedCache, rows: int, width: int):
        super().__init__(cache, rows, rows, rows * (1 + width))
        ones, none = np.ones(rows, dtype=np.int64), np.zeros((rows, width), dtype=np.int64)
        lengths, tables = self._extra.split_with_sizes([rows, rows * width])
        self.pages = {
            window: pages._replace(lengths=lengths, tables=tables.view(rows, width))
            for window, pages in cache.pages(ones, ones, none).items()
        }

    def fill(self, step: Step, extra: Integers) -> None:
        _fill_rows(extra, self.tokens, step.lengths, step.tables, 1)


class _FewParts(_Parts):
    """Inputs of a graph of kind `few`. Each token is a separate run, which reads the keys up to its own position."""

    def __init__(self, cache: PagedCache, tokens: int, width: int):
        super().__init__(cache, tokens, tokens, tokens * (1 + width))
        lengths, tables = self._extra.split_with_sizes([tokens, tokens * width])
        tiles = torch.zeros(0, 4, dtype=torch.int64, device=cache.pool.device)
        self.pages = _ragged_pages(cache, lengths, tables.view(tokens, width), tiles)

    def fill(self, step: Step, extra: Integers) -> None:
        tables = step.tables.repeat(step.counts, 0)
        _fill_rows(extra, self.tokens, step.positions + 1, tables, 0)


class _ManyParts(_Parts):
    """Inputs of a graph of kind `many`. runs: maximum number of runs in a step."""

    def __init__(self, cache: PagedCache, tokens: int, width: int, runs: int):
        self._ragged, self._runs, self._width = _ragged(cache), runs, width
        tiles = self._ragged.most_tiles(tokens, runs)
        super().__init__(cache, tokens, max(runs, FEW[-1]), runs * (1 + width) + 4 * tiles)
        lengths, tables, whole = self._extra.split_with_sizes([runs, runs * width, 4 * tiles])
        self.pages = _ragged_pages(cache, lengths, tables.view(runs, width), whole.view(tiles, 4))

    def fill(self, step: Step, extra: Integers) -> None:
        longer = step.counts != 1
        singles = int(longer.argmax()) if longer.any() else len(longer)
        lengths = np.where(np.arange(len(longer)) < singles, step.lengths, 0)
        rest = self._runs * (1 + self._width)
        _fill_rows(extra[:rest], self._runs, lengths, step.tables, 0)
        tiles = self._ragged.tiles(step.counts, step.lengths).reshape(-1)
        extra[rest : rest + len(tiles)], extra[rest + len(tiles) :] = tiles, 0


def _ragged(cache: PagedCache) -> RaggedGraph:
    assert cache.attention.ragged is not None
    return cache.attention.ragged


def _ragged_pages(cache: PagedCache, lengths: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor) -> Pages:
    """Return the pages of each attention window that occurs in the cache's layers, as a map window -> pages."""
    ragged, pool = _ragged(cache), cache.pool[0]
    return {window: ragged.pages(lengths, tables, tiles, pool, window) for window in dict.fromkeys(cache.windows)}


def _fill_rows(extra: Integers, rows: int, lengths: Integers, tables: Integers, missing: int) -> None:
    """Fill `extra` with the lengths of `rows` rows, then with their block tables. Padding rows read `missing` keys of
    block SCRATCH."""
    filled, table_rows = len(lengths), extra[rows:].reshape(rows, -1)
    extra[:filled], extra[filled:rows] = lengths, missing
    table_rows[:filled, : tables.shape[1]] = tables
    table_rows[filled:] = 0


class _Graph:
    """The graph of one shape, with its input and output memory."""

    def __init__(
        self,
        decode: Decode,
        cache: PagedCache,
        parts: _Parts,
        latest: torch.Tensor,
        ends: tuple[bool, bool],
        cargo: torch.Tensor | None,
    ):
        self._decode, self._cache, self._parts, self._latest = decode, cache, parts, latest
        self._first, self._last = ends
        self._cargo = None if cargo is None else cargo.new_zeros(parts.tokens, *cargo.shape[1:])
        self._out = torch.empty(0)
        self._graph: Replayable | None = None

    def compute(self, step: Step, cargo: torch.Tensor | None) -> torch.Tensor:
        """Compute a step without the graph."""
        self._put(step, cargo)
        self._work()
        return self._of(step)

    def record(self, record: Record) -> None:
        self._graph = record(self._work)

    def play(self, step: Step, cargo: torch.Tensor | None) -> torch.Tensor:
        assert self._graph is not None
        self._put(step, cargo)
        self._graph.play()
        return self._of(step)

    def _of(self, step: Step) -> torch.Tensor:
        """Return the part of the output that belongs to a step: logits of the wanted rows, or the hidden states for the
        next stage."""
        return self._out[: len(step.wanted) if self._last else len(step.tokens)]

    def _work(self) -> None:
        parts = self._parts
        self._cache.begin(parts.stored, parts.pages)
        cargo = () if self._cargo is None else (self._cargo,)
        ids = known(parts.ids, self._latest) if self._first else parts.ids
        self._out = self._decode(ids, parts.positions, parts.rows, self._cache, *cargo)

    def _put(self, step: Step, cargo: torch.Tensor | None) -> None:
        self._parts.put(step)
        if cargo is not None and self._cargo is not None:
            self._cargo[: len(cargo)].copy_(cargo)


def shape_counts(shape: GraphShape, longest: int) -> list[int]:
    """Return the run lengths, at most `longest` each, of a step that fills the graph of a shape.

    >>> shape_counts(GraphShape("single", 2), 100), shape_counts(GraphShape("many", 256), 100)
    ([1, 1], [100, 100, 56])
    """
    if shape.kind == "single":
        return [1] * shape.size
    whole, rest = divmod(shape.size, longest)
    return [longest] * whole + [rest] * (rest > 0)
