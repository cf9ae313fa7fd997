"""Read samples together with the retrieved neighbours of their chunks (Retro).

    query/SPLIT_HASH/FIRST-LAST.npy    int64 [rows, saved]: chunk indices, nearest first, padded with -1

With l chunks per sample, row sample * l + u contains the neighbours of chunk u of the sample. HASH is the md5 hash of
the description of the samples, as in Megatron-LM 23.06, so that a run with different samples does not read these files.
torch is imported only to build a batch.
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
from mega.core.data.chunks import Block, ChunkDatabase, blocks, is_built, read_array
from mega.core.data.dataset import Dataset
from mega.core.data.gpt import loss_weights
from mega.core.text.tokenizer import Tokenizer, TokenizerIdentity
from mega.core.untrusted import Json, below, parse_json, read_limited

if TYPE_CHECKING:
    from mega.core.batch import NeighbourBatch

_MOST_BYTES = 1 << 20


def query_name(split_name: str, hashes: Sequence[str]) -> str:
    """Return the name of the folder for the neighbours of a blend's samples. hashes: md5 hashes of the corpora's
    descriptions."""
    return f"{split_name}_{md5(','.join(hashes))}"


def md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class DatabaseManifest:
    """The settings and corpora with which a database was built. They must match those of a run that reads the
    database."""

    NAME: ClassVar[str] = "retro.json"

    chunk_length: int
    """Number of tokens per chunk."""
    block_size: int
    """Maximum number of chunks per file."""
    doc_block_size: int
    """Maximum number of documents per file."""
    split: str
    """The value of --split."""
    tokenizer: TokenizerIdentity
    """Identity of the tokenizer that wrote the token files."""
    eod: int
    """Id that ends a document."""
    pad_chunks: bool
    """Whether short chunks are padded with the end-of-document text before embedding, as in Megatron-LM."""
    embedder: str
    """Digest of the embedding model and its settings."""
    corpora: tuple[tuple[float, str, str], ...]
    """For each corpus: share, prefix, and digest of the lengths and bytes of the token files."""

    def as_json(self) -> dict[str, Json]:
        return {
            **asdict(self),
            "tokenizer": dict(self.tokenizer._asdict()),
            "corpora": [list(each) for each in self.corpora],
        }

    @classmethod
    def read(cls, folder: Path) -> DatabaseManifest:
        """Read the manifest of a database. Errors: ValueError if the folder is not a database, or its file is
        damaged."""
        path = folder / cls.NAME
        if not path.is_file():
            raise ValueError(f"{folder}: is not a database of neighbours (no {cls.NAME}); mega retro build makes one")
        content = below(parse_json(read_limited(path, _MOST_BYTES, str(path)), str(path)))
        identity, corpora = TokenizerIdentity.read(content.get("tokenizer")), content.get("corpora")
        sizes = [content.get(name) for name in ("chunk_length", "block_size", "doc_block_size", "eod")]
        words = [content.get(name) for name in ("split", "embedder")]
        match (sizes, words, identity, corpora):
            case [int(length), int(size), int(documents), int(eod)], [str(split), str(embedder)], TokenizerIdentity(), [
                *_
            ]:
                if min(length, size, documents) > 0 and eod >= 0:
                    read = tuple(map(_corpus, corpora if isinstance(corpora, list) else []))
                    padded = content.get("pad_chunks") is True
                    return cls(length, size, documents, split, identity, eod, padded, embedder, read)
        raise ValueError(f"{path}: is damaged; build the database again")

    def check(self, other: DatabaseManifest, folder: Path) -> None:
        """Compare two manifests. Errors: ValueError naming the first field in which they differ."""
        for name in self.__annotations__:
            value, other_value = getattr(self, name, None), getattr(other, name, None)
            if name != "NAME" and value != other_value:
                raise ValueError(
                    f"{folder}: was made with {name.replace('_', ' ')} {value}, not {other_value}; name another folder"
                )


def _corpus(entry: Json) -> tuple[float, str, str]:
    """Parse a corpus of a manifest. For a damaged entry, return a corpus with empty fields."""
    match entry:
        case [int() | float() as ratio, str(prefix), str(digest)]:
            return float(ratio), prefix, digest
    return 0.0, "", ""


class DocumentedDataset(Protocol):
    """A dataset that can list the documents of a sample."""

    def __len__(self) -> int: ...
    def __getitem__(self, sample: int) -> NDArray[np.int64]: ...
    def documents(self, sample: int) -> frozenset[tuple[int, int]]:
        """Return (corpus index, document index) of all documents that contribute tokens to the sample."""


def exclude_own(
    candidates: NDArray[np.int64], chunks: NDArray[np.uint32], own_documents: frozenset[tuple[int, int]], saved: int
) -> NDArray[np.int64]:
    """Return the first `saved` of a chunk's candidates [n] that are not from the documents of the chunk's sample,
    padded with -1.

    chunks: the chunks of the database. own_documents: the documents of the sample.
    """
    foreign = [
        each for each in candidates.tolist() if each >= 0 and tuple(chunks[each, :2].tolist()) not in own_documents
    ]
    return np.array((foreign + [-1] * saved)[:saved], np.int64)


def read_neighbours(path: Path, rows: int, chunks: int) -> NDArray[np.int64]:
    """Read a block of neighbours, [rows, saved]. Errors: ValueError if the block is damaged or has a wrong shape, or if
    a chunk index is invalid."""
    try:
        block = read_array(path, "neighbors")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); delete it and query again") from None
    if block.ndim != 2 or len(block) != rows or block.dtype != np.int64:
        raise ValueError(f"{path}: is {block.dtype} {list(block.shape)}, must be int64 [{rows}, neighbours]")
    if block.size and (block.min() < -1 or block.max() >= chunks):
        wrong = block.min() if block.min() < -1 else block.max()
        raise ValueError(f"{path}: names chunk {wrong}, but the database has {chunks}; delete it and query again")
    return np.asarray(block, np.int64)


class NeighbourTable:
    """The neighbours of a dataset's chunks, memory-mapped from their blocks.

    Errors: ValueError naming a block that is missing, is rejected by `read_neighbours`, or differs in width from the
    first block.
    """

    def __init__(self, folder: Path, rows: int, size: int, chunks: int) -> None:
        self._size = size
        table_blocks: list[Block] = blocks(rows, size, ".npy")
        for block in table_blocks:
            if not is_built(folder / block.name):
                raise ValueError(f"{folder / block.name}: does not exist; mega retro query writes it")
        self._open = {block.first: read_neighbours(folder / block.name, block.rows, chunks) for block in table_blocks}
        widths = sorted({array.shape[1] for array in self._open.values()})
        if len(widths) > 1:
            raise ValueError(f"{folder}: holds blocks of {widths} neighbours a chunk; delete it and query again")

    @cached_property
    def saved(self) -> int:
        """Maximum number of neighbours per chunk."""
        return next((array.shape[1] for array in self._open.values()), 0)

    def __getitem__(self, rows: slice) -> NDArray[np.int64]:
        """Return the chunk indices of the rows, [rows, saved]."""
        parts, row = [], rows.start
        while row < rows.stop:
            begin = row // self._size * self._size
            parts.append(self._open[begin][row - begin : rows.stop - begin])
            row = begin + self._size
        return np.concatenate(parts)


def neighbour_tokens(
    database: ChunkDatabase, numbers: NDArray[np.int64], retrieved: int, *, crossing: bool
) -> NDArray[np.int64]:
    """Return the tokens [l, k, r] of neighbours, given as chunk indices [l, k]. A neighbour consists of `retrieved`
    consecutive chunks, starting at its chunk index. For index -1, all tokens are end-of-document tokens.

        numbers[u, j] = n, retrieved = 2    ->    tokens[u, j] = chunk n | chunk n + 1

    crossing: whether the later chunks of a neighbour may belong to the next document, as in Megatron-LM 23.06. The last
    chunk is then followed by the first chunk. The next document may be part of the sample for which the neighbour is
    retrieved. If False, chunks of the next document are replaced with end-of-document tokens.
    """
    length = database.length
    tokens = np.full((*numbers.shape, retrieved * length), database.eod, np.int64)
    for chunk, rank in np.argwhere(numbers >= 0).tolist():
        first = int(numbers[chunk, rank])
        for following in range(retrieved):
            number = (first + following) % len(database)
            if crossing or (database.chunks[number, :2] == database.chunks[first, :2]).all():
                tokens[chunk, rank, following * length : (following + 1) * length] = database.tokens(number)
    return tokens


class NeighbourSample(NamedTuple):
    """A sample and its neighbours. tokens: int64 [seq_length + 1]. neighbours: int64 [l, k, r]. found: bool [l, k],
    whether the neighbour exists."""

    tokens: NDArray[np.int64]
    neighbours: NDArray[np.int64]
    found: NDArray[np.bool_]


class NeighbourDataset:
    """The samples of a dataset with the nearest neighbours of each chunk.

    each: number of neighbours of a chunk. retrieved: number of consecutive chunks in a neighbour. Missing neighbours
    are filled with end-of-document tokens and masked. loss_eod: id at which the loss weight is 0; None if every token
    has weight 1. crossing: see `neighbour_tokens`.
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
        """Return a dataset of the same samples in which all neighbours are missing."""
        copied = copy(self)
        copied._reads = False
        return copied

    def __getitem__(self, sample: int) -> NeighbourSample:
        tokens, database = self._dataset[sample], self._database
        chunks = (len(tokens) - 1) // database.length
        numbers = self._neighbours[slice(sample * chunks, (sample + 1) * chunks)][:, : self._each]
        numbers = numbers if self._reads else np.full_like(numbers, -1)
        neighbours = neighbour_tokens(database, numbers, self._retrieved, crossing=self._crossing)
        return NeighbourSample(tokens, neighbours, numbers >= 0)

    def collate(self, samples: Sequence[NeighbourSample], first: int) -> NeighbourBatch:
        """Build a microbatch. first: index of the first sample."""
        import torch

        from mega.core.batch import NeighbourBatch

        text = np.stack([sample.tokens for sample in samples])
        tokens = np.ascontiguousarray(text[:, :-1])
        is_found = np.stack([sample.found for sample in samples])
        return NeighbourBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(np.ascontiguousarray(text[:, 1:])),
            loss_weights=torch.from_numpy(loss_weights(tokens, self._loss_eod)),
            positions=torch.arange(tokens.shape[1]).expand(tokens.shape),
            samples=torch.arange(first, first + len(samples)),
            neighbours=torch.from_numpy(np.stack([sample.neighbours for sample in samples])),
            found=None if is_found.all() else torch.from_numpy(is_found),
        )


