"""Cut token files, block by block, into the chunks of the database in which Retro searches for neighbours.

    db/individual/NAME/FIRST-LAST.safetensors   one block of documents: chunks_valid, chunks_invalid uint32 [n, 4]
                                                (document, first token, end, length in the embedder's tokens) and
                                                doc_offsets uint64 [documents, 2] (document, chunks up to its end)
    db/merged/{train,valid}.safetensors         chunks uint32 [n, 5], with the corpus index as first column, and
                                                doc_offsets uint64 [documents, 3]; a chunk's index is its row in train
    db/indexed_dataset_infos.json               the corpora, with their document and chunk counts

Names and arrays are identical to those of Megatron-LM 23.06. HDF5 files from Megatron-LM can also be read (with the
extra `retro`). A document is one sequence of the token files. A block depends only on the corpus, so the files do not
depend on the number of processes. This module does not import torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mega.core.data.indexed import IndexedDataset
from mega.core.data.order import split_boundaries, split_shares
from mega.core.files import whole_file
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import Json, below, parse_json, read_limited

Arrays = Mapping[str, NDArray[np.generic]]
INFOS = "db/indexed_dataset_infos.json"
_MOST_BYTES = 1 << 24


class Block(NamedTuple):
    """A range of rows stored in one file."""

    first: int
    last: int
    name: str

    @property
    def rows(self) -> int:
        return self.last - self.first


def blocks(rows: int, size: int, suffix: str) -> list[Block]:
    """
    >>> [block.name for block in blocks(14, 5, ".npy")]
    ['000-005.npy', '005-010.npy', '010-014.npy']
    """
    digits = math.ceil(math.log10(rows)) + 1 if rows else 1
    ends = ((first, min(first + size, rows)) for first in range(0, rows, size))
    return [Block(first, last, f"{first:0{digits}}-{last:0{digits}}{suffix}") for first, last in ends]


@dataclass(frozen=True)
class ChunkedCorpus:
    """A corpus of the database. The fields are named as in the JSON file."""

    ratio: float  # Share of the corpus in the blend
    prefix: str  # Prefix of the corpus's token files
    name: str  # Name of the corpus's folder
    n_docs: int  # Number of documents
    n_docs_train: int  # Number of documents in the training split
    n_chunks: int  # Number of valid chunks
    n_chunks_train: int  # Number of valid chunks in the training split
    n_chunks_invalid: int  # Number of chunks without tokens for the embedder


@dataclass(frozen=True)
class ChunkSource:
    """A corpus to cut into chunks."""

    ratio: float  # Share of the corpus in the blend
    prefix: str  # Prefix of the corpus's token files
    corpus: IndexedDataset  # The token files
    training: int  # Number of leading documents from which neighbours may be retrieved

    @property
    def name(self) -> str:
        return Path(self.prefix).name


def sources(blend: Sequence[tuple[float | None, str]], split: str) -> list[ChunkSource]:
    """Open the corpora of a blend. The training documents are the first documents of a corpus; their share is the first
    in `split`.

    Errors: ValueError naming the file, the split, or a name that two corpora share.
    """
    share, chunk_sources = split_shares(split)[0], list[ChunkSource]()
    for weight, prefix in blend:
        corpus, prefix = (
            IndexedDataset(prefix),
            os.path.abspath(prefix),
        )  # absolute path, because working directories differ between processes
        # Megatron-LM's count, reduced where it would include validation documents
        training_documents = min(int(share * len(corpus)), split_boundaries(split, len(corpus))[1])
        if training_documents < 1:
            raise ValueError(f"--split {split}: gives no document of {prefix} ({len(corpus)} in all) to the training")
        chunk_sources.append(ChunkSource(1.0 if weight is None else weight, prefix, corpus, training_documents))
    names = [source.name for source in chunk_sources]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--data-path: two corpora are called {repeated[0]}; link one of them to another name")
    return chunk_sources


def cut_block(
    source: ChunkSource, block: Block, length: int, tokenizer: Tokenizer, embedded_length: Callable[[str], int]
) -> Arrays:
    """Cut a block of documents into chunks. Chunks do not include the end-of-document token. A chunk without tokens for
    the embedder is invalid.

    embedded_length: function that returns the length of a text in the embedder's tokens.
    """
    valid, invalid, offsets = list[tuple[int, ...]](), list[tuple[int, ...]](), list[tuple[int, int]]()
    for document in range(block.first, block.last):
        tokens = source.corpus.get(document)
        end = len(tokens) - (len(tokens) > 0 and tokens[-1] == tokenizer.eod)
        for first in range(0, end, length):
            last = min(first + length, end)
            size = embedded_length(tokenizer.decode(tokens[first:last].tolist()))
            (valid if size else invalid).append((document, first, last, size))
        offsets.append((document, len(valid)))
    return {
        "chunks_valid": np.array(valid, np.uint32).reshape(-1, 4),
        "chunks_invalid": np.array(invalid, np.uint32).reshape(-1, 4),
        "doc_offsets": np.array(offsets, np.uint64).reshape(-1, 2),
    }


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def megatron_path(path: Path) -> Path:
    """Return the path of Megatron-LM 23.06's file with the same content."""
    return path.with_suffix(".hdf5")


