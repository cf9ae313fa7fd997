"""Retrieve neighbours for a model with a retriever, each time the model reaches the end of a chunk while it continues
or scores texts.

    retriever(chunks) -> Retrieved     int64 [n, chunk] -> the neighbours of each chunk, and their sources

Callers construct the retriever from a database of neighbours; this module does not depend on the database.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.architecture import Architecture
from mega.core.batch import DecoderBatch, NeighbourBatch
from mega.core.config.sections import ModelConfig
from mega.core.inference.capacity import READ_SEQUENCES, neighbour_bytes
from mega.core.inference.options import NOTHING, DecodingLayout, EngineOptions
from mega.core.inference.request import Citation
from mega.core.inference.step import Step
from mega.core.model.decode_neighbours import NeighbourStep, ReadingSequence, Run, ended, reading
from mega.core.model.decoder import DecoderStage
from mega.core.text.tokenizer import Tokenizer


class Retrieved(NamedTuple):
    """The neighbours of n chunks. neighbours: int64 [n, k, r]. found: bool [n, k], whether a neighbour exists. cited:
    the sources of each chunk's neighbours."""

    neighbours: NDArray[np.int64]
    found: NDArray[np.bool_]
    cited: Sequence[Sequence[Citation]]


class Retriever(Protocol):
    @property
    def device_bytes(self) -> int:
        """Device memory in bytes that the retriever uses."""

    def __call__(self, chunks: NDArray[np.int64]) -> Retrieved:
        """Return the neighbours of n chunks. chunks: tokens, int64 [n, chunk]. A chunk's neighbours depend only on its
        tokens."""


OpenRetriever: TypeAlias = Callable[[ModelConfig, Tokenizer, str], Retriever]
"""A function (model, tokenizer, device type) -> retriever. Errors: ValueError naming flag or file."""


@dataclass(frozen=True)
class NoNeighbours:
    """A retriever that finds no neighbours."""

    model: ModelConfig
    device_bytes: ClassVar[int] = 0

    def __call__(self, chunks: NDArray[np.int64]) -> Retrieved:
        model = self.model
        each, width = model.retro_neighbours, model.retro_retrieved_chunks * model.retro_chunk_length
        neighbours = np.zeros((len(chunks), each, width), np.int64)
        return Retrieved(neighbours, np.zeros(neighbours.shape[:2], np.bool_), [()] * len(chunks))


def check_retrieval(model: ModelConfig, retro: str | None, load: object) -> None:
    """Check --retro. Errors: ValueError if a model with a retriever has no database, or a model without a retriever has
    one."""
    if model.retriever and retro is None:
        raise ValueError(
            f"--retro is missing: the model {load} reads neighbours; give the folder of mega retro build and the "
            f"--embedder of its vectors, or --retro {NOTHING}"
        )
    if not model.retriever and retro is not None:
        raise ValueError(f"--retro {retro}: the model {load} has no retriever")


def check_decoding(engine: EngineOptions, layout: DecodingLayout, adapter: Sequence[str], beams: int = 0) -> None:
    """Check flags for a model with a retriever. Errors: ValueError naming the first flag that such a model does not
    support."""
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
    for flag, is_given in refused.items():
        if is_given:
            raise ValueError(f"{flag}: excludes a model with a retriever, which looks for neighbours between its steps")


@dataclass(eq=False)
class _ReadSequence(ReadingSequence):
    """A sequence with the tokens of its current chunk, and the sources of neighbours that the model has read and that
    have not been reported yet."""

    tokens: list[int] = field(default_factory=list)
    cited: list[Citation] = field(default_factory=list)


def device_bytes(retriever: Retriever | None, model: Architecture, dtype: torch.dtype, requests: int) -> int:
    """Return the device memory in bytes for retrieving and storing neighbours; 0 without a retriever."""
    return 0 if retriever is None else retriever.device_bytes + neighbour_bytes(model, dtype.itemsize, requests)


class SequenceReader:
    """Retrieves neighbours for the sequences of an engine. requests: maximum number of sequences in flight."""

    def __init__(self, stage: DecoderStage, retriever: Retriever, requests: int):
        self._stage, self._retriever, self._most = stage, retriever, READ_SEQUENCES * requests
        self.device_bytes = device_bytes(retriever, stage.architecture, stage.dtype, requests)
        self._chunk = reading(stage).chunk
        self._sequences: OrderedDict[int, _ReadSequence] = OrderedDict()

    def step(self, step: Step, device: torch.device) -> NeighbourStep:
        """With one call of the retriever, return the neighbours of the chunks that end in a step."""
        runs, chunks, owners, start = list[Run](), list[list[int]](), list[tuple[_ReadSequence, int]](), 0
        for number, count, length in zip(step.sequences, step.counts.tolist(), step.lengths.tolist(), strict=True):
            first, sequence = length - count, self._sequence(int(number), length == count)
            tokens = sequence.tokens + step.tokens[start : start + count].tolist()
            for index, chunk in enumerate(ended(first, count, self._chunk)):
                chunks.append(tokens[index * self._chunk : (index + 1) * self._chunk])
                owners.append((sequence, chunk))
            sequence.tokens = tokens[len(tokens) // self._chunk * self._chunk :]
            runs.append(Run(sequence, first, count))
            start += count
        retrieved = self._retriever(np.array(chunks, np.int64).reshape(-1, self._chunk))
        for (sequence, chunk), citations in zip(owners, retrieved.cited, strict=True):
            sequence.cited += [each._replace(chunk=chunk) for each in citations]
        neighbours, exist = (torch.from_numpy(each).to(device) for each in (retrieved.neighbours, retrieved.found))
        return NeighbourStep(self._stage, runs, neighbours, exist)

    def _sequence(self, number: int, begins: bool) -> _ReadSequence:
        """Return the sequence with the given number. If there are too many sequences, remove the least recently used
        ones; these have already ended."""
        if begins:
            self._sequences[number] = _ReadSequence()
        self._sequences.move_to_end(number)
        while len(self._sequences) > self._most:
            self._sequences.popitem(last=False)
        return self._sequences[number]

    def cited(self, number: int) -> tuple[Citation, ...]:
        """Return the sources of the neighbours that a sequence has read since the last call."""
        sequence = self._sequences.get(number)
        if sequence is None:
            return ()
        citations, sequence.cited = sequence.cited, []
        return tuple(citations)


def read_by(retriever: Retriever, model: ModelConfig, batch: DecoderBatch) -> NeighbourBatch:
    """Add neighbours to the rows of a batch, for all chunks whose neighbours can affect a label of nonzero weight."""
    length, each = model.retro_chunk_length, model.retro_neighbours
    rows, columns = batch.tokens.shape
    assert columns % length == 0, (columns, length)
    width = model.retro_retrieved_chunks * length
    neighbours = torch.zeros(rows, columns // length, each, width, dtype=torch.int64)
    exist = torch.zeros(rows, columns // length, each, dtype=torch.bool)
    # A chunk's neighbours affect only the labels of its last token and of later tokens, because earlier tokens do not
    # attend to them.
    last = (batch.loss_weights > 0).long() * torch.arange(1, columns + 1)
    read = torch.arange(1, columns // length + 1) * length <= last.amax(1, keepdim=True)
    if read.any():
        retrieved = retriever(batch.tokens.view(rows, -1, length)[read].numpy())
        neighbours[read], exist[read] = torch.from_numpy(retrieved.neighbours), torch.from_numpy(retrieved.found)
    fields = {name: getattr(batch, name) for name in ("tokens", "labels", "loss_weights", "positions", "samples")}
    return NeighbourBatch(**fields, neighbours=neighbours, found=exist)
