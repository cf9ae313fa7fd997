"""Convert a SentencePiece model like Llama's for fastokens, which is several times faster than the SentencePiece
library.

Only BPE models with byte fallback and without normalisation can be converted. The converted model is used only if it
produces the same ids as the library on the probes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mega.core.text import protobuf
from mega.core.text.fast import Encode, first_equal
from mega.core.text.probes import PROBES
from mega.core.untrusted import Json

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

NORMAL, UNKNOWN, CONTROL, USER, _UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BPE = 2
_LONGEST_PIECE = 1000  # maximum number of characters, limited because every way to split a piece in two is tried
BLANK = "\u2581"
SEAMS = tuple(" " * n + "x" + "\n" * n + "\t" * n + "-" * n for n in range(1, 40))


def faster(model: SentencePieceProcessor, reference: Encode) -> Encode | None:
    """Return an encoder with the same ids as `reference` (the library's encoder for `model`, without bos), or None."""

    def rewritten() -> str | None:
        pieces = _rewritable(model.serialized_model_proto())
        return None if pieces is None else _tokenizer_json(pieces)

    engine = first_equal("SentencePiece", reference, rewritten, texts=[*PROBES, *SEAMS])
    return None if engine is None else engine[1]


def _rewritable(proto: bytes) -> list[tuple[str, float, int]] | None:
    """Return (piece, score, type) of every piece, or None if the model is not a BPE with byte fallback and without
    normalisation."""
    model = protobuf.fields(proto)
    trainer, normalizer = (protobuf.fields(last(model, number, b"")) for number in (2, 3))
    pieces = pieces_of(model)
    plain = (
        last(trainer, 3, 1) == _BPE
        and last(trainer, 35, 0)  # byte_fallback
        and not last(trainer, 24, 0)  # treat_whitespace_as_suffix
        and not last(normalizer, 2, b"")  # precompiled_charsmap
        and last(normalizer, 3, 1)  # add_dummy_prefix
        and not last(normalizer, 4, 1)  # remove_extra_whitespaces
        and last(normalizer, 5, 1)  # escape_whitespaces
        and not any(kind == USER or len(piece) > _LONGEST_PIECE for piece, _, kind in pieces)
    )
    return pieces if plain else None


def last(found: dict[int, list[Any]], number: int, default: Any) -> Any:
    return found.get(number, [default])[-1]


def pieces_of(fields: dict[int, list[Any]]) -> list[tuple[str, float, int]]:
    """Return (piece, score, type) of every piece of a model, from the fields of the model file."""
    return [_piece(protobuf.fields(value)) for value in fields[1] if isinstance(value, bytes)]


def _piece(values: dict[int, list[Any]]) -> tuple[str, float, int]:
    return values[1][-1].decode(), protobuf.packed_floats(values.get(2, [b"\0\0\0\0"]))[-1], last(values, 3, NORMAL)


def _tokenizer_json(pieces: Sequence[tuple[str, float, int]]) -> str:
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, blanks]}
    whole = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": merges_json(pieces, True)}
    return json.dumps(whole | dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder")))


def merges_json(pieces: Sequence[tuple[str, float, int]], byte_fallback: bool) -> dict[str, Json]:
    """Return a BPE as the model of a tokenizer.json. Every pair of pieces whose concatenation is a piece becomes a
    merge. Merges with better scores come first."""
    vocab = {piece: token for token, (piece, _, _) in enumerate(pieces)}
    ordinary = {piece for piece, _, kind in pieces if kind == NORMAL}
    merges: list[tuple[float, int, int, str]] = []
    for piece, score, kind in pieces:
        if kind == NORMAL:
            for cut in range(1, len(piece)):
                head, tail = piece[:cut], piece[cut:]
                if head in ordinary and tail in ordinary:
                    merges.append((-score, vocab[head], vocab[tail], f"{head} {tail}"))
    merges.sort()
    unknown = next(piece for piece, _, kind in pieces if kind == UNKNOWN)
    model: dict[str, Json] = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [merge for *_, merge in merges],
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
    }
    return model | dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
