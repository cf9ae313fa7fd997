"""The stages of a database of neighbours: chunks, their vectors, the neighbours of a run's samples.

Each writes blocks that are functions of their input alone, whole or not at all; what is there is not made again. So a
stage that was killed resumes, and several processes share one by `--shard`. The folder notes of what it was made
(retro.json), and nothing of another origin is mixed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega.core.data.chunks import (
    Block,
    ChunkDatabase,
    ChunkSource,
    blocks,
    cut_block,
    individual,
    made,
    merge,
    read_array,
    write_arrays,
)
from mega.core.data.neighbours import DatabaseManifest, DocumentedDataset, read_neighbours, without_own
from mega.core.files import whole_file
from mega.core.retro.embed import Embedder
from mega.core.text.tokenizer import Tokenizer

Report = Callable[[str], None]
QUERIES = 1000
"""Chunks that are looked for together, which bounds the memory of a search."""


@dataclass(frozen=True)
class Share:
    """The blocks of one process: every `count`-th from number `index` on."""

    index: int = 0
    count: int = 1

    @property
    def whole(self) -> bool:
        return self.count == 1

    def of(self, found: Sequence[tuple[Block, Path]]) -> list[tuple[Block, Path]]:
        """Its blocks that are not there yet."""
        return [each for each in found[self.index :: self.count] if not made(each[1])]


def begin(folder: Path, manifest: DatabaseManifest) -> None:
    """Note of what a database is made, or compare it with what is noted. Errors: ValueError naming what differs."""
    path = folder / DatabaseManifest.NAME
    if path.exists():
        DatabaseManifest.read(folder).check(manifest, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(json.dumps(manifest.as_json(), indent=1).encode())


def build_chunks(
    folder: Path,
    manifest: DatabaseManifest,
    corpora: Sequence[ChunkSource],
    tokenizer: Tokenizer,
    embedder: Embedder,
    share: Share,
    report: Report,
) -> None:
    """Phase 1: cut blocks of documents. Phase 2, without a shard: join them."""
    for source in corpora:
        found = list(individual(folder, source, manifest.doc_block_size))
        for block, path in share.of(found):
            write_arrays(path, cut_block(source, block, manifest.chunk_length, tokenizer, embedder.tokens))
            report(f"{source.name}: documents {block.first:,} to {block.last - 1:,} are cut")
    if share.whole:
        infos = merge(folder, corpora, manifest.doc_block_size)
        total = sum(info.n_chunks_train for info in infos)
        report(f"{total:,} chunks of {sum(info.n_docs_train for info in infos):,} documents can be found")


def vector_blocks(folder: Path, chunks: int, size: int) -> list[tuple[Block, Path]]:
    """The blocks of vectors, and their files."""
    return [(block, folder / "index" / "train_emb" / "blocks" / block.name) for block in blocks(chunks, size, ".npy")]


def build_vectors(
    folder: Path, manifest: DatabaseManifest, tokenizer: Tokenizer, embedder: Embedder, share: Share, report: Report
) -> None:
    """The vectors of all chunks that can be found. Errors: ValueError where the chunks have not been joined."""
    database = ChunkDatabase(folder, manifest.chunk_length, manifest.eod)
    for block, path in share.of(vector_blocks(folder, len(database), manifest.block_size)):
        read = database.tokens if manifest.pad_chunks else database.ids
        texts = [tokenizer.decode(read(chunk).tolist()) for chunk in range(block.first, block.last)]
        write_array(path, embedder(texts))
        report(f"chunks {block.first:,} to {block.last - 1:,} of {len(database):,} are embedded")


def write_array(path: Path, array: NDArray[np.generic]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        np.save(file, array, allow_pickle=False)


def read_vectors(folder: Path, chunks: int, size: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Number of the first chunk of each block, and the vectors. Errors: ValueError naming a file that is not whole."""
    width = None
    for block, path in vector_blocks(folder, chunks, size):
        try:
            found = read_array(path, "data")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); mega retro build writes it") from None
        width = width or found.shape[-1]
        if found.dtype != np.float32 or found.shape != (block.rows, width):
            rule = f"must be float32 [{block.rows}, {width}]"
            raise ValueError(f"{path}: is {found.dtype} {list(found.shape)}, {rule}; delete it and build it again")
        yield block.first, np.asarray(found, np.float32)


def find_neighbours(
    folder: Path,
    manifest: DatabaseManifest,
    name: str,
    dataset: DocumentedDataset,
    tokenizer: Tokenizer,
    embedder: Embedder,
    search: Callable[[NDArray[np.float32], int], NDArray[np.int64]],
    *,
    candidates: int,
    saved: int,
    share: Share,
    report: Report,
) -> None:
    """Neighbours of the chunks of all samples of a dataset, in query/NAME. search: the nearest vectors' numbers."""
    database = ChunkDatabase(folder, manifest.chunk_length, manifest.eod)
    each = (len(dataset[0]) - 1) // manifest.chunk_length
    rows = len(dataset) * each
    found = [(block, folder / "query" / name / block.name) for block in blocks(rows, manifest.block_size, ".npy")]
    for block, path in found:
        width = read_neighbours(path, block.rows, len(database)).shape[1] if made(path) else saved
        if width != saved:
            raise ValueError(f"--saved {saved}: {path} has {width} of each chunk; delete {path.parent} to query again")
    for block, path in share.of(found):
        parts = []
        for first in range(block.first, block.last, QUERIES):
            numbers = range(first, min(first + QUERIES, block.last))
            texts = [tokenizer.decode(ids) for ids in chunk_ids(dataset, numbers, each, manifest.chunk_length)]
            near = search(embedder(texts), candidates)
            own = [dataset.documents(number // each) for number in numbers]
            parts.append([without_own(row, database.chunks, mine, saved) for row, mine in zip(near, own, strict=True)])
        write_array(path, np.concatenate([np.stack(part) for part in parts]))
        report(f"{name}: neighbours of chunks {block.first:,} to {block.last - 1:,} of {rows:,} are found")


def chunk_ids(dataset: DocumentedDataset, numbers: range, each: int, length: int) -> Iterator[list[int]]:
    """The tokens of chunks by their rows; a sample is read once."""
    for sample, rows in groupby(numbers, lambda number: number // each):
        tokens = dataset[sample]
        for row in rows:
            first = row % each * length
            yield tokens[first : first + length].tolist()