def is_built(path: Path) -> bool:
    """Whether the file, or Megatron-LM's file with the same content, exists."""
    return path.exists() or megatron_path(path).exists()


def read_hdf5(path: Path, names: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    """Read arrays. Errors: ValueError naming the file if the file is damaged, if an array is missing, or if h5py is not
    installed."""
    try:
        import h5py
    except ImportError:
        raise ValueError(f"{path}: needs h5py; pip install '.[retro]' in a clone") from None
    try:
        with h5py.File(path, "r") as file:
            return {name: np.asarray(file[name]) for name in names}
    except (OSError, KeyError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())}); build it again") from None


def read_array(path: Path, name: str) -> NDArray[np.generic]:
    """Read the single array of a file, or the array `name` of Megatron-LM's file. Errors: OSError, ValueError."""
    if not path.exists() and megatron_path(path).exists():
        return read_hdf5(megatron_path(path), (name,))[name]
    array: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    """Read arrays. Errors: ValueError naming the file if the file is missing, is damaged, or lacks an array."""
    if not path.exists() and megatron_path(path).exists():
        return read_hdf5(megatron_path(path), names)
    if not path.exists():
        raise ValueError(f"{path}: does not exist; mega retro build writes it")
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); delete it and build it again") from None
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(f"{path}: has no {missing[0]}; delete it and build it again")
    return {name: arrays[name] for name in names}


def individual(folder: Path, source: ChunkSource, size: int) -> Iterator[tuple[Block, Path]]:
    """Yield the blocks of a corpus with their file paths."""
    for block in blocks(len(source.corpus), size, ".safetensors"):
        yield block, folder / "db" / "individual" / source.name / block.name


def merge(folder: Path, corpora: Sequence[ChunkSource], size: int) -> list[ChunkedCorpus]:
    """Merge all blocks into the database. Errors: ValueError naming a file that is missing or damaged."""
    parts: dict[str, list[NDArray[np.generic]]] = {"train": [], "valid": []}
    offsets, infos, before = list[NDArray[np.generic]](), list[ChunkedCorpus](), 0
    for number, source in enumerate(corpora):
        chunks, ends, invalid = _joined(folder, source, size)
        first = int(ends[source.training - 1]) if source.training else 0
        numbered = np.insert(chunks, 0, number, axis=1)
        parts["train"].append(numbered[:first])
        parts["valid"].append(numbered[first:])
        documents = np.arange(source.training, dtype=np.uint64)
        rows = (np.full_like(documents, number), documents, ends[: source.training] + np.uint64(before))
        offsets.append(np.stack(rows, 1))
        before += first
        sizes = (len(source.corpus), source.training, len(chunks), first, invalid)
        infos.append(ChunkedCorpus(source.ratio, source.prefix, source.name, *sizes))
    merged = {name: {"chunks": np.concatenate(each).astype(np.uint32)} for name, each in parts.items()}
    merged["train"]["doc_offsets"] = np.concatenate(offsets).astype(np.uint64)
    for name, arrays in merged.items():
        write_arrays(folder / "db" / "merged" / f"{name}.safetensors", arrays)
    with whole_file(folder / INFOS) as file:
        file.write(json.dumps([asdict(info) for info in infos], indent=4).encode())
    return infos


