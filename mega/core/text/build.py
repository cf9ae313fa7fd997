"""Construct tokenizers. Each kind of tokenizer has a builder, which imports the kind's module when it is called.

`TOKENIZERS` in config lists the options that each kind needs, so that a run can be checked without importing a
tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mega.core.config.run import entries
from mega.core.config.sections import TOKENIZER_FILES, TOKENIZERS
from mega.core.text.kind import kind_of_files
from mega.core.text.tokenizer import Tokenizer

_WITH_EXTRA_IDS = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")
_MOST_EXTRA_IDS = 1_000_000


class TokenizerFiles(NamedTuple):
    """The options in the tokenizer section of the configuration. They describe one tokenizer."""

    kind: str  # a key of BUILDERS
    tokenizer_model: Path | None
    vocab_file: Path | None
    merge_file: Path | None
    vocab_size: int | None  # vocabulary size of a NullTokenizer
    extra_ids: int  # number of sentinels <extra_id_0>, <extra_id_1>, ... to add
    eod_last: bool  # whether the last id of a NullTokenizer ends a document; if False, an additional id is used

    def model(self) -> Path:
        return self._file(self.tokenizer_model, "--tokenizer-model")

    def vocab(self) -> Path:
        return self._file(self.vocab_file, "--vocab-file")

    def merges(self) -> Path:
        return self._file(self.merge_file, "--merge-file")

    def _file(self, path: Path | None, flag: str) -> Path:
        """Return `path` if it is a file, otherwise raise a ValueError that names the flag."""
        if path is None:
            raise ValueError(f"{flag} is missing: {self.kind} needs it")
        if not path.is_file():
            raise ValueError(f"{flag} {path}: no such file")
        return path


Builder = Callable[[TokenizerFiles], Tokenizer]


def build(
    *,
    tokenizer: str | None,
    tokenizer_model: str | Path | None = None,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
    null_eod_last: bool = False,
) -> Tokenizer:
    """Construct the tokenizer described by the options of the tokenizer section in the configuration.

    tokenizer: the kind; None for the kind that the files determine. Errors: ValueError naming the flag if the kind is
    unknown, or a file of the kind is missing or broken.
    """
    model, vocab, merges = (Path(path) if path else None for path in (tokenizer_model, vocab_file, merge_file))
    if tokenizer is None:
        tokenizer = kind_of_files(model, vocab, merges)
    if vocab_extra_ids > _MOST_EXTRA_IDS:
        raise ValueError(f"--vocab-extra-ids {vocab_extra_ids}: must be at most {_MOST_EXTRA_IDS}")
    if vocab_extra_ids and tokenizer not in _WITH_EXTRA_IDS:
        raise ValueError(f"--vocab-extra-ids {vocab_extra_ids}: must be 0 but for {', '.join(_WITH_EXTRA_IDS)}")
    if tokenizer not in BUILDERS:
        raise ValueError(f"--tokenizer {tokenizer}: must be one of {', '.join(entries()['tokenizer'].choices)}")
    return BUILDERS[tokenizer](
        TokenizerFiles(tokenizer, model, vocab, merges, vocab_size, vocab_extra_ids, null_eod_last)
    )


def located(options: Mapping[str, str | int | None]) -> dict[str, str | int]:
    """Return the arguments of `build` that are set, with absolute paths. Token files store these arguments, so that
    training can construct the tokenizer that encoded the files.

    >>> located({"tokenizer": "NullTokenizer", "vocab_file": None, "vocab_size": 64, "vocab_extra_ids": 0})
    {'tokenizer': 'NullTokenizer', 'vocab_size': 64}
    """
    return {
        name: os.path.abspath(str(value)) if name in TOKENIZER_FILES else value
        for name, value in options.items()
        if value
    }


def made_by(tokenizer: Tokenizer, options: Mapping[str, str | int | None]) -> dict[str, object]:
    """Return the metadata about a tokenizer to store in token files: its identity, and the arguments from which it can
    be constructed again."""
    located_options = located({**options, "tokenizer": tokenizer.kind})
    return {"tokenizer": tokenizer.identity()._asdict(), "tokenizer_options": located_options}


def missing_file(options: Mapping[str, object]) -> str | None:
    """Return the first file in the result of `located` that no longer exists, or None."""
    files = (str(options[name]) for name in TOKENIZER_FILES if name in options)
    return next((path for path in files if not os.path.exists(path)), None)


def register_tokenizer(kind: str, needs: tuple[str, ...], builder: Builder) -> None:
    """Register a kind of tokenizer as a choice of --tokenizer. needs: options that the kind requires."""
    TOKENIZERS[kind], BUILDERS[kind] = needs, builder


def _gpt2(given: TokenizerFiles) -> Tokenizer:
    from mega.core.text.gpt2 import GPT2Tokenizer

    return GPT2Tokenizer(given.vocab(), given.merges())


def _fairseq(given: TokenizerFiles) -> Tokenizer:
    from mega.core.text.fairseq import FairseqTokenizer, FairseqWords

    dictionary = given.model()
    if given.vocab_file is None and given.merge_file is None:
        return FairseqWords(dictionary)
    return FairseqTokenizer(given.vocab(), given.merges(), dictionary)


def _wordpiece(given: TokenizerFiles) -> Tokenizer:
    from mega.core.text.wordpiece import WordPieceTokenizer

    return WordPieceTokenizer(given.vocab(), lower=given.kind == "BertWordPieceLowerCase", extra_ids=given.extra_ids)


def _yuan(given: TokenizerFiles) -> Tokenizer:
    from mega.core.text.yuan import YuanTokenizer

    return YuanTokenizer(given.vocab())


def _llama3(given: TokenizerFiles) -> Tokenizer:
    from mega.core.text.llama3 import Llama3Tokenizer

    return Llama3Tokenizer(given.model())


def _plain_sentencepiece(given: TokenizerFiles) -> Tokenizer:
    from mega.core.text.sentencepiece import PlainSentencePiece

    return PlainSentencePiece(given.model(), kind=given.kind, prepend_bos=given.kind == "Llama2Tokenizer")


def _extended_sentencepiece(given: TokenizerFiles) -> Tokenizer:
    from mega.core.text.sentencepiece import ExtendedSentencePiece

    return ExtendedSentencePiece(given.model(), given.extra_ids)


def _hugging_face(given: TokenizerFiles) -> Tokenizer:
    """Build a tokenizer from --tokenizer-model, which is a tokenizer.json or a directory that contains this file."""
    from mega.core.text.huggingface import HuggingFaceTokenizer

    path = given.tokenizer_model
    if path is None or not path.is_dir():
        return HuggingFaceTokenizer(given.model())
    if not (path / "tokenizer.json").is_file():
        hints = [
            f"{name} is read by --tokenizer {kinds}" for name, kinds in _OTHER_FILES.items() if (path / name).is_file()
        ]
        raise ValueError("; ".join([f"--tokenizer-model {path}: has no tokenizer.json", *hints]))
    return HuggingFaceTokenizer(given._replace(tokenizer_model=path / "tokenizer.json").model())


_OTHER_FILES = {
    "tokenizer.model": "Llama2Tokenizer or Llama3Tokenizer",
    "vocab.txt": "BertWordPieceLowerCase or BertWordPieceCase, as --vocab-file",
    "vocab.json": "GPT2BPETokenizer, as --vocab-file with --merge-file",
}
"""Name of a tokenizer file in a Hugging Face directory -> kinds of tokenizer that read this file."""


def _null(given: TokenizerFiles) -> Tokenizer:
    from mega.core.text.null import NullTokenizer

    size = given.vocab_size
    if size is None or not 1 <= size < 2**31:
        raise ValueError(f"--vocab-size {size}: NullTokenizer needs a vocabulary size of 1 .. {2**31 - 1}")
    if given.eod_last and size == 1:
        raise ValueError("--vocab-size 1: must be at least 2 with --null-eod-last, an id and the end of a document")
    return NullTokenizer(size - given.eod_last)


BUILDERS: dict[str, Builder] = {
    "GPT2BPETokenizer": _gpt2,
    "FairseqTokenizer": _fairseq,
    "BertWordPieceLowerCase": _wordpiece,
    "BertWordPieceCase": _wordpiece,
    "SentencePieceTokenizer": _extended_sentencepiece,
    "GPTSentencePieceTokenizer": _plain_sentencepiece,
    "Llama2Tokenizer": _plain_sentencepiece,
    "Llama3Tokenizer": _llama3,
    "HuggingFaceTokenizer": _hugging_face,
    "EncDecTokenizer": _yuan,
    "NullTokenizer": _null,
}
"""Kind of tokenizer -> its builder."""
