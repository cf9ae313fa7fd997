"""The one place where a kind of tokenizer becomes an object: knows every family by name, imports the one asked for."""

from __future__ import annotations

from pathlib import Path

from mega.core.config.run import entries
from mega.core.text.tokenizer import Tokenizer

_WITH_EXTRA_IDS = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")
_MOST_EXTRA_IDS = 1_000_000


def build(
    *,
    tokenizer: str | None,
    tokenizer_model: str | Path | None = None,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
) -> Tokenizer:
    """The tokenizer that the fields of the configuration's tokenizer section describe.

    Raises ValueError, naming the flag, where the kind is unknown or one of its files is missing or broken.
    """
    if vocab_extra_ids > _MOST_EXTRA_IDS:
        raise ValueError(f"--vocab-extra-ids {vocab_extra_ids}: must be at most {_MOST_EXTRA_IDS}")
    if vocab_extra_ids and tokenizer not in _WITH_EXTRA_IDS:
        raise ValueError(f"--vocab-extra-ids {vocab_extra_ids}: must be 0 but for {', '.join(_WITH_EXTRA_IDS)}")
    if tokenizer == "GPT2BPETokenizer":
        from mega.core.text.gpt2 import GPT2Tokenizer

        return GPT2Tokenizer(_file(vocab_file, "--vocab-file", tokenizer), _file(merge_file, "--merge-file", tokenizer))
    if tokenizer == "FairseqTokenizer":
        from mega.core.text.fairseq import FairseqTokenizer

        vocab, merges = _file(vocab_file, "--vocab-file", tokenizer), _file(merge_file, "--merge-file", tokenizer)
        return FairseqTokenizer(vocab, merges, _file(tokenizer_model, "--tokenizer-model", tokenizer))
    if tokenizer in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        from mega.core.text.wordpiece import WordPieceTokenizer

        vocab = _file(vocab_file, "--vocab-file", tokenizer)
        return WordPieceTokenizer(vocab, lower=tokenizer == "BertWordPieceLowerCase", extra_ids=vocab_extra_ids)
    if tokenizer == "EncDecTokenizer":
        from mega.core.text.yuan import YuanTokenizer

        return YuanTokenizer(_file(vocab_file, "--vocab-file", tokenizer))
    if tokenizer == "Llama3Tokenizer":
        from mega.core.text.llama3 import Llama3Tokenizer

        return Llama3Tokenizer(_file(tokenizer_model, "--tokenizer-model", tokenizer))
    if tokenizer in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        from mega.core.text.sentencepiece import PlainSentencePiece

        model = _file(tokenizer_model, "--tokenizer-model", tokenizer)
        return PlainSentencePiece(model, kind=tokenizer, prepend_bos=tokenizer == "Llama2Tokenizer")
    if tokenizer == "SentencePieceTokenizer":
        from mega.core.text.sentencepiece import ExtendedSentencePiece

        return ExtendedSentencePiece(_file(tokenizer_model, "--tokenizer-model", tokenizer), vocab_extra_ids)
    if tokenizer == "HuggingFaceTokenizer":
        from mega.core.text.huggingface import HuggingFaceTokenizer

        given = Path(tokenizer_model) if tokenizer_model else None
        inside = given / "tokenizer.json" if given and given.is_dir() else given
        return HuggingFaceTokenizer(_file(inside, "--tokenizer-model", tokenizer))
    if tokenizer == "NullTokenizer":
        from mega.core.text.null import NullTokenizer

        if vocab_size is None or not 1 <= vocab_size < 2**31:
            raise ValueError(f"--vocab-size {vocab_size}: NullTokenizer needs a vocabulary size of 1 .. {2**31 - 1}")
        return NullTokenizer(vocab_size)
    told = "--tokenizer is missing: it" if tokenizer is None else f"--tokenizer {tokenizer}:"
    raise ValueError(f"{told} must be one of {', '.join(entries()['tokenizer'].choices)}")


def _file(path: str | Path | None, flag: str, kind: str) -> Path:
    """`path` as a readable file, or a ValueError that names the flag."""
    if path is None:
        raise ValueError(f"{flag} is missing: {kind} needs it")
    found = Path(path)
    if not found.is_file():
        raise ValueError(f"{flag} {found}: no such file")
    return found
