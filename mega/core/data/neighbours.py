"""Samples whose chunks have neighbours (Retro): which chunks of a database were found for each chunk of each sample.

    query/SPLIT_HASH/FIRST-LAST.npy    int64 [rows, saved]: numbers of chunks, nearest first, -1 where there are no more

Row sample x l + u is chunk u of a sample of l chunks. HASH is the md5 of what decides the samples, as in Megatron-LM
23.06, so that a run of other samples does not read them. No torch before a batch is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mega.core.data.build import Datasets
from mega.core.data.chunks import Block, ChunkDatabase, blocks, made, read_array
from mega.core.data.dataset import Dataset
from mega.core.data.gpt import loss_weights
from mega.core.text.tokenizer import Tokenizer, TokenizerIdentity
from mega.core.untrusted import Json, below, parse_json, read_limited

if TYPE_CHECKING:
    from mega.core.batch import NeighbourBatch

_MOST_BYTES = 1 << 20


def query_name(split_name: str, hashes: Sequence[str]) -> str:
    """The folder of the neighbours of a blend's samples. hashes: `md5` of the description of each corpus's."""
    return f"{split_name}_{md5(','.join(hashes))}"


def md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class DatabaseManifest:
    """Of what a database was made: what a run that reads it is held against."""

    NAME: ClassVar[str] = "retro.json"

    chunk_length: int
    block_size: int
    doc_block_size: int
    split: str
    tokenizer: TokenizerIdentity
    eod: int
    pad_chunks: bool
    """Whether the vector of a chunk that is shorter is one of its text filled with the end of a document, as in
    Megatron-LM."""
    embedder: str
    """Digest of what made the vectors."""
    corpora: tuple[tuple[float, str, str], ...]
    """Share, prefix, and a digest of the token files' lengths and bytes."""

    def as_json(self) -> dict[str, Json]:
        return {
            **asdict(self),
            "tokenizer": dict(self.tokenizer._asdict()),
            "corpora": [list(each) for each in self.corpora],
        }

    @classmethod
    def read(cls, folder: Path) -> DatabaseManifest:
        """Errors: ValueError where the folder is not a database, or its file is damaged."""
        path = folder / cls.NAME
        if not path.is_file():
            raise ValueError(f"{folder}: is not a database of neighbours (no {cls.NAME}); mega retro build makes one")
        found = below(parse_json(read_limited(path, _MOST_BYTES, str(path)), str(path)))
        identity, corpora = TokenizerIdentity.read(found.get("tokenizer")), found.get("corpora")
        sizes = [found.get(name) for name in ("chunk_length", "block_size", "doc_block_size", "eod")]
        words = [found.get(name) for name in ("split", "embedder")]
        match (sizes, words, identity, corpora):
            case [int(length), int(size), int(documents), int(eod)], [str(split), str(embedder)], TokenizerIdentity(), [
                *_
            ]:
                if min(length, size, documents) > 0 and eod >= 0:
                    read = tuple(map(_corpus, corpora if isinstance(corpora, list) else []))
                    padded = found.get("pad_chunks") is True
                    return cls(length, size, documents, split, identity, eod, padded, embedder, read)
        raise ValueError(f"{path}: is damaged; build the database again")

    def check(self, other: DatabaseManifest, folder: Path) -> None:
        """Errors: ValueError naming the first thing in which two differ."""
        for name in self.__annotations__:
            mine, theirs = getattr(self, name, None), getattr(other, name, None)
            if name != "NAME" and mine != theirs:
                raise ValueError(
                    f"{folder}: was made with {name.replace('_', ' ')} {mine}, not {theirs}; name another folder"
                )


def _corpus(found: Json) -> tuple[float, str, str]:
    """One of a manifest's corpora; of nothing that is known where it is damaged."""
    match found:
        case [int() | float() as ratio, str(prefix), str(digest)]:
            return float(ratio), prefix, digest
    return 0.0, "", ""


class DocumentedDataset(Protocol):
    """A dataset that knows the documents of a sample."""

    def __len__(self) -> int: ...
    def __getitem__(self, sample: int) -> NDArray[np.int64]: ...
    def documents(self, sample: int) -> frozenset[tuple[int, int]]:
        """(number of the corpus, of the document in it) of all documents that the sample has tokens of."""