def _joined(folder: Path, source: ChunkSource, size: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64], int]:
    """Return a corpus's valid chunks, the number of chunks up to the end of each document, and the number of invalid
    chunks."""
    chunks, ends, before, invalid = list[NDArray[np.uint32]](), list[NDArray[np.uint64]](), 0, 0
    for _, path in individual(folder, source, size):
        arrays = read_arrays(path, ("chunks_valid", "chunks_invalid", "doc_offsets"))
        chunks.append(arrays["chunks_valid"].astype(np.uint32))
        ends.append(arrays["doc_offsets"][:, 1].astype(np.uint64) + np.uint64(before))
        before, invalid = before + len(chunks[-1]), invalid + len(arrays["chunks_invalid"])
    return np.concatenate(chunks), np.concatenate(ends), invalid


def _counted(content: Json, path: Path) -> ChunkedCorpus:
    """Parse an entry of the JSON file of corpora. Errors: ValueError naming the file if it is damaged."""
    entry = below(content)
    match [entry.get(name) for name in ChunkedCorpus.__annotations__]:
        case [int() | float() as ratio, str(prefix), str(name), *counts] if all(isinstance(n, int) for n in counts):
            documents, training, chunks, usable, invalid = (int(str(count)) for count in counts)
            return ChunkedCorpus(float(ratio), prefix, name, documents, training, chunks, usable, invalid)
    raise ValueError(f"{path}: is damaged; delete it and build again")


class ChunkDatabase:
    """The chunks of a database, which can be retrieved as neighbours. `tokens(chunk)` is int64 [length], padded with
    the end-of-document token.

    prefixes: prefixes of this run's token files, in the order of the corpora; if empty, those recorded in the database
    are used.
    Errors: ValueError naming a file that is missing or damaged, or that belongs to other corpora.
    """

    def __init__(self, folder: Path, length: int, eod: int, prefixes: Sequence[str] = ()) -> None:
        self.folder, self.length, self.eod, self._prefixes = folder, length, eod, prefixes
        path = folder / INFOS
        if not path.exists():
            raise ValueError(f"{path}: does not exist; mega retro build writes it")
        infos = parse_json(read_limited(path, _MOST_BYTES, str(path)), str(path))
        self.corpora = [_counted(entry, path) for entry in (infos if isinstance(infos, list) else [infos])]

    @cached_property
    def chunks(self) -> NDArray[np.uint32]:
        """uint32 [n, 5], as stored in the file."""
        chunks = read_arrays(self.folder / "db" / "merged" / "train.safetensors", ("chunks",))["chunks"]
        return chunks.astype(np.uint32)

    @cached_property
    def _files(self) -> list[IndexedDataset]:
        return [IndexedDataset(prefix) for prefix in self._prefixes or [corpus.prefix for corpus in self.corpora]]

    def __len__(self) -> int:
        return len(self.chunks)

    def ids(self, chunk: int) -> NDArray[np.integer]:
        """Return the tokens of a chunk, without padding."""
        corpus, document, first, last, _ = self.chunks[chunk].tolist()
        return np.asarray(self._files[corpus].get(document, first, last - first))

    def tokens(self, chunk: int) -> NDArray[np.int64]:
        padded, ids = np.full(self.length, self.eod, np.int64), self.ids(chunk)
        padded[: len(ids)] = ids
        return padded
