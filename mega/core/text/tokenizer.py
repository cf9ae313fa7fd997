"""What a tokenizer is to the rest of the house, and the one place where a kind becomes an object.

It knows texts and ids. It knows neither token files nor models: padding the vocabulary is the model's affair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Encoded(NamedTuple):
    """Many texts as one run of ids, the form in which a token file is written.

    ids: integers of any width, back to back; offsets: int64 [texts + 1], text i being
    `ids[offsets[i] : offsets[i + 1]]`.
    """

    ids: NDArray[Any]
    offsets: NDArray[np.int64]


class Roles(NamedTuple):
    """Ids of the tokens that BERT and T5 samples are built with. `sentinels` are <extra_id_0>, <extra_id_1> ..."""

    cls: int
    sep: int
    mask: int
    pad: int
    bos: int
    eos: int
    sentinels: tuple[int, ...]


class Tokenizer(Protocol):
    """Text to ids and back.

    Raw text takes the *ordinary* path in every family: the text `<|endoftext|>` or `</s>` inside a document
    is split like any other text and never becomes a control token. What a family puts around each text
    by itself (Llama's bos) is part of `encode`.
    """

    kind: str
    eod: int | None  # the end of a document; None where the family has none
    bos: int | None
    pad: int | None
    roles: Roles | None = None  # of the families that BERT and T5 can be trained with

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1: the true size, without padding."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of many texts; the same as `encode` one by one, only faster."""
        return flatten([self.encode(text) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def continues(self, token: int) -> bool:
        """Whether a token goes on with the word before it, so that whole-word masking takes both."""
        return False

    def control(self, name: str) -> int | None:
        """The id of a control token by its name, such as <|eot_id|>; None where there is none."""
        return None

    def files(self) -> Mapping[str, Path]:
        """Canonical name -> path of every file that made this tokenizer: what a checkpoint copies."""
        ...

    def fingerprint(self) -> str:
        """sha256 over the kind and the contents of the files: equal means the same ids for the same text."""
        digest = hashlib.sha256(f"{self.kind} {self.vocab_size}\n".encode())
        for name, path in sorted(self.files().items()):
            digest.update(name.encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def flatten(rows: Sequence[Sequence[int]]) -> Encoded:
    """Lists of ids as one `Encoded`: [[5, 6], [], [7]] -> ids 5 6 7, offsets 0 2 2 3."""
    import numpy as np

    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.fromiter((token for row in rows for token in row), np.int64, count=int(offsets[-1]))
    return Encoded(ids, offsets)


KINDS = (
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "Llama3Tokenizer",
    "HuggingFaceTokenizer",
    "EncDecTokenizer",
    "NullTokenizer",
)
_WITH_EXTRA_IDS = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")


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
    if vocab_extra_ids and tokenizer not in _WITH_EXTRA_IDS:
        raise ValueError(f"--vocab-extra-ids {vocab_extra_ids}: must be 0 but for {', '.join(_WITH_EXTRA_IDS)}")
    if tokenizer == "GPT2BPETokenizer":
        from mega.core.text.gpt2 import GPT2Tokenizer

        return GPT2Tokenizer(_file(vocab_file, "--vocab-file", tokenizer), _file(merge_file, "--merge-file", tokenizer))
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

        if vocab_size is None or vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size}: NullTokenizer needs a vocabulary size of at least 1")
        return NullTokenizer(vocab_size)
    raise ValueError(f"--tokenizer {tokenizer}: must be one of {', '.join(KINDS)}")


def _file(path: str | Path | None, flag: str, kind: str) -> Path:
    """`path` as a readable file, or a ValueError that names the flag."""
    if path is None:
        raise ValueError(f"{flag} is missing: {kind} needs it")
    found = Path(path)
    if not found.is_file():
        raise ValueError(f"{flag} {found}: no such file")
    return found
