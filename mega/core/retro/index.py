"""Build and search an approximate index of a database's vectors with faiss (the extra `retro`).

    index/faiss/DESCRIPTION/empty.faissindex    the trained index
    index/faiss/DESCRIPTION/added.faissindex    the index with all vectors, by chunk index
    index/faiss/DESCRIPTION/index.json          a digest of the database, written last

DESCRIPTION is a string for faiss's index factory, such as IVF1024,Flat or OPQ32_64,IVF65536_HNSW8,PQ32. Distances are
Euclidean, as in Megatron-LM.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.data.neighbours import DatabaseManifest
from mega.core.files import whole_file
from mega.core.retro.search import nearest
from mega.core.retro.stages import read_vectors
from mega.core.untrusted import below, parse_json, read_limited

Search: TypeAlias = Callable[[NDArray[np.float32], int], NDArray[np.int64]]
"""A function (queries [n, width], count) -> indices of the nearest vectors [n, count], padded with -1."""

_NAME = re.compile(r"[A-Za-z0-9_,()x.]{1,200}")


class FaissIndex(Protocol):
    """The attributes of a faiss index that this module uses. ntotal: number of vectors. d: number of elements in a
    vector."""

    ntotal: int
    d: int

    def train(self, vectors: NDArray[np.float32]) -> None: ...
    def add(self, vectors: NDArray[np.float32]) -> None: ...
    def search(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...


class FaissLists(Protocol):
    """The lists of an IVF index. nlist: number of lists. nprobe: number of lists that a search reads."""

    nlist: int
    nprobe: int


class Faiss(Protocol):
    """The functions of faiss that this module uses. faiss declares no types for these functions."""

    def index_factory(self, width: int, description: str) -> FaissIndex: ...
    def serialize_index(self, index: FaissIndex) -> NDArray[np.uint8]: ...
    def deserialize_index(self, data: NDArray[np.uint8]) -> FaissIndex: ...
    def try_extract_index_ivf(self, index: FaissIndex) -> FaissLists | None: ...


def exact_search(folder: Path, manifest: DatabaseManifest, chunks: int, device: torch.device) -> Search:
    """Return a search function that compares all vectors, block by block. Errors: ValueError naming a damaged or
    missing block."""
    for _ in read_vectors(folder, chunks, manifest.block_size):
        pass  # checks that all blocks exist and have the same width

    def search(queries: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        return nearest(queries, read_vectors(folder, chunks, manifest.block_size), count, device)

    return search


def open_search(
    folder: Path, manifest: DatabaseManifest, chunks: int, device: torch.device, index: str | None, probes: int
) -> Search:
    """Return the search function of the index with description `index`; None selects exact search. probes: number of
    lists to search in an IVF index.

    Errors: ValueError naming flag or file.
    """
    if index is None:
        return exact_search(folder, manifest, chunks, device)
    library, index_path = _library(), index_folder(folder, index)
    faiss_index = _read(library, index_path / "added.faissindex", index_path, manifest, index)
    width = next((vectors.shape[1] for _, vectors in read_vectors(folder, chunks, manifest.block_size)), faiss_index.d)
    if (faiss_index.ntotal, faiss_index.d) != (chunks, width):
        rule = (
            f"has {faiss_index.ntotal} vectors of {faiss_index.d} numbers, the database {chunks} of {width}; delete it"
        )
        raise ValueError(f"{index_path}: {rule} and run mega retro build --index {index} again")
    lists = library.try_extract_index_ivf(faiss_index)
    if lists is not None:
        lists.nprobe = min(probes, lists.nlist)

    def search(queries: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        return np.asarray(faiss_index.search(np.ascontiguousarray(queries), count)[1], np.int64)

    return search


def search_bytes(
    folder: Path, manifest: DatabaseManifest, chunks: int, width: int, index: str | None, kind: str
) -> int:
    """Return the number of bytes that the search of `open_search` needs on a device of type `kind`, for two blocks of
    vectors or for an index in host memory. Errors: ValueError if `index` is not a description of a faiss index."""
    if index is None:
        return 2 * min(manifest.block_size, chunks) * width * np.dtype(np.float32).itemsize
    path = index_folder(folder, index) / "added.faissindex"
    return path.stat().st_size if kind == "cpu" and path.is_file() else 0


def build_index(
    folder: Path, manifest: DatabaseManifest, chunks: int, index: str, sample: int, report: Callable[[str], None]
) -> None:
    """Build an index. Phase 1 trains the index on a sample of the vectors. Phase 2 adds all vectors in order. Existing
    files are kept.

    Errors: ValueError naming the flag, or a file.
    """
    library, index_path = _library(), index_folder(folder, index)
    if (index_path / "index.json").exists():
        _check(index_path, manifest, index)
        return
    empty = index_path / "empty.faissindex"
    if not empty.exists():
        vectors = _sample(folder, manifest, chunks, sample)
        trained = _made(library, vectors.shape[1], index)
        try:
            trained.train(vectors)
        except RuntimeError as error:
            raise ValueError(f"--index {index}: cannot be trained on {len(vectors)} vectors ({_line(error)})") from None
        _write(library, trained, empty)
        report(f"index {index}: trained on {len(vectors):,} of {chunks:,} vectors")
    filled = _load(library, empty)
    for first, block in read_vectors(folder, chunks, manifest.block_size):
        filled.add(np.ascontiguousarray(block))
        report(f"index {index}: {first + len(block):,} of {chunks:,} vectors are added")
    _write(library, filled, index_path / "added.faissindex")
    with whole_file(index_path / "index.json") as file:
        file.write(json.dumps({"index": index, "database": _digest(manifest)}).encode())


def index_folder(folder: Path, index: str) -> Path:
    """Return the folder of an index. Errors: ValueError if `index` is not a description of a faiss index."""
    if not _NAME.fullmatch(index):
        raise ValueError(f"--index {index}: must be a description of faiss's index factory, such as IVF1024,Flat")
    return folder / "index" / "faiss" / index


def _library() -> Faiss:
    try:
        import faiss
    except ImportError:
        raise ValueError("--index: needs faiss; pip install '.[retro]' in a clone, or leave it out: exact") from None
    return cast(Faiss, faiss)


def _made(library: Faiss, width: int, index: str) -> FaissIndex:
    try:
        return library.index_factory(width, index)
    except RuntimeError as error:
        raise ValueError(f"--index {index}: faiss does not make it for {width} numbers ({_line(error)})") from None


def _sample(folder: Path, manifest: DatabaseManifest, chunks: int, sample: int) -> NDArray[np.float32]:
    """Return a random sample of the vectors, in their original order. Every call returns the same sample."""
    rows = np.sort(np.random.default_rng(0).choice(chunks, min(sample, chunks), replace=False))
    parts = [
        vectors[rows[(rows >= first) & (rows < first + len(vectors))] - first]
        for first, vectors in read_vectors(folder, chunks, manifest.block_size)
    ]
    return np.concatenate(parts)


def _write(library: Faiss, index: FaissIndex, path: Path) -> None:
    """Write the index atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(library.serialize_index(index).tobytes())


def _load(library: Faiss, path: Path) -> FaissIndex:
    try:
        return library.deserialize_index(np.fromfile(path, np.uint8))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path}: cannot be read ({_line(error)}); delete its folder and build it again") from None


def _read(library: Faiss, path: Path, index_path: Path, manifest: DatabaseManifest, index: str) -> FaissIndex:
    _check(index_path, manifest, index)
    return _load(library, path)


def _check(index_path: Path, manifest: DatabaseManifest, index: str) -> None:
    """Check index.json. Errors: ValueError if the index is incomplete, or belongs to another database."""
    path = index_path / "index.json"
    if not path.is_file():
        raise ValueError(f"--index {index}: {index_path} is not whole; mega retro build --index {index} makes it")
    record = below(parse_json(read_limited(path, 1 << 16, str(path)), str(path)))
    if record.get("database") != _digest(manifest):
        raise ValueError(f"--index {index}: {index_path} is of another database; delete it and build it again")


def _digest(manifest: DatabaseManifest) -> str:
    return hashlib.sha256(json.dumps(manifest.as_json(), sort_keys=True).encode()).hexdigest()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[-160:]
