"""Infer the kind of a tokenizer from its files, where they fit a single kind. This module does not open tokenizers."""

from __future__ import annotations

from pathlib import Path

from mega.core.config.run import entries
from mega.core.untrusted import Json, parse_json, read_limited

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_WORDPIECE = ("BertWordPieceLowerCase", "BertWordPieceCase")
_LLAMA3_RANKS = 128_000
_SETTINGS_BYTES = 1 << 24


def kind_of_files(model: str | Path | None, vocab: str | Path | None, merges: str | Path | None) -> str:
    """Return the kind of tokenizer that the files of --tokenizer-model, --vocab-file and --merge-file belong to.

    Errors: ValueError listing the kinds that are possible.
    """
    if model is not None and vocab is None and merges is None:
        return _kind_of_model(Path(model))
    if model is None and vocab is not None:
        return "GPT2BPETokenizer" if merges is not None else _kind_of_vocabulary(Path(vocab))
    raise ValueError(f"--tokenizer is missing: it must be one of {', '.join(entries()['tokenizer'].choices)}")


def _kind_of_model(path: Path) -> str:
    if path.is_dir() or path.suffix == ".json":
        return "HuggingFaceTokenizer"
    _check_exists("--tokenizer-model", path)
    with open(path, "rb") as file:
        first = file.readline(1 << 14).split()
        ranks = 1 + sum(1 for _ in file) if len(first) == 2 and first[1] == b"0" else 0
    if ranks == _LLAMA3_RANKS:
        return "Llama3Tokenizer"
    if ranks:
        raise ValueError(
            f"--tokenizer-model {path}: has {ranks:,} ranks; without --tokenizer only Llama-3's {_LLAMA3_RANKS:,} are "
            "known; give --tokenizer Llama3Tokenizer, which splits words by Llama-3's rules, or a tokenizer.json"
        )
    raise _ambiguous(f"--tokenizer-model {path}", (*_SENTENCEPIECE, "FairseqTokenizer"))


def _kind_of_vocabulary(path: Path) -> str:
    """Return the kind of a vocab.txt, which transformers' settings in the same folder state."""
    _check_exists("--vocab-file", path)
    file = path.with_name("tokenizer_config.json")
    settings: Json = None
    if file.is_file():
        settings = parse_json(read_limited(file, _SETTINGS_BYTES, f"--vocab-file: {file}"), f"--vocab-file: {file}")
    if isinstance(settings, dict) and isinstance(lower := settings.get("do_lower_case"), bool):
        return _WORDPIECE[0 if lower else 1]
    raise _ambiguous(f"--vocab-file {path}", (*_WORDPIECE, "EncDecTokenizer"))


def _check_exists(flag: str, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{flag} {path}: no such file")


def _ambiguous(file: str, kinds: tuple[str, ...]) -> ValueError:
    return ValueError(f"--tokenizer is missing: {file} fits several kinds; give one of {', '.join(kinds)}")
