"""Neighbours of chunks that a model writes or is judged on: embedded, looked for, and read, while it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.config.sections import ModelConfig
from mega.core.data.chunks import ChunkDatabase
from mega.core.data.neighbours import DatabaseManifest, filled
from mega.core.inference.options import DecodingLayout, EngineOptions, RetrievalOptions
from mega.core.inference.request import Citation
from mega.core.inference.retrieval import (
    NOTHING,
    NoNeighbours,
    OpenRetriever,
    Retrieved,
    Retriever,
    check_decoding,
)
from mega.core.retro.embed import Embedder, opened_embedder
from mega.core.retro.index import Search, open_search
from mega.core.text.tokenizer import Tokenizer


def opener(
    given: RetrievalOptions, engine: EngineOptions, layout: DecodingLayout, adapter: Sequence[str], beams: int = 0
) -> OpenRetriever | None:
    """What opens the retriever of a model that continues texts. Errors: ValueError naming a flag that it excludes."""
    if given.retro is not None:
        check_decoding(engine, layout, adapter, beams)
    return named_opener(given)


def named_opener(given: RetrievalOptions) -> OpenRetriever | None:
    """What opens the retriever that flags name. Errors: ValueError naming the flag."""
    given.check()
    return None if given.retro is None else partial(open_retriever, given)


def open_retriever(given: RetrievalOptions, model: ModelConfig, tokenizer: Tokenizer, device: str) -> Retriever:
    """Errors: ValueError naming flag or file."""
    retro = given.retro
    if retro is None or retro == NOTHING:
        return NoNeighbours(model)
    folder = Path(retro)
    manifest = DatabaseManifest.read(folder)
    if model.retro_chunk_length != manifest.chunk_length:
        rule = f"has chunks of {manifest.chunk_length} tokens, the model reads those of {model.retro_chunk_length}"
        raise ValueError(f"--retro {retro}: {rule}")
    if not tokenizer.made(manifest.tokenizer):
        raise ValueError(
            f"--retro {retro}: was made with the tokenizer {manifest.tokenizer}, the model's is {tokenizer.identity()}"
        )
    made = opened_embedder(folder, manifest, given.embedder or "", device)
    database = ChunkDatabase(folder, manifest.chunk_length, manifest.eod)
    search = open_search(folder, manifest, len(database), torch.device(device), given.index, given.probes)
    return DatabaseRetriever(model, tokenizer, database, made, search)


@dataclass(frozen=True)
class DatabaseRetriever:
    """The nearest chunks of a database."""

    model: ModelConfig
    tokenizer: Tokenizer
    database: ChunkDatabase
    embedder: Embedder
    search: Search

    def __call__(self, chunks: NDArray[np.int64]) -> Retrieved:
        model, database = self.model, self.database
        each, width = model.retro_neighbours, model.retro_retrieved_chunks * database.length
        if not len(chunks):
            return Retrieved(np.zeros((0, each, width), np.int64), np.zeros((0, each), np.bool_), [])
        vectors = self.embedder([self.tokenizer.decode(ids) for ids in chunks.tolist()])
        numbers = self.search(vectors, each)
        crossing = model.retro_cross_documents
        neighbours = filled(database, numbers, model.retro_retrieved_chunks, crossing=crossing)
        return Retrieved(neighbours, numbers >= 0, [self._cited(row) for row in numbers.tolist()])

    def _cited(self, numbers: Sequence[int]) -> list[Citation]:
        found = list[Citation]()
        for number in numbers:
            if number >= 0:
                corpus, document = self.database.chunks[number, :2].tolist()
                text = self.tokenizer.decode(self.database.ids(number).tolist())
                found.append(Citation(0, number, self.database.corpora[corpus].prefix, document, text))
        return found
