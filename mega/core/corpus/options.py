"""What the verbs of `mega corpus` read, do and write, as their sections. No torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import COUNT, REQUIRED, VerbSection, like, option
from mega.core.corpus.language import LanguageLibrary


@dataclass(frozen=True, kw_only=True)
class CorpusStepOptions(VerbSection):
    """What every step reads and writes, and on how many processes."""

    title: ClassVar[str] = "Documents"

    input: tuple[str, ...] = option(REQUIRED, "JSON lines, also .gz .zst .xz .bz2; .parquet; a folder; a glob")
    output: Path = option(REQUIRED, "a folder, or a file: .jsonl, .json, .txt, also with .gz or .zst")
    workers: int = option(1, "processes; the result does not depend on them")
    shard: str = option("1/1", "i/N, 1 <= i <= N: only this share of the input; all write into one folder")
    compress: Literal["none", "gz", "zst"] = option("none", "how files of an output folder are packed")
    on_error: Literal["stop", "skip"] = option("stop", "at a line that is not a document")
    against: tuple[str, ...] = option((), "documents that come first, of earlier runs: duplicates of them are dropped")
    dropped: Path | None = option(None, "folder for the dropped documents, each with the reason")
    show_dropped: int = option(0, "dropped documents to print of each reason")
    overwrite: bool = option(False, "replace the result of other work")


@dataclass(frozen=True, kw_only=True)
class StepSettings(VerbSection):
    """What one step does to documents."""

    title: ClassVar[str] = "Step"


@dataclass(frozen=True, kw_only=True)
class UrlOptions(StepSettings):
    """Which URLs are dropped."""

    json_key: str = option("url", "key of the URL in JSON lines; of .txt it is the line")
    domains: Path | None = option(None, "file of labels to block, one a line, instead of the built-in list")
    extensions: Path | None = option(None, "file of endings to block (.pdf), instead of the built-in list")
    keep_duplicates: bool = option(False, "keep a URL as often as it passes the other tests")
    as_megatron: bool = option(False, "decide as Megatron-LM's own script does, its slips included")


@dataclass(frozen=True, kw_only=True)
class CleanOptions(StepSettings):
    """How texts are repaired, and which are dropped."""

    json_key: str = option("text", "key of the text")
    tasks: tuple[str, ...] = option((), "what is done, in this order [ftfy_fix_text language min_tokens]")
    language: str = option("en", "which is kept: a code of ISO 639-1")
    language_by: LanguageLibrary | None = option(
        None, "the library that recognises it [py3langid; langdetect with --as-megatron]"
    )
    language_model: str = option("", "fastText model, such as lid.176.ftz; sets --language-by fasttext")
    min_tokens: int = option(128, "tokens of the shortest document, its end included; see --tokenizer")
    as_megatron: bool = like(UrlOptions, "as_megatron")


@dataclass(frozen=True, kw_only=True)
class NearDuplicateOptions(StepSettings):
    """Which documents count as nearly the same."""

    json_key: str = like(CleanOptions, "json_key")
    threshold: float | None = option(None, "overlap from which two documents are duplicates [0.8]")
    bands: int | None = option(
        None, "of a signature; documents that share one are compared [20]", megatron="--num-bands"
    )
    permutations: int | None = option(None, "length of a signature [120]", megatron="--num-seeds")
    shingle_words: int = option(5, "words of a shingle")
    overlap: Literal["union", "min", "max"] = option(
        "union", "what common shingles are a share of", megatron="--jaccard"
    )
    groups: Path | None = option(None, "file for the ids of each group")
    pairs: Path | None = option(None, "file for pairs that overlap by over 0.5")
    id_key: str = option("url", "key of what identifies a document in these files")
    as_megatron: bool = like(UrlOptions, "as_megatron")


@dataclass(frozen=True, kw_only=True)
class DecontaminateOptions(StepSettings):
    """Which questions are cut out, and how much around them."""

    task_data: tuple[str, ...] = option(
        REQUIRED,
        "NAME=PATH, a benchmark's file or folder; NAME: lambada squad natural_questions triviaqa webqa race "
        "drop coqa piqa, or yours",
    )
    json_key: str = like(CleanOptions, "json_key")
    min_ngram_size: int = option(8, "words of the shortest question")
    max_ngram_size: int = option(13, "words that make a match")
    key_threshold: int = option(10, "n-grams that occur as often are common phrases, and stay")
    filter_text_char_len: int = option(200, "a piece of no more characters is dropped")
    remove_char_each_side: int = option(200, "characters that are cut on both sides of a match")
    splits_count: int = option(10, "a document of more pieces is dropped")
    save_dictionary: Path | None = option(None, "file for n-grams and counts")
    load_dictionary: Path | None = option(None, "a file of n-grams to cut")
    as_megatron: bool = like(UrlOptions, "as_megatron")


@dataclass(frozen=True, kw_only=True)
class WikipediaOptions(StepSettings):
    """How articles become documents."""

    site: str = option("https://en.wikipedia.org/wiki", "of the URLs")
    min_characters: int = option(1, "of the shortest article")
    standard_punctuation: bool = option(
        True, "quotes, dashes and dots of a keyboard", megatron={"--keep-punctuation": False}
    )
    split_sentences: bool = option(False, "a line for each sentence, as BERT's data has them")
    sentence_splitter: Literal["punkt", "sentencex"] = option("punkt", "what cuts texts into sentences")
    lang: str = option("english", "language of the sentences")


@dataclass(frozen=True, kw_only=True)
class MergeCorpusOptions(StepSettings):
    """What every document must have."""

    json_key: str = option("", "key of a text that every document must have")


@dataclass(frozen=True, kw_only=True)
class AnnotateOptions(StepSettings):
    """Which texts are scored, and where the scores are written."""

    json_key: str = like(CleanOptions, "json_key")
    score_key: str = option("score", "key that the scores are written to")
    max_bytes: int = option(20480, "bytes of a text that are scored", within=COUNT)


@dataclass(frozen=True, kw_only=True)
class SelectOptions(StepSettings):
    """Which documents are kept by their values."""

    by: str = option("score.toxicity", "key of the value, with dots between keys")
    share: float = option(0.5, "share of all documents that is kept")
    above: float = option(0.5, "of the report: values above this are counted apart")
    report: Path | None = option(None, "JSON file of means, deviations and ranges")


@dataclass(frozen=True, kw_only=True)
class GroupOptions(VerbSection):
    """Which pairs form which groups."""

    title: ClassVar[str] = "Groups"

    pairs: Path = option(REQUIRED, "pairs, as near-duplicates --pairs writes them")
    groups: Path = option(REQUIRED, "the file of groups to write")
    threshold: float = option(0.7, "overlap from which two are in one group")


@dataclass(frozen=True, kw_only=True)
class RemoveGroupsOptions(StepSettings):
    """Which groups lose all documents but the first."""

    groups: Path = option(REQUIRED, "groups, as corpus group writes them")
    id_key: str = option("url", "key of what identifies a document there")


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions(StepSettings):
    """The order of documents."""

    seed: int = option(1234, "of the order")


@dataclass(frozen=True, kw_only=True)
class FilterOptions(StepSettings):
    """Which rules texts must keep."""

    json_key: str = like(CleanOptions, "json_key")
    preset: tuple[str, ...] = option((), "published rules: gopher-repetition, gopher-quality, fineweb [all three]")


@dataclass(frozen=True, kw_only=True)
class ExactDuplicateOptions(StepSettings):
    """What counts as equal."""

    json_key: str = like(CleanOptions, "json_key")
    paragraphs: bool = option(False, "cut out lines that came before")
    min_characters: int = option(60, "of a paragraph that is looked at, and of what must be left")


@dataclass(frozen=True, kw_only=True)
class MaskOptions(StepSettings):
    """What is masked."""

    json_key: str = like(CleanOptions, "json_key")
    kinds: tuple[str, ...] = option((), "of email, ip, phone, card [email ip]")
