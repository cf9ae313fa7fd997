"""Option sections of `mega preprocess` and the `mega data` subcommands. This module does not import torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import REQUIRED, VerbSection, like, option


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(VerbSection):
    """Options for the input texts, the output token files, and the tokenization."""

    title: ClassVar[str] = "Token files"

    input: tuple[str, ...] = option(
        REQUIRED,
        "JSON lines, plain or compressed (.gz .zst .xz .bz2); .txt; .parquet; a dataset, local or on the Hub; a "
        "folder; a glob; - for stdin",
        hub="dataset",
    )
    output_prefix: str = option(REQUIRED, "prefix of the output file names")
    json_keys: tuple[str, ...] = option(
        (), "keys of the texts to tokenize in each line; text by default", megatron="--json-key"
    )
    append_eod: bool = option(False, "end every document with the end-of-document token")
    parse_special_tokens: bool = option(False, "encode names of special tokens in texts as these tokens")
    workers: int = option(1, "number of processes")
    on_error: Literal["stop", "skip"] = option("stop", "what to do with a line that is not a document")
    text_lines: bool = option(False, "each line of a text file is a document")
    split_sentences: bool = option(False, "cut documents into sentences, as BERT and T5 need")
    sentence_splitter: Literal["punkt", "sentencex"] | None = option(
        None, "library that splits sentences; punkt reads its data from NLTK_DATA; sentencex is faster [punkt]"
    )
    lang: str | None = option(None, "language of the sentences [english]")
    keep_newlines: bool = option(False, "keep the white space after each sentence")
    shard: str = option("1/1", "i/N, 1 <= i <= N: process only this part; then join the parts with `mega data merge`")
    resume: bool = option(False, "save progress to disk, and resume from the saved progress")
    overwrite: bool = option(
        False,
        "replace token files made from other inputs or settings; files made from the same inputs and settings are kept",
    )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(VerbSection):
    """Options for the input and output of a merge."""

    title: ClassVar[str] = "Token files"

    output_prefix: str = option(REQUIRED, "prefix of the pair to write")
    input: tuple[str, ...] = option((), "prefixes in order, or one folder: the flag of Megatron-LM's merge_datasets.py")
    overwrite: bool = option(False, "replace an existing output")
    allow_tokenizer_mismatch: bool = option(False, "merge pairs that were made with different tokenizers")


@dataclass(frozen=True, kw_only=True)
class InspectOptions(VerbSection):
    """Options for the output of `mega data inspect`."""

    title: ClassVar[str] = "Samples"

    samples: int = option(3, "number of sequences to show")
    json: bool = option(False, "print JSON")


@dataclass(frozen=True, kw_only=True)
class NumpyOptions(VerbSection):
    """Options for the input arrays and the output token files."""

    title: ClassVar[str] = "Token files"

    input: tuple[str, ...] = option(REQUIRED, ".npy files of ids, folders, globs")
    output_prefix: str = option(REQUIRED, "prefix of the pair to write")
    eod: int | None = option(None, "id that ends a document within an array of ids")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class SplitOptions(VerbSection):
    """Options that select the documents to divide, and the method."""

    title: ClassVar[str] = "Documents"

    input: tuple[str, ...] = option(REQUIRED, "JSON lines, plain or compressed; folders; globs")
    output_dir: Path = option(REQUIRED, "folder for the three output files")
    split: str = option("98, 1, 1", "shares of train, valid and test")
    seed: int = option(1234, "seed of the random choice")
    json_key: str = option("text", "key of the text")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class PresplitOptions(VerbSection):
    """Options that select the documents to cut into sentences, and the method."""

    title: ClassVar[str] = "Documents"

    input: tuple[str, ...] = option(REQUIRED, "JSON lines, plain or compressed; folders; globs")
    output: Path = option(REQUIRED, "the JSON-lines file to write")
    sentence_splitter: Literal["punkt", "sentencex"] = option("punkt", "library that splits sentences")
    lang: str = option("english", "language of the text")
    json_key: str = option("text", "key of the text")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class DetokenizeOptions(VerbSection):
    """Options that select the lines to detokenize, and the method."""

    title: ClassVar[str] = "Lines"

    input: tuple[str, ...] = option(REQUIRED, "plain text; folders; globs; - for stdin")
    output: Path | None = option(None, "the file to write [standard output]")
    detokenizer: Literal["wiki", "ptb", "fairseq"] = option("fairseq", "set of detokenization rules")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(VerbSection):
    """Options for the input and output of line encoding."""

    title: ClassVar[str] = "Lines"

    input: tuple[str, ...] = option(REQUIRED, "plain text, encoded line by line")
    output: tuple[Path, ...] = option(REQUIRED, "the files to write, one for each input")
    keep_empty: bool = option(False, "keep empty lines instead of dropping them")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class SampleOptions(VerbSection):
    """Options that select the samples to print."""

    title: ClassVar[str] = "Samples"

    input: tuple[str, ...] = option(
        (), "show conversations from these files instead of training samples", hub="dataset"
    )
    number: int = option(0, "number of the first conversation or training sample, from 0")
    count: int = option(1, "number of consecutive conversations or samples")
    seq_length: int = option(512, "number of tokens in a training sample")
    seed: int = option(1234, "seed of the samples' order")
    binary_head: bool = option(True, "use BERT samples with two segments", megatron={"--bert-no-binary-head": False})
