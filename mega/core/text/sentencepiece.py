"""Vocabularies in SentencePiece's .model file: Llama-2's, GPT's plain kind, and the kind with tokens added.

Text always takes the library's plain encode, which knows no control symbols in text. (Megatron-LM's
SentencePieceTokenizer cuts a text at its special tokens first, so that a corpus can forge them; this one
does not, and differs from it only where a document holds such a token as text.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from mega.core.text.fast import Encode
from mega.core.text.probe import check, sentencepiece
from mega.core.text.sentencepiece_bpe import faster
from mega.core.text.tokenizer import Encoded, Roles, Tokenizer, flatten, library_errors


def _load(path: Path) -> Any:
    """The library's processor of a .model file; ValueError where the file is not one."""
    check("sentencepiece", path)
    with library_errors(f"--tokenizer-model {path}: not a SentencePiece model"):
        return sentencepiece(path)


def _encoder(model: Any) -> Encode:
    """The model's ids of many texts, by fastokens where it gives the same, else by the library."""

    def library(texts: Sequence[str]) -> Encoded:
        return flatten(model.encode(list(texts), num_threads=1))

    return faster(model, library) or library


def _present(token: int) -> int | None:
    """SentencePiece returns -1 for a token that its model lacks."""
    return token if token >= 0 else None


def _piece_bytes(model: Any, token: int) -> bytes:
    """What one of the model's own pieces adds to a text: the mark of a blank is one, <0x0A> is a byte."""
    if model.is_control(token):
        return b""
    piece = str(model.id_to_piece(token))
    return bytes([int(piece[3:5], 16)]) if model.is_byte(token) else piece.replace("\u2581", " ").encode()


class PlainSentencePiece(Tokenizer):
    """The model's own pieces; its eos ends a document. Llama-2 also puts its bos in front of every text."""

    def __init__(self, path: Path, *, kind: str, prepend_bos: bool) -> None:
        self.kind = kind
        self._path = path
        self._model = _load(path)
        self._prepend_bos = prepend_bos
        self.bos = _present(self._model.bos_id())
        self.eod = _present(self._model.eos_id())
        self.pad = _present(self._model.pad_id())
        if prepend_bos and self.bos is None:
            raise ValueError(f"--tokenizer-model {path}: {kind} puts bos in front of a text, and the model has none")

    @property
    def vocab_size(self) -> int:
        return int(self._model.vocab_size())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_bos=self._prepend_bos)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        import numpy as np

        ids, offsets = self._encode(texts)
        if not self._prepend_bos or self.bos is None:
            return Encoded(ids, offsets)
        return Encoded(np.insert(ids.astype(np.int64), offsets[:-1], self.bos), offsets + np.arange(len(offsets)))

    def control(self, name: str) -> int | None:
        return next((t for t in (self.bos, self.eod) if t is not None and self._model.id_to_piece(t) == name), None)

    @cached_property
    def _encode(self) -> Encode:
        return _encoder(self._model)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._model.decode([int(token) for token in ids]))

    def piece(self, token: int) -> str:
        return str(self._model.id_to_piece(token))

    def token_bytes(self, token: int) -> bytes:
        return _piece_bytes(self._model, token)

    def files(self) -> Mapping[str, Path]:
        return {"tokenizer.model": self._path}

    def huggingface_files(self) -> dict[str, dict[str, Any]]:
        """transformers turns a tokenizer.model into its own form by rules that may cut a text otherwise."""
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        named = {key: None if token is None else self.piece(token) for key, token in ids.items()}
        leads = {"add_bos_token": self._prepend_bos, "add_eos_token": False}
        return {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", **named, **leads}}


class ExtendedSentencePiece(Tokenizer):
    """The model's pieces and, after them, what BERT and T5 need and the model lacks.

    Added where missing, in this order: <CLS> <SEP> <EOD> <MASK>, then pad, bos and eos under the model's own
    names or as <PAD> <BOS> <EOS>, then <extra_id_0> ... `specials` maps each of these names to its id.
    """

    kind = "SentencePieceTokenizer"

    def __init__(self, path: Path, extra_ids: int = 0) -> None:
        self._path = path
        self._model = _load(path)
        self._pieces = int(self._model.vocab_size())
        known = {self._model.id_to_piece(token): token for token in range(self._pieces)}
        pad, bos, eos = (
            self._model.id_to_piece(token) if token >= 0 else missing
            for token, missing in (
                (self._model.pad_id(), "<PAD>"),
                (self._model.bos_id(), "<BOS>"),
                (self._model.eos_id(), "<EOS>"),
            )
        )
        sentinels = [f"<extra_id_{i}>" for i in range(extra_ids)]
        self.added_sentinels = sum(name not in known for name in sentinels)
        self.specials: dict[str, int] = {}
        for name in ["<CLS>", "<SEP>", "<EOD>", "<MASK>", pad, bos, eos, *sentinels]:
            self.specials[name] = known.setdefault(name, len(known))
        self._names = {token: name for name, token in self.specials.items()}
        self._size = len(known)
        self.eod = self.specials["<EOD>"]
        self.bos = self.specials[bos]
        self.pad = self.specials[pad]
        self.roles = Roles(
            cls=self.specials["<CLS>"],
            sep=self.specials["<SEP>"],
            mask=self.specials["<MASK>"],
            pad=self.pad,
            bos=self.bos,
            eos=self.specials[eos],
            sentinels=tuple(self.specials[name] for name in sentinels),
        )

    @property
    def vocab_size(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        return self._encode(texts)

    def control(self, name: str) -> int | None:
        return self.specials.get(name)

    @cached_property
    def _encode(self) -> Encode:
        return _encoder(self._model)

    def piece(self, token: int) -> str:
        return self._names.get(token) or str(self._model.id_to_piece(token))

    def token_bytes(self, token: int) -> bytes:
        return b"" if token in self._names else _piece_bytes(self._model, token)

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are written by name, apart by spaces."""
        spans = groupby((int(token) for token in ids), key=lambda token: token in self._names)
        parts = []
        for special, run in spans:
            tokens = list(run)
            parts.append(" ".join(self._names[t] for t in tokens) if special else self._model.decode(tokens))
        return " ".join(parts)

    def files(self) -> Mapping[str, Path]:
        return {"tokenizer.model": self._path}
