"""Retrieve neighbours for chunks that a model generates or scores: embed chunks, search for neighbours and read their
tokens."""

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
from mega.core.data.indexed import IndexedDataset
from mega.core.data.neighbours import DatabaseManifest, corpus_digest, neighbour_tokens
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
from mega.core.retro.embed import Embedder, open_embedder_of
from mega.core.retro.index import Search, open_search, search_bytes
from mega.core.retro.stages import check_vectors
from mega.core.text.tokenizer import Tokenizer


def opener(
    retrieval: RetrievalOptions, engine: EngineOptions, layout: DecodingLayout, adapter: Sequence[str], beams: int = 0
) -> OpenRetriever | None:
    """Return the function that opens the retriever for generation. Errors: ValueError naming an incompatible flag."""
    if retrieval.retro is not None:
        check_decoding(engine, layout, adapter, beams)
    return named_opener(retrieval)


def named_opener(retrieval: RetrievalOptions) -> OpenRetriever | None:
    """Return the function that opens the retriever selected by flags, or None. Errors: ValueError naming the flag."""
    retrieval.check()
    return None if retrieval.retro is None else partial(open_retriever, retrieval)


def open_retriever(retrieval: RetrievalOptions, model: ModelConfig, tokenizer: Tokenizer, device: str) -> Retriever:
    """Open a retriever. Errors: ValueError naming flag or file."""
    retro = retrieval.retro
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
    embedder = open_embedder_of(folder, manifest, retrieval.embedder or "", device)
    _check_corpora(retro, manifest)
    database = ChunkDatabase(folder, manifest.chunk_length, manifest.eod)
    check_vectors(folder, manifest, len(database), embedder.width)
    search = open_search(folder, manifest, len(database), torch.device(device), retrieval.index, retrieval.probes)
    sizes = search_bytes(folder, manifest, len(database), embedder.width, retrieval.index, torch.device(device).type)
    return DatabaseRetriever(model, tokenizer, database, embedder, search, embedder.weight_bytes + sizes)


def _check_corpora(retro: str, manifest: DatabaseManifest) -> None:
    """Check the token files from which neighbours are read. Errors: ValueError if files are missing or have changed."""
    for _, prefix, digest in manifest.corpora:
        if corpus_digest(IndexedDataset(prefix).content()) != digest:
            raise ValueError(f"--retro {retro}: its corpus {prefix} has changed since; build the database again")


def device_bytes(retrieval: RetrievalOptions, kind: str) -> int:
    """Return the number of bytes that the retriever of `open_retriever` needs on a device of type `kind`. Errors:
    ValueError naming flag or file."""
    retrieval.check()
    if retrieval.retro in (None, NOTHING):
        return 0
    folder = Path(str(retrieval.retro))
    manifest = DatabaseManifest.read(folder)
    embedder = open_embedder_of(folder, manifest, retrieval.embedder or "", "cpu")
    chunks = len(ChunkDatabase(folder, manifest.chunk_length, manifest.eod))
    return embedder.weight_bytes + search_bytes(folder, manifest, chunks, embedder.width, retrieval.index, kind)


@dataclass(frozen=True)
class DatabaseRetriever:
    """Retrieves the nearest chunks of a database."""

    model: ModelConfig  # the model that reads the neighbours
    tokenizer: Tokenizer  # the model's tokenizer
    database: ChunkDatabase  # the chunks
    embedder: Embedder  # embeds the queries
    search: Search  # finds the chunks with the nearest vectors
    device_bytes: int  # bytes that the embedder and the search need on the device

    def __call__(self, chunks: NDArray[np.int64]) -> Retrieved:
        model, database = self.model, self.database
        each, width = model.retro_neighbours, model.retro_retrieved_chunks * database.length
        if not len(chunks):
            return Retrieved(np.zeros((0, each, width), np.int64), np.zeros((0, each), np.bool_), [])
        vectors = self.embedder([self.tokenizer.decode(ids) for ids in chunks.tolist()])
        numbers = self.search(vectors, each)
        crossing = model.retro_cross_documents
        neighbours = neighbour_tokens(database, numbers, model.retro_retrieved_chunks, crossing=crossing)
        return Retrieved(neighbours, numbers >= 0, [self._cited(row) for row in numbers.tolist()])

    def _cited(self, numbers: Sequence[int]) -> list[Citation]:
        citations = list[Citation]()
        for number in numbers:
            if number >= 0:
                corpus, document = self.database.chunks[number, :2].tolist()
                text = self.tokenizer.decode(self.database.ids(number).tolist())
                citations.append(Citation(0, number, self.database.corpora[corpus].prefix, document, text))
        return citations
