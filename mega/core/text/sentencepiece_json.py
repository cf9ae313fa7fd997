"""A SentencePiece model written as a tokenizer.json, with which transformers gives the same ids.

Unigram and BPE models, with their normalisation. What is written is compared with the library on the probe texts, and
is taken only where all ids are equal: transformers' own conversion takes every tokenizer.model for Llama's BPE.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega.core.text import protobuf
from mega.core.text.probes import PROBES
from mega.core.text.sentencepiece_bpe import (
    BLANK,
    BYTE,
    CONTROL,
    NORMAL,
    SEAMS,
    UNKNOWN,
    USER,
    last,
    merges_json,
    pieces_of,
)
from mega.core.untrusted import Json, below

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_UNIGRAM, _BPE, _WORD, _CHARACTER = 1, 2, 3, 4
_KINDS = {_UNIGRAM: "unigram", _BPE: "BPE", _WORD: "word", _CHARACTER: "character"}
_BYTE_NAME = 6
"""Characters of <0x0A>."""


@dataclass(frozen=True)
class _Model:
    """kind: of _KINDS. pieces: (piece, score, type). charsmap: of the normalisation, compiled.
    squeezes: takes blanks away at the ends of a text, and all but one of several. prefix: puts a blank in front."""

    kind: int
    pieces: Sequence[tuple[str, float, int]]
    byte_fallback: bool
    charsmap: bytes
    squeezes: bool
    prefix: bool
    odd: bool

    @classmethod
    def read(cls, proto: bytes) -> _Model:
        fields = protobuf.fields(proto)
        trainer, normalizer = (protobuf.fields(last(fields, number, b"")) for number in (2, 3))
        odd = bool(last(trainer, 24, 0)) or not last(normalizer, 5, 1)  # blanks at a word's end, or kept as they are
        return cls(
            kind=last(trainer, 3, 1),
            pieces=pieces_of(fields),
            byte_fallback=bool(last(trainer, 35, 0)),
            charsmap=last(normalizer, 2, b""),
            squeezes=bool(last(normalizer, 4, 1)),
            prefix=bool(last(normalizer, 3, 1)),
            odd=odd,
        )


def published(model: SentencePieceProcessor, lead: bool) -> dict[str, Json] | None:
    """The model as a tokenizer.json that transformers opens as it stands; None where it cannot be written so.

    lead: bos is in front of every text. Text between control tokens is encoded as a text of its own.
    """
    found = _Model.read(model.serialized_model_proto())
    users = [piece for piece, _, kind in found.pieces if kind == USER]
    if found.odd or found.kind == _WORD or (users and found.kind != _UNIGRAM) or not _covered(found):
        return None
    whole: dict[str, Json] = {"version": "1.0", "added_tokens": [], "normalizer": _normalizer(found)}
    whole["model"] = _unigram(found) if found.kind == _UNIGRAM else merges_json(found.pieces, found.byte_fallback)
    whole |= dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder"))
    if not _same(whole, model, users):
        return None
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [(token, piece) for token, (piece, _, kind) in enumerate(found.pieces) if kind in (UNKNOWN, CONTROL)]
    whole["added_tokens"] = [{"id": token, "content": piece, "special": True, **plain} for token, piece in special]
    blanks: Json = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * found.prefix
    steps: list[Json] = [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    whole["decoder"] = {"type": "Sequence", "decoders": steps}
    if lead:
        whole["post_processor"] = leads_with(model.id_to_piece(model.bos_id()), model.bos_id())
    return whole


def described(model: SentencePieceProcessor) -> str:
    """What kind of model it is, for a message."""
    found = _Model.read(model.serialized_model_proto())
    own = " with symbols of its own" if any(kind == USER for _, _, kind in found.pieces) else ""
    return f"{_KINDS.get(found.kind, 'unknown')} model{own}"


def losses(model: SentencePieceProcessor) -> list[str]:
    """What Hugging Face's library does otherwise with what `published` writes. It replaces a letter together with its
    marks, so that loose marks may get lost; and it finds the names of bytes in a text."""
    found = _Model.read(model.serialized_model_proto())
    lost = ["cuts a text with accents that form no one character with their letter otherwise"] * bool(found.charsmap)
    known = {piece for piece, _, kind in found.pieces if kind == NORMAL}
    if found.kind == _UNIGRAM and found.byte_fallback and not set("<0x123456789ABCDEF>") <= known:
        lost.append("takes the text <0x41> for the byte of that name")
    return lost


def leads_with(name: str, token: int) -> dict[str, Json]:
    """What puts a token in front of every text, as a tokenizer.json has it."""
    single: list[Json] = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [*single, {"SpecialToken": {"id": name, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    known: Json = {name: {"id": name, "ids": [token], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def unreachable(vocabulary: list[list[object]], tokens: Collection[int]) -> list[list[object]]:
    """The vocabulary of a unigram tokenizer.json in which no text has these tokens: their names hold characters that
    no text has. Else the library finds control tokens in raw text, as pieces."""
    hidden = set(tokens)
    return [
        [f"\ufddc{name}\ufddd", score] if token in hidden else [name, score]
        for token, (name, score) in enumerate(vocabulary)
    ]


def _normalizer(found: _Model) -> dict[str, Json]:
    steps: list[dict[str, Json]] = []
    if found.charsmap:
        # The library looks up a letter with all its marks, and then single characters: it misses those in between.
        steps.append({"type": "NFC"})
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(found.charsmap).decode()})
    if found.squeezes:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if found.prefix:
        steps.append({"type": "Prepend", "prepend": BLANK})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": BLANK})
    return {"type": "Sequence", "normalizers": steps}


def _covered(found: _Model) -> bool:
    """Whether every character of a longer piece is a piece too. Then a text has as many unknown characters however it
    is cut, so that what each of them costs, which the two libraries compute otherwise, does not matter."""
    known = {piece for piece, _, kind in found.pieces if kind == NORMAL}
    return found.kind != _UNIGRAM or all(letter in known for piece in known for letter in piece)


def _unigram(found: _Model) -> dict[str, Json]:
    """Symbols of the user's have the score that the library gives them: of their bytes, each as the best piece. The
    name of a byte is worse than its letters, since text never becomes it."""
    scores = [score for _, score, kind in found.pieces if kind == NORMAL]
    best, least = max(scores, default=0.0), min(scores, default=0.0)

    def score_of(piece: str, score: float, kind: int) -> float:
        if kind == USER:
            return len(piece.encode()) * best - 0.1
        return _BYTE_NAME * least - 1 if kind == BYTE else score

    vocabulary: list[Json] = [[each[0], score_of(*each)] for each in found.pieces]
    unknown = next(token for token, (_, _, kind) in enumerate(found.pieces) if kind == UNKNOWN)
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": found.byte_fallback}


def _same(whole: Mapping[str, Json], model: SentencePieceProcessor, names: Sequence[str]) -> bool:
    """Whether a tokenizer.json without added tokens gives the model's ids on the probes, and around `names`."""
    from tokenizers import Tokenizer as Library

    used: dict[str, Any] = {**below(whole, "model")}
    if used["type"] == "Unigram":
        kinds = (model.is_control, model.is_unknown, model.is_unused)
        used["vocab"] = unreachable(used["vocab"], [n for n in range(len(used["vocab"])) if any(k(n) for k in kinds)])
    spelled = [f"{left}{name}{right}" for name in names for left in ("", "a", " ") for right in ("", "b", " c")]
    library = Library.from_str(json.dumps({**whole, "model": used}))
    texts = [*PROBES, *SEAMS, *spelled]
    return bool([found.ids for found in library.encode_batch_fast(texts)] == model.encode(texts))