def corpus_digest(content: Mapping[str, str | None]) -> str:
    """Return a string that identifies a corpus, given the result of `IndexedDataset.content`."""
    return ":".join(str(value)[:16] for name, value in content.items() if name != "tokens")


def manifest_for(folder: Path, length: int, tokenizer: Tokenizer | None) -> DatabaseManifest:
    """Return the manifest of a run's database. Errors: ValueError if `folder` is not a database, or if the chunk length
    or the tokenizer of the database differs."""
    manifest = DatabaseManifest.read(folder)
    if manifest.chunk_length != length:
        raise ValueError(f"--retro-chunk-length {length}: {folder} has chunks of {manifest.chunk_length} tokens")
    if tokenizer is None or not tokenizer.made(manifest.tokenizer):
        run_tokenizer = "a vocabulary alone" if tokenizer is None else str(tokenizer.identity())
        raise ValueError(
            f"--retro {folder}: was made with the tokenizer {manifest.tokenizer}, and the run's is {run_tokenizer}"
        )
    return manifest


def query_folder(folder: Path, name: str, described: Sequence[str]) -> Path:
    """Return the folder with the neighbours of a split's samples. described: the split's `Datasets.described`. Errors:
    ValueError if the neighbours of these samples have not been computed."""
    query = folder / "query" / query_name(name, [md5(one) for one in described])
    if not query.is_dir():
        raise ValueError(
            f"--retro {folder}: has no neighbours of this run's {name} samples ({query.name}); give the "
            "--data-path, --split, --seq-length, --seed and numbers of samples of mega retro query, or query again"
        )
    return query