def without_own(
    candidates: NDArray[np.int64], chunks: NDArray[np.uint32], own: frozenset[tuple[int, int]], saved: int
) -> NDArray[np.int64]:
    """The first `saved` of the candidates [n] for a chunk that are of no document of its sample; -1 after the last.

    chunks: of the database. own: the documents of the sample.
    """
    kept = [each for each in candidates.tolist() if each >= 0 and tuple(chunks[each, :2].tolist()) not in own]
    return np.array((kept + [-1] * saved)[:saved], np.int64)


def read_neighbours(path: Path, rows: int, chunks: int) -> NDArray[np.int64]:
    """A block of neighbours, [rows, saved]. Errors: ValueError where it is torn, of another shape or beyond."""
    try:
        found = read_array(path, "neighbors")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); delete it and query again") from None
    if found.ndim != 2 or len(found) != rows or found.dtype != np.int64:
        raise ValueError(f"{path}: is {found.dtype} {list(found.shape)}, must be int64 [{rows}, neighbours]")
    if found.size and (found.min() < -1 or found.max() >= chunks):
        raise ValueError(f"{path}: names chunk {found.max()}, but the database has {chunks}")
    return np.asarray(found, np.int64)


class NeighbourTable:
    """The neighbours of a dataset's chunks, read from their blocks as they are asked for.

    Errors: ValueError naming a block that is missing, as of `read_neighbours`, or of another width than the first.
    """

    def __init__(self, folder: Path, rows: int, size: int, chunks: int) -> None:
        self._size = size
        found: list[Block] = blocks(rows, size, ".npy")
        for block in found:
            if not made(folder / block.name):
                raise ValueError(f"{folder / block.name}: does not exist; mega retro query writes it")
        self._open = {block.first: read_neighbours(folder / block.name, block.rows, chunks) for block in found}
        widths = sorted({array.shape[1] for array in self._open.values()})
        if len(widths) > 1:
            raise ValueError(f"{folder}: holds blocks of {widths} neighbours a chunk; delete it and query again")

    @cached_property
    def saved(self) -> int:
        """Neighbours of a chunk, at most."""
        return next((array.shape[1] for array in self._open.values()), 0)

    def __getitem__(self, rows: slice) -> NDArray[np.int64]:
        """[rows, saved]"""
        parts, at = [], rows.start
        while at < rows.stop:
            begin = at // self._size * self._size
            parts.append(self._open[begin][at - begin : rows.stop - begin])
            at = begin + self._size
        return np.concatenate(parts)


def filled(database: ChunkDatabase, numbers: NDArray[np.int64], retrieved: int, *, crossing: bool) -> NDArray[np.int64]:
    """The tokens [l, k, r] of neighbours by their numbers [l, k], each with the chunks after it; of -1 ends of
    documents. crossing: those may be of the next document (the first follows the last, as in Megatron-LM 23.06), of
    which the neighbour's sample may have tokens; else ends of documents stand there."""
    length = database.length
    found = np.full((*numbers.shape, retrieved * length), database.eod, np.int64)
    for chunk, rank in np.argwhere(numbers >= 0).tolist():
        first = int(numbers[chunk, rank])
        for place in range(retrieved):
            number = (first + place) % len(database)
            if crossing or (database.chunks[number, :2] == database.chunks[first, :2]).all():
                found[chunk, rank, place * length : (place + 1) * length] = database.tokens(number)
    return found


class NeighbourSample(NamedTuple):
    """tokens: int64 [seq_length + 1]. neighbours: int64 [l, k, r]. found: bool [l, k]."""

    tokens: NDArray[np.int64]
    neighbours: NDArray[np.int64]
    found: NDArray[np.bool_]


