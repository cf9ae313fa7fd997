"""A SentencePiece model of Llama's kind, rewritten for fastokens: several times the library's speed.

Only a byte-fallback BPE without any normalisation can be rewritten, and it is taken only where it gives the
library's ids on the probes; everything else stays with the library.
"""

from __future__ import annotations

import json
from typing import Any

from mega.core.text import protobuf
from mega.core.text.fast import Encode, first_equal
from mega.core.text.probes import PROBES

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BPE = 2
_LONGEST_PIECE = 1000  # every way to cut a piece is tried
_BLANK = "\u2581"
_SEAMS = tuple(" " * n + "x" + "\n" * n + "\t" * n + "-" * n for n in range(1, 40))


def faster(model: Any, reference: Encode) -> Encode | None:
    """An `Encode` with the ids of `reference` (the library on `model`, without bos), or None."""

    def rewritten() -> str | None:
        pieces = _rewritable(model.serialized_model_proto())
        return None if pieces is None else _tokenizer_json(pieces)

    found = first_equal("SentencePiece", reference, rewritten, texts=[*PROBES, *_SEAMS])
    return None if found is None else found[1]


def published(model: Any, lead: bool) -> dict[str, Any] | None:
    """The model as a tokenizer.json that transformers opens as it stands; None where it cannot be written so.

    lead: bos is in front of every text. Text between control tokens is encoded as a text of its own.
    """
    proto = model.serialized_model_proto()
    pieces, squeezed = _rewritable(proto), False
    if pieces is None:
        pieces, squeezed = _rewritable(proto, squeezes=True), True
    if pieces is None:
        return None
    whole: dict[str, Any] = json.loads(_tokenizer_json(pieces))
    if squeezed:
        sides = {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
        several = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        whole["normalizer"]["normalizers"][:0] = [sides, several]
    if not _same(whole, model):
        return None
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [(token, piece) for token, (piece, _, kind) in enumerate(pieces) if kind in (_UNKNOWN, _CONTROL)]
    whole["added_tokens"] = [{"id": token, "content": piece, "special": True, **plain} for token, piece in special]
    blanks = {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    whole["decoder"] = {"type": "Sequence", "decoders": steps}
    if lead:
        whole["post_processor"] = leads_with(model.id_to_piece(model.bos_id()), model.bos_id())
    return whole


def _same(whole: dict[str, Any], model: Any) -> bool:
    """Whether a tokenizer.json gives the model's ids on the probes."""
    from tokenizers import Tokenizer as Library

    library, texts = Library.from_str(json.dumps(whole)), [*PROBES, *_SEAMS]
    return bool([found.ids for found in library.encode_batch_fast(texts)] == model.encode(texts))


def leads_with(name: str, token: int) -> dict[str, Any]:
    """What puts a token in front of every text, as a tokenizer.json has it."""
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"SpecialToken": {"id": name, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    known = {name: {"id": name, "ids": [token], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def _rewritable(proto: bytes, squeezes: bool = False) -> list[tuple[str, float, int]] | None:
    """(piece, score, type) of every piece of a byte-fallback BPE that leaves its text as it is; else None. squeezes: or
    that takes blanks away at the ends of a text, and all but one of several."""
    model = protobuf.fields(proto)
    trainer, normalizer = (protobuf.fields(_last(model, number, b"")) for number in (2, 3))
    pieces = [_piece(protobuf.fields(value)) for value in model[1] if isinstance(value, bytes)]
    plain = (
        _last(trainer, 3, 1) == _BPE
        and _last(trainer, 35, 0)  # byte_fallback
        and not _last(trainer, 24, 0)  # treat_whitespace_as_suffix
        and not _last(normalizer, 2, b"")  # precompiled_charsmap
        and _last(normalizer, 3, 1)  # add_dummy_prefix
        and bool(_last(normalizer, 4, 1)) == squeezes  # remove_extra_whitespaces
        and _last(normalizer, 5, 1)  # escape_whitespaces
        and not any(kind == _USER or len(piece) > _LONGEST_PIECE for piece, _, kind in pieces)
    )
    return pieces if plain else None


def _last(found: dict[int, list[Any]], number: int, default: Any) -> Any:
    return found.get(number, [default])[-1]


def _piece(found: dict[int, list[Any]]) -> tuple[str, float, int]:
    return found[1][-1].decode(), protobuf.packed_floats(found.get(2, [b"\0\0\0\0"]))[-1], _last(found, 3, _NORMAL)


def _tokenizer_json(pieces: list[tuple[str, float, int]]) -> str:
    """The model as a tokenizer.json: every way to make a piece of two pieces is a merge, best score first."""
    vocab = {piece: token for token, (piece, _, _) in enumerate(pieces)}
    ordinary = {piece for piece, _, kind in pieces if kind == _NORMAL}
    merges: list[tuple[float, int, int, str]] = []
    for piece, score, kind in pieces:
        if kind == _NORMAL:
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in ordinary and right in ordinary:
                    merges.append((-score, vocab[left], vocab[right], f"{left} {right}"))
    merges.sort()
    unknown = next(piece for piece, _, kind in pieces if kind == _UNKNOWN)
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [merge for *_, merge in merges],
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
    }
    model |= dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _BLANK}, blanks]}
    whole = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}
    return json.dumps(whole | dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder")))
