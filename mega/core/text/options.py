"""Options of `mega train-tokenizer`. This module does not import torch."""

# ruff: noqa: RUF009 - every default below is immutable

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mega.core.config.option import REQUIRED, VerbSection, option


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerOptions(VerbSection):
    """Options for the kind of tokenizer to train, and for the training texts."""

    title: ClassVar[str] = "Tokenizer"

    input: tuple[str, ...] = option(
        REQUIRED, "texts in any format that `mega preprocess` reads: JSON lines, text, parquet, ..."
    )
    vocab_size: int = option(REQUIRED, "number of entries in the vocabulary")
    output_dir: Path = option(REQUIRED, "directory of the trained tokenizer's files")
    kind: Literal["bpe", "wordpiece", "sentencepiece"] = option(
        "bpe", "bpe: vocab.json and merges.txt, as GPT-2's; wordpiece: BERT's vocab.txt; sentencepiece"
    )
    model_type: Literal["unigram", "bpe", "char", "word"] | None = option(
        None, "algorithm of a SentencePiece model; unigram if none is given"
    )
    normalization: Literal["identity", "nmt_nfkc", "nmt_nfkc_cf"] | None = option(
        None,
        "how a SentencePiece model changes texts. identity keeps every character, with bytes for unknown ones and "
        "single digits, as in Llama 2; nmt_nfkc applies NFKC and collapses white space to single spaces, as in T5; "
        "nmt_nfkc_cf also makes letters lower-case [identity; nmt_nfkc for --model-type word]",
    )
    character_coverage: float | None = option(None, "share of the texts' characters that SentencePiece covers [1]")
    json_key: str = option("text", "key of the text in each line", megatron="--json-keys")
    text_lines: bool = option(False, "each line of a text file is a document")
    overwrite: bool = option(
        False,
        "replace a tokenizer made from other inputs or settings; a tokenizer made from the same inputs and settings "
        "is kept",
    )
