"""What `mega preprocess` and the verbs of `mega data` read and write, as their sections. No torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import REQUIRED, VerbSection, like, option


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(VerbSection):
    """Which texts become which token files, and how."""

    title: ClassVar[str] = "Token files"

    input: tuple[str, ...] = option(
        REQUIRED,
        "JSON lines, also .gz .zst .xz .bz2; .txt; .parquet; a dataset, also of the Hub; a folder; a glob; - for stdin",
        hub="dataset",
    )
    output_prefix: str = option(REQUIRED, "beginning of the output names")
    json_keys: tuple[str, ...] = option((), "keys of each line; text by default", megatron="--json-key")
    append_eod: bool = option(False, "end every document with its token")
    parse_special_tokens: bool = option(False, "special tokens that a text spells are tokens, not text")
    workers: int = option(1, "processes that tokenise")
    on_error: Literal["stop", "skip"] = option("stop", "at a line that is not a document")
    text_lines: bool = option(False, "each line of a text file is a document")
    split_sentences: bool = option(False, "cut documents into sentences, as BERT and T5 need")
    sentence_splitter: Literal["punkt", "sentencex"] | None = option(
        None, "punkt reads its data from NLTK_DATA; sentencex is faster [punkt]"
    )
    lang: str | None = option(None, "language of the sentences [english]")
    keep_newlines: bool = option(False, "blanks after a sentence belong to it")
    shard: str = option("1/1", "i/N, 1 <= i <= N: only this part; then `mega data merge` the parts")
    resume: bool = option(False, "note progress on the disk, and resume from what is noted")
    overwrite: bool = option(False, "replace token files of other inputs or settings; equal ones are kept")


@dataclass(frozen=True, kw_only=True)
class MergeOptions(VerbSection):
    """Which pairs are merged into which."""

    title: ClassVar[str] = "Token files"

    output_prefix: str = option(REQUIRED, "prefix of the pair to write")
    input: tuple[str, ...] = option((), "the same, as Megatron-LM's merge_datasets.py has it")
    overwrite: bool = option(False, "replace an output that exists")
    allow_tokenizer_mismatch: bool = option(False, "merge pairs that different tokenizers made")


@dataclass(frozen=True, kw_only=True)
class InspectOptions(VerbSection):
    """What is shown of a pair."""

    title: ClassVar[str] = "Samples"

    samples: int = option(3, "sequences to show")
    json: bool = option(False, "print the same as JSON instead")


@dataclass(frozen=True, kw_only=True)
class NumpyOptions(VerbSection):
    """Which arrays become which pair."""

    title: ClassVar[str] = "Token files"

    input: tuple[str, ...] = option(REQUIRED, ".npy files of ids, folders, globs")
    output_prefix: str = option(REQUIRED, "prefix of the pair to write")
    eod: int | None = option(None, "a run of ids ends a document after this one")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class SplitOptions(VerbSection):
    """Which documents are divided, and how."""

    title: ClassVar[str] = "Documents"

    input: tuple[str, ...] = option(REQUIRED, "JSON lines, plain or packed; folders; globs")
    output_dir: Path = option(REQUIRED, "where the three files go")
    split: str = option("98, 1, 1", "shares of train, valid and test")
    seed: int = option(1234, "seed of the choice")
    json_key: str = option("text", "key of the text")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class PresplitOptions(VerbSection):
    """Which documents are cut into sentences, and how."""

    title: ClassVar[str] = "Documents"

    input: tuple[str, ...] = option(REQUIRED, "JSON lines, plain or packed; folders; globs")
    output: Path = option(REQUIRED, "the JSON-lines file to write")
    sentence_splitter: Literal["punkt", "sentencex"] = option("punkt", "what cuts texts into sentences")
    lang: str = option("english", "language of the text")
    json_key: str = option("text", "key of the text")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class DetokenizeOptions(VerbSection):
    """Which lines are detokenized, and how."""

    title: ClassVar[str] = "Lines"

    input: tuple[str, ...] = option(REQUIRED, "plain text; folders; globs; - for stdin")
    output: Path | None = option(None, "the file to write [standard output]")
    detokenizer: Literal["wiki", "ptb", "fairseq"] = option("fairseq", "whose rules")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(VerbSection):
    """Which lines are encoded, and where."""

    title: ClassVar[str] = "Lines"

    input: tuple[str, ...] = option(REQUIRED, "plain text, encoded line by line")
    output: tuple[Path, ...] = option(REQUIRED, "the files to write, one for each input")
    keep_empty: bool = option(False, "an empty line stays one; else left out")
    overwrite: bool = like(MergeOptions, "overwrite")


@dataclass(frozen=True, kw_only=True)
class SampleOptions(VerbSection):
    """Which samples are shown."""

    title: ClassVar[str] = "Samples"

    input: tuple[str, ...] = option((), "show one conversation of these files on its own", hub="dataset")
    number: int = option(0, "which conversation or training sample, from 0")
    count: int = option(1, "how many, one after another")
    seq_length: int = option(512, "tokens of a training sample")
    seed: int = option(1234, "seed of the samples' order")
    binary_head: bool = option(True, "a BERT sample has two parts", megatron={"--bert-no-binary-head": False})
