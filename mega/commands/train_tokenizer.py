"""`mega train-tokenizer`: a vocabulary from one's own texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from mega.core.text.train import Model

FILES = {
    "bpe": ("vocab.json", "merges.txt"),
    "wordpiece": ("vocab.txt",),
    "sentencepiece": ("tokenizer.model", "tokenizer.vocab"),
}
"""Kind of tokenizer -> the files that training makes."""


def run(
    input: Annotated[
        list[str],
        typer.Option("--input", help="any format that `mega preprocess` reads: JSON lines, text, parquet, ..."),
    ],
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="entries of the vocabulary")],
    output_dir: Annotated[Path, typer.Option("--output-dir", help="where the files go")],
    kind: Annotated[
        Literal["bpe", "wordpiece", "sentencepiece"],
        typer.Option(
            "--kind", help="bpe: vocab.json and merges.txt as GPT-2's; wordpiece: BERT's vocab.txt; sentencepiece"
        ),
    ] = "bpe",
    model_type: Annotated[
        Literal["unigram", "bpe", "char", "word"] | None,
        typer.Option("--model-type", help="of a SentencePiece model; unigram if none is given"),
    ] = None,
    character_coverage: Annotated[
        float | None, typer.Option("--character-coverage", help="share of characters that SentencePiece knows [1]")
    ] = None,
    json_key: Annotated[
        str, typer.Option("--json-key", "--json-keys", help="key of each line that holds the text")
    ] = "text",
    text_lines: Annotated[bool, typer.Option("--text-lines", help="each line of a text file is a document")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace a tokenizer of other inputs or settings; an equal one is kept")
    ] = False,
) -> int:
    """Train a tokenizer: byte-level BPE for --tokenizer GPT2BPETokenizer, WordPiece for BertWordPieceLowerCase, or a
    SentencePiece model."""
    from mega.core.data.made import WorkRecord, work_of
    from mega.core.data.sources import find, texts
    from mega.core.files import check_folder

    check_folder("--output-dir", output_dir, output_dir)
    for flag, value in (("--model-type", model_type), ("--character-coverage", character_coverage)):
        if kind != "sentencepiece" and value is not None:
            raise ValueError(f"{flag} {value}: needs --kind sentencepiece")
    names = FILES[kind]
    settings = [kind, vocab_size, model_type, character_coverage, json_key, text_lines]
    record = WorkRecord([output_dir / name for name in names], work_of(settings, find(input)))
    kept = record.kept("--output-dir", output_dir, overwrite)
    if not kept:
        every = texts(input, json_key, text_lines=text_lines)
        _train(kind, every, vocab_size, output_dir, model_type or "unigram", character_coverage)
        record.write()
    print(*(output_dir / name for name in names), sep="\n")
    if kept:
        print("made before, of the same inputs and settings, and kept; --overwrite makes them again")
    return 0


def _train(
    kind: str, every: Iterable[str], vocab_size: int, output_dir: Path, shape: Model, coverage: float | None
) -> None:
    from mega.core.text.train import train_bpe, train_sentencepiece, train_wordpiece

    if kind == "sentencepiece":
        train_sentencepiece(every, vocab_size, output_dir, model=shape, coverage=1.0 if coverage is None else coverage)
        return
    if kind == "bpe":
        entries = len(json.loads(train_bpe(every, vocab_size, output_dir)[0].read_bytes()))
    else:
        entries = train_wordpiece(every, vocab_size, output_dir).read_bytes().count(b"\n")
    if entries < vocab_size:
        print(f"--vocab-size {vocab_size}: the texts give {entries} entries and no more", file=sys.stderr)
