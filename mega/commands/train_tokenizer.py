"""`mega train-tokenizer`: train a tokenizer on texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from mega.core.text.options import TrainTokenizerOptions

FILES = {
    "bpe": ("vocab.json", "merges.txt"),
    "wordpiece": ("vocab.txt",),
    "sentencepiece": ("tokenizer.model", "tokenizer.vocab"),
}
"""Kind of tokenizer -> names of the files that training writes."""


def run(
    tokenizer: TrainTokenizerOptions,
) -> int:
    """Train a tokenizer: byte-level BPE for --tokenizer GPT2BPETokenizer, WordPiece for BertWordPieceLowerCase, or a
    SentencePiece model."""
    from mega.core.data.preprocessing.provenance import WorkRecord, work_of
    from mega.core.data.sources import find, texts
    from mega.core.files import check_folder

    check_folder("--output-dir", tokenizer.output_dir, tokenizer.output_dir)
    for flag, value in (
        ("--model-type", tokenizer.model_type),
        ("--normalization", tokenizer.normalization),
        ("--character-coverage", tokenizer.character_coverage),
    ):
        if tokenizer.kind != "sentencepiece" and value is not None:
            raise ValueError(f"{flag} {value}: needs --kind sentencepiece")
    names = FILES[tokenizer.kind]
    settings = [
        tokenizer.kind,
        tokenizer.vocab_size,
        tokenizer.model_type,
        tokenizer.character_coverage,
        tokenizer.json_key,
        tokenizer.text_lines,
    ]
    if tokenizer.kind == "sentencepiece":
        settings.append(tokenizer.normalization or "by model type")
    # The record of inputs and settings determines whether existing files are kept or refused.
    record = WorkRecord([tokenizer.output_dir / name for name in names], work_of(settings, find(tokenizer.input)))
    is_current = record.is_current("--output-dir", tokenizer.output_dir, tokenizer.overwrite)
    if not is_current:
        every = texts(tokenizer.input, tokenizer.json_key, text_lines=tokenizer.text_lines)
        _train(tokenizer, every)
        record.write()
    print(*(tokenizer.output_dir / name for name in names), sep="\n")
    if is_current:
        print("made before, of the same inputs and settings, and kept; --overwrite makes them again")
    return 0


def _train(tokenizer: TrainTokenizerOptions, every: Iterable[str]) -> None:
    from mega.core.text.train import train_bpe, train_sentencepiece, train_wordpiece

    vocab_size, output_dir = tokenizer.vocab_size, tokenizer.output_dir
    if tokenizer.kind == "sentencepiece":
        train_sentencepiece(
            every,
            vocab_size,
            output_dir,
            model=tokenizer.model_type or "unigram",
            coverage=1.0 if tokenizer.character_coverage is None else tokenizer.character_coverage,
            normalization=tokenizer.normalization,
        )
        return
    if tokenizer.kind == "bpe":
        entries = len(json.loads(train_bpe(every, vocab_size, output_dir)[0].read_bytes()))
    else:
        entries = train_wordpiece(every, vocab_size, output_dir).read_bytes().count(b"\n")
    if entries < vocab_size:
        print(f"--vocab-size {vocab_size}: the texts give {entries} entries and no more", file=sys.stderr)
