"""Option sections of the `mega corpus` subcommands. This module does not import torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import COUNT, REQUIRED, VerbSection, like, option
from mega.core.corpus.language import LanguageLibrary


@dataclass(frozen=True, kw_only=True)
class CorpusStepOptions(VerbSection):
    """Input and output of every step, and the number of processes."""

    title: ClassVar[str] = "Documents"

    input: tuple[str, ...] = option(
        REQUIRED, "JSON lines, plain or compressed (.gz .zst .xz .bz2); .parquet; a folder; a glob"
    )
    output: Path = option(REQUIRED, "a folder, or a file: .jsonl, .json or .txt, optionally followed by .gz or .zst")
    workers: int = option(1, "number of processes; the result does not depend on it")
    shard: str = option(
        "1/1", "i/N, 1 <= i <= N: process only this share of the input; all shards write into one folder"
    )
    compress: Literal["none", "gz", "zst"] = option("none", "compression of the files in an output folder")
    on_error: Literal["stop", "skip"] = option("stop", "what to do with a line that is not a document")
    against: tuple[str, ...] = option(
        (),
        "documents of earlier runs, which count as earlier than the input: their duplicates in the input are dropped",
    )
    dropped: Path | None = option(None, "folder for the dropped documents, each with the reason")
    show_dropped: int = option(0, "number of dropped documents to print for each reason")
    overwrite: bool = option(False, "replace an existing result of different inputs or settings")


@dataclass(frozen=True, kw_only=True)
class StepSettings(VerbSection):
    """Options of a single step."""

    title: ClassVar[str] = "Step"
    writes: ClassVar[tuple[str, ...]] = ()
    """Options that name a file which the step writes in addition to --output."""


@dataclass(frozen=True, kw_only=True)
class UrlOptions(StepSettings):
    """Options for dropping URLs."""

    json_key: str = option("url", "key of the URL in JSON lines; in .txt files the line is the URL")
    domains: Path | None = option(None, "file of domain labels to block, one per line, in place of the built-in list")
    extensions: Path | None = option(None, "file of extensions to block (.pdf), in place of the built-in list")
    keep_duplicates: bool = option(False, "do not drop repeated URLs")
    as_megatron: bool = option(False, "reproduce Megatron-LM's own script, including its bugs")


@dataclass(frozen=True, kw_only=True)
class CleanOptions(StepSettings):
    """Options for repairing texts and dropping documents."""

    json_key: str = option("text", "key of the text")
    tasks: tuple[str, ...] = option((), "tasks, in this order [ftfy_fix_text language min_tokens]")
    language: str = option("en", "language to keep: an ISO 639-1 code")
    language_by: LanguageLibrary | None = option(
        None, "library that detects the language [py3langid; langdetect with --as-megatron]"
    )
    language_model: str = option("", "fastText model, such as lid.176.ftz; sets --language-by fasttext")
    min_tokens: int = option(
        128, "minimum number of tokens in a document, including the end-of-document token; see --tokenizer"
    )
    as_megatron: bool = like(UrlOptions, "as_megatron")


@dataclass(frozen=True, kw_only=True)
class NearDuplicateOptions(StepSettings):
    """Options that define near duplicates."""

    writes: ClassVar[tuple[str, ...]] = ("groups", "pairs")

    json_key: str = like(CleanOptions, "json_key")
    threshold: float | None = option(None, "minimum overlap of two documents that count as duplicates [0.8]")
    bands: int | None = option(
        None, "number of bands in a signature; documents that share a band are compared [20]", megatron="--num-bands"
    )
    permutations: int | None = option(None, "length of a signature [120]", megatron="--num-seeds")
    shingle_words: int = option(5, "number of words in a shingle")
    overlap: Literal["union", "min", "max"] = option(
        "union",
        "divisor of the overlap: the number of shingles in the union, or in the smaller or larger set",
        megatron="--jaccard",
    )
    groups: Path | None = option(None, "file for the ids of the documents of each group")
    pairs: Path | None = option(None, "file for pairs with an overlap above 0.5")
    id_key: str = option("url", "JSON key of a document's id in the input files")
    as_megatron: bool = like(UrlOptions, "as_megatron")


@dataclass(frozen=True, kw_only=True)
class DecontaminateOptions(StepSettings):
    """Options for cutting out benchmark questions and the text around them."""

    writes: ClassVar[tuple[str, ...]] = ("save_dictionary",)

    task_data: tuple[str, ...] = option(
        REQUIRED,
        "NAME=PATH, the file or folder of a benchmark; NAME: lambada squad natural_questions "
        "triviaqa webqa race drop coqa piqa, or your own",
    )
    json_key: str = like(CleanOptions, "json_key")
    min_ngram_size: int = option(8, "minimum number of words in a question")
    max_ngram_size: int = option(13, "maximum number of words in a match")
    key_threshold: int = option(
        10, "do not cut n-grams that occur at least this often, because they are common phrases"
    )
    filter_text_char_len: int = option(
        200, "after cutting, drop pieces of a document with at most this many characters"
    )
    remove_char_each_side: int = option(200, "characters to cut on both sides of a match")
    splits_count: int = option(10, "drop documents that are cut into more pieces than this")
    save_dictionary: Path | None = option(None, "file for the n-grams and their counts")
    load_dictionary: Path | None = option(None, "file of n-grams to cut")
    as_megatron: bool = like(UrlOptions, "as_megatron")


@dataclass(frozen=True, kw_only=True)
class WikipediaOptions(StepSettings):
    """Options for converting Wikipedia articles to documents."""

    site: str = option("https://en.wikipedia.org/wiki", "first part of each article's URL", text=True)
    min_characters: int = option(1, "minimum number of characters in an article")
    standard_punctuation: bool = option(
        True, "replace typographic quotes, dashes and dots with ASCII", megatron={"--keep-punctuation": False}
    )
    split_sentences: bool = option(False, "write one line for each sentence, as BERT's data needs")
    sentence_splitter: Literal["punkt", "sentencex"] = option("punkt", "library that splits sentences")
    lang: str = option("english", "language of the sentences")


@dataclass(frozen=True, kw_only=True)
class MergeCorpusOptions(StepSettings):
    """Options for merging: requirements for every document."""

    json_key: str = option("", "key of a text that every document must have")


@dataclass(frozen=True, kw_only=True)
class AnnotateOptions(StepSettings):
    """Options for scoring texts and storing the scores."""

    json_key: str = like(CleanOptions, "json_key")
    score_key: str = option("score", "key under which the scores are written")
    max_bytes: int = option(20480, "score at most this number of bytes of each text", within=COUNT)


@dataclass(frozen=True, kw_only=True)
class SelectOptions(StepSettings):
    """Options for keeping documents according to a value."""

    writes: ClassVar[tuple[str, ...]] = ("report",)

    by: str = option("score.toxicity", "key of the value by which documents are selected; dots separate nested keys")
    share: float = option(0.5, "share of all documents to keep")
    above: float = option(0.5, "count the values above this separately in the report")
    report: Path | None = option(None, "JSON file for means, deviations and ranges")


@dataclass(frozen=True, kw_only=True)
class GroupOptions(VerbSection):
    """Options for grouping documents from pairs of near duplicates."""

    title: ClassVar[str] = "Groups"

    pairs: Path = option(REQUIRED, "file of pairs, as written by near-duplicates --pairs")
    groups: Path = option(REQUIRED, "file of groups to write")
    threshold: float = option(0.7, "minimum overlap for two documents to be in one group")


@dataclass(frozen=True, kw_only=True)
class RemoveGroupsOptions(StepSettings):
    """Options for removing all documents of a group except the first."""

    groups: Path = option(REQUIRED, "file of groups, as written by corpus group")
    id_key: str = option("url", "key of a document's id")


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions(StepSettings):
    """Options for the order of shuffled documents."""

    seed: int = option(1234, "seed of the random order")


@dataclass(frozen=True, kw_only=True)
class FilterOptions(StepSettings):
    """Options for quality rules that texts must satisfy."""

    json_key: str = like(CleanOptions, "json_key")
    preset: tuple[str, ...] = option((), "published rules: gopher-repetition, gopher-quality, fineweb [all three]")


@dataclass(frozen=True, kw_only=True)
class ExactDuplicateOptions(StepSettings):
    """Options for removing equal documents or lines."""

    json_key: str = like(CleanOptions, "json_key")
    paragraphs: bool = option(False, "cut out repeated lines")
    min_characters: int = option(60, "minimum number of characters in a compared paragraph, and in a kept document")


@dataclass(frozen=True, kw_only=True)
class MaskOptions(StepSettings):
    """Options for masking personal data."""

    json_key: str = like(CleanOptions, "json_key")
    kinds: tuple[str, ...] = option((), "email, ip, phone, card [email ip]")
