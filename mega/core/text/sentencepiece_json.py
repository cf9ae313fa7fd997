"""Write a SentencePiece model as a tokenizer.json with which transformers produces the same ids.

This module supports unigram and BPE models with their normalisation. A tokenizer.json is used only if it produces the
same ids as the SentencePiece library on all probe texts. transformers itself would treat every tokenizer.model as
Llama's BPE.
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
"""Length of the name of a piece that represents one byte, such as <0x0A>."""


@dataclass(frozen=True)
class _Model:
    """The contents of a SentencePiece model file that determine the ids of a text."""

    kind: int  # type of the model, a key of _KINDS
    pieces: Sequence[tuple[str, float, int]]  # (piece, score, type) of each piece
    byte_fallback: bool
    charsmap: bytes  # the compiled normalisation rules
    squeezes: bool  # whether spaces at both ends of a text, and repeated spaces, are removed
    prefix: bool  # whether a space is prepended to a text
    odd: bool  # whether the model has settings that a tokenizer.json cannot express

    @classmethod
    def read(cls, proto: bytes) -> _Model:
        fields = protobuf.fields(proto)
        trainer, normalizer = (protobuf.fields(last(fields, number, b"")) for number in (2, 3))
        inexpressible = bool(last(trainer, 24, 0)) or not last(
            normalizer, 5, 1
        )  # whether spaces are at the end of words, or are not escaped
        return cls(
            kind=last(trainer, 3, 1),
            pieces=pieces_of(fields),
            byte_fallback=bool(last(trainer, 35, 0)),
            charsmap=last(normalizer, 2, b""),
            squeezes=bool(last(normalizer, 4, 1)),
            prefix=bool(last(normalizer, 3, 1)),
            odd=inexpressible,
        )


def published(model: SentencePieceProcessor, lead: bool) -> dict[str, Json] | None:
    """Return the model as the content of a tokenizer.json for transformers; None if this is not possible.

    lead: whether bos precedes every text. Each text between control tokens is encoded separately.
    """
    parsed = _Model.read(model.serialized_model_proto())
    users = [piece for piece, _, kind in parsed.pieces if kind == USER]
    if parsed.odd or parsed.kind == _WORD or (users and parsed.kind != _UNIGRAM) or not _covered(parsed):
        return None
    whole: dict[str, Json] = {"version": "1.0", "added_tokens": [], "normalizer": _normalizer(parsed)}
    whole["model"] = _unigram(parsed) if parsed.kind == _UNIGRAM else merges_json(parsed.pieces, parsed.byte_fallback)
    whole |= dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder"))
    if not _same(whole, model, users):
        return None
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [(token, piece) for token, (piece, _, kind) in enumerate(parsed.pieces) if kind in (UNKNOWN, CONTROL)]
    whole["added_tokens"] = [{"id": token, "content": piece, "special": True, **plain} for token, piece in special]
    blanks: Json = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * parsed.prefix
    steps: list[Json] = [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    whole["decoder"] = {"type": "Sequence", "decoders": steps}
    if lead:
        whole["post_processor"] = leads_with(model.id_to_piece(model.bos_id()), model.bos_id())
    return whole


def described(model: SentencePieceProcessor) -> str:
    """Describe the type of a model, for use in messages."""
    parsed = _Model.read(model.serialized_model_proto())
    suffix = " with symbols of its own" if any(kind == USER for _, _, kind in parsed.pieces) else ""
    return f"{_KINDS.get(parsed.kind, 'unknown')} model{suffix}"


def rule_name(model: SentencePieceProcessor) -> str:
    """Return the name of the model's normalization rule, such as nmt_nfkc; empty for identity."""
    fields = protobuf.fields(model.serialized_model_proto())
    name: bytes = last(protobuf.fields(last(fields, 3, b"")), 1, b"")
    return "" if name == b"identity" else name.decode(errors="replace")