def with_neighbours(
    data: Datasets,
    folder: Path,
    manifest: DatabaseManifest,
    *,
    each: int,
    retrieved: int,
    crossing: bool,
    eod_loss: bool,
) -> Datasets:
    """Add the neighbours of chunks to each dataset of a run, and add a copy of the validation set without neighbours.

    manifest: from `manifest_for`. each, retrieved, crossing: see `NeighbourDataset`. eod_loss: whether the loss
    after the end of a document is masked. Errors: ValueError naming flag or file.
    """
    # Match corpora by content, because prefixes may differ between the run and the database.
    prefix_of = {corpus_digest(content): prefix for prefix, content in data.corpora.items()}
    for digest, prefix in prefix_of.items():
        if digest not in {made_of for _, _, made_of in manifest.corpora}:
            raise ValueError(f"--data-path {prefix}: is none of the corpora of which {folder} was made; build it again")
    prefixes = [prefix_of.get(digest, prefix) for _, prefix, digest in manifest.corpora]
    length = manifest.chunk_length
    database = ChunkDatabase(folder, length, manifest.eod, prefixes)
    loss_eod = manifest.eod if eod_loss else None

    def read(name: str, dataset: Dataset | None) -> NeighbourDataset | None:
        if dataset is None:
            return None
        query = query_folder(folder, name, data.described[name])
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