class NeighbourDataset:
    """The samples of a dataset with the k nearest neighbours of each of their chunks, each with the chunks after it.

    A neighbour that is missing is filled with the end of a document, and is not read. loss_eod: the token after which
    nothing is to be predicted; None: all is. crossing: as of `filled`.
    """

    def __init__(
        self,
        dataset: DocumentedDataset,
        database: ChunkDatabase,
        neighbours: NeighbourTable,
        *,
        each: int,
        retrieved: int,
        crossing: bool = False,
        loss_eod: int | None = None,
    ) -> None:
        self._crossing = crossing
        self._dataset, self._database, self._neighbours = dataset, database, neighbours
        self._each, self._retrieved, self._loss_eod = each, retrieved, loss_eod
        self._reads = True

    def __len__(self) -> int:
        return len(self._dataset)

    def alone(self) -> NeighbourDataset:
        """The same samples without any neighbours."""
        found = copy(self)
        found._reads = False
        return found

    def __getitem__(self, sample: int) -> NeighbourSample:
        tokens, database = self._dataset[sample], self._database
        chunks = (len(tokens) - 1) // database.length
        numbers = self._neighbours[slice(sample * chunks, (sample + 1) * chunks)][:, : self._each]
        numbers = numbers if self._reads else np.full_like(numbers, -1)
        neighbours = filled(database, numbers, self._retrieved, crossing=self._crossing)
        return NeighbourSample(tokens, neighbours, numbers >= 0)

    def collate(self, samples: Sequence[NeighbourSample], first: int) -> NeighbourBatch:
        """first: number of the first sample."""
        import torch

        from mega.core.batch import NeighbourBatch

        text = np.stack([sample.tokens for sample in samples])
        tokens = np.ascontiguousarray(text[:, :-1])
        found = np.stack([sample.found for sample in samples])
        return NeighbourBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(np.ascontiguousarray(text[:, 1:])),
            loss_weights=torch.from_numpy(loss_weights(tokens, self._loss_eod)),
            positions=torch.arange(tokens.shape[1]).expand(tokens.shape),
            samples=torch.arange(first, first + len(samples)),
            neighbours=torch.from_numpy(np.stack([sample.neighbours for sample in samples])),
            found=None if found.all() else torch.from_numpy(found),
        )


def corpus_digest(content: Mapping[str, str | None]) -> str:
    """What tells a corpus, by its content as `IndexedDataset` has it, from another one."""
    return ":".join(str(value)[:16] for name, value in content.items() if name != "tokens")


def _check_made(manifest: DatabaseManifest, folder: Path, length: int, tokenizer: Tokenizer | None) -> None:
    """Errors: ValueError where a database has other chunks, or was made with another tokenizer."""
    if manifest.chunk_length != length:
        raise ValueError(f"--retro-chunk-length {length}: {folder} has chunks of {manifest.chunk_length} tokens")
    if tokenizer is None or not tokenizer.made(manifest.tokenizer):
        named = "a vocabulary alone" if tokenizer is None else str(tokenizer.identity())
        raise ValueError(
            f"--retro {folder}: was made with the tokenizer {manifest.tokenizer}, and the run's is {named}"
        )


def with_neighbours(
    data: Datasets,
    folder: Path,
    tokenizer: Tokenizer | None,
    *,
    length: int,
    each: int,
    retrieved: int,
    crossing: bool,
    eod_loss: bool,
) -> Datasets:
    """The datasets of a run with the neighbours of their chunks; validation without them is a set of its own.

    length: tokens of a chunk. each, retrieved, crossing: as of `NeighbourDataset`. eod_loss: nothing is to be predicted
    after the end of a document. Errors: ValueError naming flag or file.
    """
    manifest = DatabaseManifest.read(folder)
    _check_made(manifest, folder, length, tokenizer)
    own = {corpus_digest(content): prefix for prefix, content in data.corpora.items()}
    for digest, prefix in own.items():
        if digest not in {made_of for _, _, made_of in manifest.corpora}:
            raise ValueError(f"--data-path {prefix}: is none of the corpora of which {folder} was made; build it again")
    prefixes = [own.get(digest, prefix) for _, prefix, digest in manifest.corpora]
    database = ChunkDatabase(folder, length, manifest.eod, prefixes)
    loss_eod = manifest.eod if eod_loss else None

    def read(name: str, dataset: Dataset | None) -> NeighbourDataset | None:
        if dataset is None:
            return None
        query = folder / "query" / query_name(name, [md5(one) for one in data.described[name]])
        if not query.is_dir():
            raise ValueError(
                f"--retro {folder}: has no neighbours of this run's {name} samples ({query.name}); give the "
                "--data-path, --split, --seq-length, --seed and numbers of samples of mega retro query, or query again"
            )
        documented = cast(DocumentedDataset, dataset)
        rows = len(documented) * ((len(documented[0]) - 1) // length)
        table = NeighbourTable(query, rows, manifest.block_size, len(database))
        if table.saved < each:
            raise ValueError(f"--retro-neighbours {each}: {query} has {table.saved} of each chunk")
        sizes = {"each": each, "retrieved": retrieved}
        return NeighbourDataset(documented, database, table, **sizes, crossing=crossing, loss_eod=loss_eod)

    train, valid, test = (read(name, getattr(data, name)) for name in ("train", "valid", "test"))
    alone: dict[str, Dataset] = {} if valid is None else {"valid-without-neighbours": valid.alone()}
    return replace(data, train=train, valid=valid, test=test, named={**data.named, **alone})