def losses(model: SentencePieceProcessor) -> list[str]:
    """List the ways in which Hugging Face's library, with the output of `published`, differs from SentencePiece.
    Hugging Face's library normalises a letter together with its accents, so that separate accents may be lost. It also
    recognises names of bytes, such as <0x41>, in a text."""
    parsed = _Model.read(model.serialized_model_proto())
    differences = ["cuts a text with accents that form no one character with their letter otherwise"] * bool(
        parsed.charsmap
    )
    normal_pieces = {piece for piece, _, kind in parsed.pieces if kind == NORMAL}
    if parsed.kind == _UNIGRAM and parsed.byte_fallback and not set("<0x123456789ABCDEF>") <= normal_pieces:
        differences.append("takes the text <0x41> for the byte of that name")
    return differences


def leads_with(name: str, token: int) -> dict[str, Json]:
    """Return a post-processor, for a tokenizer.json, that prepends a token to every text."""
    single: list[Json] = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [*single, {"SpecialToken": {"id": name, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special_tokens: Json = {name: {"id": name, "ids": [token], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special_tokens}


def unreachable(vocabulary: list[list[object]], tokens: Collection[int]) -> list[list[object]]:
    """Return the vocabulary of a unigram tokenizer.json, with the names of `tokens` replaced with names that occur in
    no text. Otherwise, the library would recognise control tokens as pieces of raw text."""
    special = set(tokens)
    numbered = enumerate(vocabulary)
    return [[hidden(name) if token in special else name, score] for token, (name, score) in numbered]


def hidden(name: object) -> str:
    """Return a name that occurs in no text, for a token named `name`."""
    return f"\ufddc{name}\ufddd"


def _normalizer(model: _Model) -> dict[str, Json]:
    steps: list[dict[str, Json]] = []
    if model.charsmap:
        # The library looks up a letter with all its accents, and then single characters, but not a letter with only the
        # first of two accents. NFC composes such letters.
        steps.append({"type": "NFC"})
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.squeezes:
        # at the end, SentencePiece also removes the sign that stands for a space
        steps.append({"type": "Replace", "pattern": {"Regex": rf"\A +|[ {BLANK}]+\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.prefix:
        steps.append({"type": "Prepend", "prepend": BLANK})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": BLANK})
    return {"type": "Sequence", "normalizers": steps}


def _covered(model: _Model) -> bool:
    """Whether every character of a longer piece is also a piece. The number of unknown characters in a text then
    depends neither on how the text is split nor on the cost of an unknown character, which the two libraries define
    differently.
    """
    normal_pieces = {piece for piece, _, kind in model.pieces if kind == NORMAL}
    return model.kind != _UNIGRAM or all(letter in normal_pieces for piece in normal_pieces for letter in piece)


def _unigram(model: _Model) -> dict[str, Json]:
    """Return the unigram model of a tokenizer.json. As in SentencePiece, the score of a user-defined symbol is the best
    piece's score times the symbol's number of bytes. The piece of a byte gets a lower score than the characters of its
    name, so that text is never encoded as this piece."""
    scores = [score for _, score, kind in model.pieces if kind == NORMAL]
    best, least = max(scores, default=0.0), min(scores, default=0.0)

    def score_of(piece: str, score: float, kind: int) -> float:
        if kind == USER:
            return len(piece.encode()) * best - 0.1
        return _BYTE_NAME * least - 1 if kind == BYTE else score

    vocabulary: list[Json] = [[each[0], score_of(*each)] for each in model.pieces]
    unknown = next(token for token, (_, _, kind) in enumerate(model.pieces) if kind == UNKNOWN)
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": model.byte_fallback}


def _same(whole: Mapping[str, Json], model: SentencePieceProcessor, names: Sequence[str]) -> bool:
    """Whether a tokenizer.json without added tokens produces the model's ids on the probes and on texts that contain
    `names`."""
    from tokenizers import Tokenizer as Library

    searched: dict[str, Any] = {**below(whole, "model")}
    if searched["type"] == "Unigram":
        kinds = (model.is_control, model.is_unknown, model.is_unused)
        searched["vocab"] = unreachable(
            searched["vocab"], [n for n in range(len(searched["vocab"])) if any(k(n) for k in kinds)]
        )
    name_texts = [
        f"{prefix}{name}{suffix}" for name in names for prefix in ("", "a", " ") for suffix in ("", "b", " c")
    ]
    library = Library.from_str(json.dumps({**whole, "model": searched}))
    texts = [*PROBES, *SEAMS, *name_texts]
    return bool([encoding.ids for encoding in library.encode_batch_fast(texts)] == model.encode(texts))
