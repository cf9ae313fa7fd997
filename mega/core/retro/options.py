"""What the verbs of `mega retro` are given, as their sections. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mega.core.config.option import COUNT, FROM_0, REQUIRED, VerbSection, option


@dataclass(frozen=True, kw_only=True)
class DatabaseOptions(VerbSection):
    """Where a database is built, and of what."""

    title: ClassVar[str] = "Database"

    directory: str = option(REQUIRED, "folder of the database, which is resumed", metavar="<path>")
    embedder: str = option(
        REQUIRED,
        "a BERT that makes a vector of each chunk: a run's directory, or a Hugging Face folder",
        metavar="<path>",
    )
    data_path: tuple[str, ...] = option(
        REQUIRED, "token files that neighbours come from: prefix, or weight prefix weight prefix ..."
    )
    split: str = option(
        "969, 30, 1", "neighbours come from the first documents of each corpus, the first of these shares"
    )
    chunk_length: int = option(64, "tokens of a chunk", megatron="--retro-gpt-chunk-length", within=COUNT)
    block_size: int = option(100_000, "chunks of a block", megatron="--retro-block-size", within=COUNT)
    doc_block_size: int = option(100_000, "documents of a block", megatron="--retro-doc-block-size", within=COUNT)
    embed_batch: int = option(
        128, "chunks that are embedded together", megatron="--retro-bert-batch-size", within=COUNT
    )
    embed_length: int = option(
        256, "tokens of the embedder that are read of a chunk", megatron="--retro-bert-max-chunk-length", within=COUNT
    )
    pad_chunks: bool = option(
        False, "a shorter chunk's vector is that of its text filled with ends of documents, as in Megatron-LM 23.06"
    )
    index: str | None = option(
        None,
        "an index of the vectors that is searched approximately, by faiss's description, such as IVF1024,Flat [none: "
        "all vectors are looked at]",
        megatron="--retro-index-str",
    )
    index_train: int = option(
        1_000_000, "vectors that --index is trained on at most", megatron="--retro-index-ntrain", within=COUNT
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where chunks are embedded")
    shard: str = option("1/1", "i/N, 1 <= i <= N: only these blocks; the same without it then joins them")


@dataclass(frozen=True, kw_only=True)
class QueryOptions(VerbSection):
    """How neighbours are looked for."""

    title: ClassVar[str] = "Query"

    embedder: str = option(REQUIRED, "the BERT that made the vectors of the database", metavar="<path>")
    candidates: int = option(
        200, "chunks that are looked at for each one", megatron="--retro-query-num-neighbors-query", within=COUNT
    )
    saved: int = option(
        20,
        "of these kept at most: those of no document of the sample",
        megatron="--retro-query-num-neighbors-save",
        within=COUNT,
    )
    index: str | None = option(None, "search this index that mega retro build has made [exactly]")
    probes: int = option(256, "of --index: lists that are searched", megatron="--retro-query-nprobe", within=COUNT)
    shard: str = option("1/1", "i/N, 1 <= i <= N: only these blocks")


@dataclass(frozen=True, kw_only=True)
class LookOptions(VerbSection):
    """What is shown of a database."""

    title: ClassVar[str] = "Shown"

    chunk: int | None = option(None, "this chunk", within=FROM_0)
    sample: int | None = option(None, "this sample of --of, with its neighbours", within=FROM_0)
    of: Literal["train", "valid", "test"] = option("train", "whose samples")
