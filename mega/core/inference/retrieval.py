"""What a model with a retriever reads while it continues or judges texts: neighbours, found as chunks end.

    retriever(chunks) -> Retrieved     int64 [n, chunk] to the neighbours of each, and what they are

Whoever opens a database of neighbours gives the retriever; this file knows none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.batch import DecoderBatch, NeighbourBatch
from mega.core.config.sections import ModelConfig
from mega.core.inference.options import NOTHING, DecodingLayout, EngineOptions
from mega.core.inference.request import Citation
from mega.core.inference.step import Step
from mega.core.model.decode_neighbours import NeighbourStep, ReadingSequence, Run, ended, reading
from mega.core.model.decoder import DecoderStage
from mega.core.text.tokenizer import Tokenizer


class Retrieved(NamedTuple):
    """neighbours: int64 [n, k, r]. found: bool [n, k], which of them there are. cited: those of each chunk."""

    neighbours: NDArray[np.int64]
    found: NDArray[np.bool_]
    cited: Sequence[Sequence[Citation]]


class Retriever(Protocol):
    def __call__(self, chunks: NDArray[np.int64]) -> Retrieved:
        """The neighbours of chunks, int64 [n, chunk], each a function of its tokens alone."""


OpenRetriever: TypeAlias = Callable[[ModelConfig, Tokenizer, str], Retriever]
"""model, its tokenizer, kind of device -> what finds its neighbours. Errors: ValueError naming flag or file."""


@dataclass(frozen=True)
class NoNeighbours:
    """Finds nothing."""

    model: ModelConfig

    def __call__(self, chunks: NDArray[np.int64]) -> Retrieved:
        model = self.model
        each, width = model.retro_neighbours, model.retro_retrieved_chunks * model.retro_chunk_length
        neighbours = np.zeros((len(chunks), each, width), np.int64)
        return Retrieved(neighbours, np.zeros(neighbours.shape[:2], np.bool_), [()] * len(chunks))


def check_retrieval(model: ModelConfig, retro: str | None, load: object) -> None:
    """Errors: ValueError where a model reads neighbours and there is no database, or the other way round."""
    if model.retriever and retro is None:
        raise ValueError(
            f"--retro is missing: the model {load} reads neighbours; give the folder of mega retro build and the "
            f"--embedder of its vectors, or --retro {NOTHING}"
        )
    if not model.retriever and retro is not None:
        raise ValueError(f"--retro {retro}: the model {load} has no retriever")


def check_decoding(engine: EngineOptions, layout: DecodingLayout, adapter: Sequence[str], beams: int = 0) -> None:
    """Errors: ValueError naming the first flag that a model with a retriever does not decode with."""
    refused = {
        f"--tp {layout.tp}": layout.tp > 1,
        f"--pp {layout.pp}": layout.pp > 1,
        "--batch-invariant": engine.batch_invariant,
        "--cuda-graph": bool(engine.cuda_graph),
        "--fp8-weights": engine.fp8_weights,
        f"--speculate {engine.speculate}": engine.speculate is not None,
        f"--adapter {' '.join(adapter)}": bool(adapter),
        f"--beams {beams}": bool(beams),
    }
    for flag, given in refused.items():
        if given:
            raise ValueError(f"{flag}: excludes a model with a retriever, which looks for neighbours between its steps")


@dataclass(eq=False)
class _ReadSequence(ReadingSequence):
    """Also the tokens of the chunk under way, and what was read."""

    tokens: list[int] = field(default_factory=list)
    cited: list[Citation] = field(default_factory=list)


class SequenceReader:
    """The sequences of an engine whose model reads neighbours. requests: of them in flight at once."""

    def __init__(self, stage: DecoderStage, retriever: Retriever, requests: int):
        self._stage, self._retriever, self._most = stage, retriever, 2 * requests
        self._chunk = reading(stage).chunk
        self._sequences: OrderedDict[int, _ReadSequence] = OrderedDict()

    def step(self, step: Step, device: torch.device) -> NeighbourStep:
        """The neighbours of the chunks that end in a step. They are looked for here, all together."""
        runs, chunks, owners, at = list[Run](), list[list[int]](), list[tuple[_ReadSequence, int]](), 0
        for number, count, length in zip(step.sequences, step.counts.tolist(), step.lengths.tolist(), strict=True):
            first, sequence = length - count, self._sequence(int(number), length == count)
            tokens = sequence.tokens + step.tokens[at : at + count].tolist()
            for place, chunk in enumerate(ended(first, count, self._chunk)):
                chunks.append(tokens[place * self._chunk : (place + 1) * self._chunk])
                owners.append((sequence, chunk))
            sequence.tokens = tokens[len(tokens) // self._chunk * self._chunk :]
            runs.append(Run(sequence, first, count))
            at += count
        found = self._retriever(np.array(chunks, np.int64).reshape(-1, self._chunk))
        for (sequence, chunk), cited in zip(owners, found.cited, strict=True):
            sequence.cited += [each._replace(chunk=chunk) for each in cited]
        neighbours, there = (torch.from_numpy(each).to(device) for each in (found.neighbours, found.found))
        return NeighbourStep(self._stage, runs, neighbours, there)

    def _sequence(self, number: int, begins: bool) -> _ReadSequence:
        """Those that have ended are forgotten, the longest unused first."""
        if begins:
            self._sequences[number] = _ReadSequence()
        self._sequences.move_to_end(number)
        while len(self._sequences) > self._most:
            self._sequences.popitem(last=False)
        return self._sequences[number]

    def cited(self, number: int) -> tuple[Citation, ...]:
        """What a sequence has read since it was last asked, by its number."""
        sequence = self._sequences.get(number)
        if sequence is None:
            return ()
        cited, sequence.cited = sequence.cited, []
        return tuple(cited)


def read_by(retriever: Retriever, model: ModelConfig, batch: DecoderBatch) -> NeighbourBatch:
    """Rows that are judged, with the neighbours of their chunks: those that a label which counts may read."""
    length, each = model.retro_chunk_length, model.retro_neighbours
    rows, columns = batch.tokens.shape
    assert columns % length == 0, (columns, length)
    width = model.retro_retrieved_chunks * length
    neighbours = torch.zeros(rows, columns // length, each, width, dtype=torch.int64)
    found = torch.zeros(rows, columns // length, each, dtype=torch.bool)
    # The last token of a chunk is the first to read its neighbours; what it reads shows in labels from there on.
    last = (batch.loss_weights > 0).long() * torch.arange(1, columns + 1)
    read = torch.arange(1, columns // length + 1) * length <= last.amax(1, keepdim=True)
    if read.any():
        found_here = retriever(batch.tokens.view(rows, -1, length)[read].numpy())
        neighbours[read], found[read] = torch.from_numpy(found_here.neighbours), torch.from_numpy(found_here.found)
    given = {name: getattr(batch, name) for name in ("tokens", "labels", "loss_weights", "positions", "samples")}
    return NeighbourBatch(**given, neighbours=neighbours, found=found)
