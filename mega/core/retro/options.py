"""Option sections of the `mega retro` subcommands. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mega.core.config.option import COUNT, FROM_0, REQUIRED, VerbSection, option


@dataclass(frozen=True, kw_only=True)
class DatabaseOptions(VerbSection):
    """Options for the location and the content of a database."""

    title: ClassVar[str] = "Database"

    directory: str = option(REQUIRED, "folder of the database; an interrupted build resumes", metavar="<path>")
    embedder: str = option(
        REQUIRED,
        "BERT that embeds the chunks: a run's directory, or a Hugging Face folder",
        metavar="<path>",
    )
    data_path: tuple[str, ...] = option(
        REQUIRED, "token files from which neighbours are taken: prefix, or weight prefix weight prefix ..."
    )
    split: str = option(
        "969, 30, 1", "data split; neighbours come only from the training documents, the first share of each corpus"
    )
    chunk_length: int = option(64, "tokens per chunk", megatron="--retro-gpt-chunk-length", within=COUNT)
    block_size: int = option(100_000, "chunks per block", megatron="--retro-block-size", within=COUNT)
    doc_block_size: int = option(100_000, "documents per block", megatron="--retro-doc-block-size", within=COUNT)
    embed_batch: int = option(128, "chunks per batch of the embedder", megatron="--retro-bert-batch-size", within=COUNT)
    embed_length: int = option(
        256,
        "the embedder reads at most this many tokens of a chunk",
        megatron="--retro-bert-max-chunk-length",
        within=COUNT,
    )
    embed_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "dtype of the embedder; bf16 is several times as fast on a GPU, and rounds the vectors"
    )
    pad_chunks: bool = option(
        False, "pad short chunks with end-of-document tokens before embedding, as in Megatron-LM 23.06"
    )
    index: str | None = option(
        None,
        "build an approximate index: a description of faiss's index factory, such as IVF1024,Flat [none: exact search "
        "in all vectors]",
        megatron="--retro-index-str",
    )
    index_train: int = option(
        1_000_000, "maximum number of vectors that --index is trained on", megatron="--retro-index-ntrain", within=COUNT
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "device for embedding")
    shard: str = option(
        "1/1",
        "i/N, 1 <= i <= N: process only this share of the blocks; finally, repeat the command without --shard to join "
        "all shares",
    )


@dataclass(frozen=True, kw_only=True)
class QueryOptions(VerbSection):
    """Options for the search for neighbours."""

    title: ClassVar[str] = "Query"

    embedder: str = option(REQUIRED, "the BERT that made the vectors of the database", metavar="<path>")
    candidates: int = option(
        200, "number of candidate chunks per query chunk", megatron="--retro-query-num-neighbors-query", within=COUNT
    )
    saved: int = option(
        20,
        "number of candidates to save; candidates from the sample's own documents are removed first",
        megatron="--retro-query-num-neighbors-save",
        within=COUNT,
    )
    index: str | None = option(None, "search this index, built by mega retro build [exact search]")
    probes: int = option(256, "number of lists of --index to search", megatron="--retro-query-nprobe", within=COUNT)
    shard: str = option("1/1", "i/N, 1 <= i <= N: process only this share of the blocks")


@dataclass(frozen=True, kw_only=True)
class LookOptions(VerbSection):
    """Options that select the parts of a database to print."""

    title: ClassVar[str] = "Shown"

    chunk: int | None = option(None, "index of a chunk to print", within=FROM_0)
    sample: int | None = option(None, "index of a sample of --of to print, with its neighbours", within=FROM_0)
    of: Literal["train", "valid", "test"] = option("train", "dataset that contains --sample")
