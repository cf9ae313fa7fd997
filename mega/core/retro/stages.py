"""Build a neighbour database in three stages: chunks, vectors of the chunks, and neighbours of a run's samples.

Each stage writes blocks atomically, a block depends only on its input, and existing blocks are kept. Therefore, a
killed stage can be resumed, and several processes can share a stage with `--shard`. retro.json records the settings and
corpora of the database in a folder; a build with other settings or corpora is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from mega.core.data.chunks import (
    Block,
    ChunkDatabase,
    ChunkSource,
    blocks,
    cut_block,
    individual,
    is_built,
    merge,
    read_array,
    write_arrays,
)
from mega.core.data.neighbours import DatabaseManifest, DocumentedDataset, exclude_own, read_neighbours
from mega.core.files import whole_file
from mega.core.retro.embed import Embedder
from mega.core.text.tokenizer import Tokenizer

Report = Callable[[str], None]
QUERIES = 1000
"""Number of chunks per search, to limit the use of memory."""


@dataclass(frozen=True)
class Share:
    """The blocks of a stage that one process builds: every `count`-th block, starting with block `index`."""

    index: int = 0
    count: int = 1

    @property
    def whole(self) -> bool:
        return self.count == 1

    def of(self, all_blocks: Sequence[tuple[Block, Path]]) -> list[tuple[Block, Path]]:
        """Return the missing blocks of this share."""
        return [each for each in all_blocks[self.index :: self.count] if not is_built(each[1])]


def begin(folder: Path, manifest: DatabaseManifest) -> None:
    """Write the manifest, or compare it with the existing manifest. Errors: ValueError naming the difference."""
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
    """Build the chunks. Phase 1 cuts blocks of documents into chunks. Phase 2, which is skipped with --shard, merges
    these blocks."""
    for source in corpora:
        document_blocks = list(individual(folder, source, manifest.doc_block_size))
        for block, path in share.of(document_blocks):
            write_arrays(path, cut_block(source, block, manifest.chunk_length, tokenizer, embedder.tokens))
            report(f"{source.name}: documents {block.first:,} to {block.last - 1:,} are cut")
    if share.whole:
        infos = merge(folder, corpora, manifest.doc_block_size)
        total = sum(info.n_chunks_train for info in infos)
        report(f"{total:,} chunks of {sum(info.n_docs_train for info in infos):,} documents can be found")


def vector_blocks(folder: Path, chunks: int, size: int) -> list[tuple[Block, Path]]:
    """Return the blocks of vectors, with their paths."""
    return [(block, folder / "index" / "train_emb" / "blocks" / block.name) for block in blocks(chunks, size, ".npy")]


def build_vectors(
    folder: Path, manifest: DatabaseManifest, tokenizer: Tokenizer, embedder: Embedder, share: Share, report: Report
) -> None:
    """Embed all chunks of the database. Errors: ValueError if the chunks have not been merged."""
    database = ChunkDatabase(folder, manifest.chunk_length, manifest.eod)
    for block, path in share.of(vector_blocks(folder, len(database), manifest.block_size)):
        read = database.tokens if manifest.pad_chunks else database.ids
        texts = (tokenizer.decode(read(chunk).tolist()) for chunk in range(block.first, block.last))
        write_array(path, embedder(texts))
        report(f"chunks {block.first:,} to {block.last - 1:,} of {len(database):,} are embedded")


def write_array(path: Path, array: NDArray[np.generic]) -> None:
    """Write the array atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        # Without `write` as the only method, numpy would use `tofile`, which hides the error of a full disk.
        np.save(SimpleNamespace(write=file.write), array, allow_pickle=False)


def read_vectors(
    folder: Path, chunks: int, size: int, width: int | None = None
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the index of the first chunk of each block, and the vectors. width: number of elements in a vector; None
    for the width of the first block. Errors: ValueError naming a missing or damaged file."""
    for block, path in vector_blocks(folder, chunks, size):
        try:
            vectors = read_array(path, "data")
        except FileNotFoundError:
            raise ValueError(f"{path}: does not exist; mega retro build writes it") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); delete it and build it again") from None
        width = width or vectors.shape[-1]
        if vectors.dtype != np.float32 or vectors.shape != (block.rows, width):
            rule = f"must be float32 [{block.rows}, {width}]"
            raise ValueError(f"{path}: is {vectors.dtype} {list(vectors.shape)}, {rule}; delete it and build it again")
        yield block.first, np.asarray(vectors, np.float32)


def check_vectors(folder: Path, manifest: DatabaseManifest, chunks: int, width: int) -> None:
    """Check that all vectors exist and have the embedder's width. Errors: ValueError naming a file."""
    for _ in read_vectors(folder, chunks, manifest.block_size, width):
        pass


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
    """Write the neighbours of all chunks in a dataset to query/NAME. search: function that returns the indices of the
    nearest vectors."""
    database = ChunkDatabase(folder, manifest.chunk_length, manifest.eod)
    each = (len(dataset[0]) - 1) // manifest.chunk_length
    rows = len(dataset) * each
    query_blocks = [
        (block, folder / "query" / name / block.name) for block in blocks(rows, manifest.block_size, ".npy")
    ]
    # Before the first search, reject a value of --saved that does not match existing blocks.
    for block, path in query_blocks:
        width = read_neighbours(path, block.rows, len(database)).shape[1] if is_built(path) else saved
        if width != saved:
            raise ValueError(f"--saved {saved}: {path} has {width} of each chunk; delete {path.parent} to query again")
    for block, path in share.of(query_blocks):
        parts = []
        for first in range(block.first, block.last, QUERIES):
            numbers = range(first, min(first + QUERIES, block.last))
            texts = [tokenizer.decode(ids) for ids in chunk_ids(dataset, numbers, each, manifest.chunk_length)]
            neighbours = search(embedder(texts), candidates)
            own_documents = [dataset.documents(number // each) for number in numbers]
            parts.append(
                [
                    exclude_own(row, database.chunks, documents, saved)
                    for row, documents in zip(neighbours, own_documents, strict=True)
                ]
            )
        write_array(path, np.concatenate([np.stack(part) for part in parts]))
        report(f"{name}: neighbours of chunks {block.first:,} to {block.last - 1:,} of {rows:,} are found")


def chunk_ids(dataset: DocumentedDataset, numbers: range, each: int, length: int) -> Iterator[list[int]]:
    """Yield the tokens of the chunks with indices `numbers`. Each sample is read once."""
    for sample, rows in groupby(numbers, lambda number: number // each):
        tokens = dataset[sample]
        for row in rows:
            first = row % each * length
            yield tokens[first : first + length].tolist()
