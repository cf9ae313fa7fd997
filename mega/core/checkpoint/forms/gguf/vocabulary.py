"""A tokenizer in GGUF's metadata, as a tokenizer.json, and back: byte-level BPE ("gpt2") and SentencePiece's ("llama").

Which rule cuts a text before byte-level BPE is a name there (`tokenizer.ggml.pre`) and a regular expression here; a
rule that has no name is refused. Merges of SentencePiece's pieces go by the pieces' scores there and are listed here.
Knows no tensors. Source: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.untrusted import Json, below

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""Kinds of a token."""

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
BLANK = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"


class TextRule(NamedTuple):
    """How a text is cut before byte-level BPE. pattern: of the parts. digits: each on its own first. whole: a part that
    is a token is taken whole. normalizer: of the text."""

    pattern: str
    digits: bool = False
    whole: bool = False
    normalizer: str | None = None


CUTS = {
    "gpt-2": TextRule(_GPT2),
    "llama-bpe": TextRule(rf"{_HEAD}\p{{N}}{{1,3}}|{_TAIL}", whole=True),
    "qwen2": TextRule(rf"{_HEAD}\p{{N}}|{_TAIL}", normalizer="NFC"),
    "smollm": TextRule(_GPT2, digits=True),
}
"""llama.cpp's name of a rule -> the rule."""

ALIASES = {"default": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}


# Reading


def tokenizer_files(metadata: Mapping[str, Json], where: str) -> dict[str, dict[str, Json]]:
    """tokenizer.json and tokenizer_config.json; none where there is no tokenizer. Errors: CheckpointError."""
    kind = metadata.get(f"{PREFIX}model")
    if kind in (None, "none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{where}: {PREFIX}model {kind!r} (valid: gpt2, llama)")
    tokens, kinds = _strings(metadata, "tokens", where), metadata.get(f"{PREFIX}token_type")
    kinds = kinds if isinstance(kinds, list) else [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{where}: {PREFIX}token_type: {len(kinds)} of {len(tokens)} tokens")
    while tokens and kinds[len(tokens) - 1] == UNUSED:
        tokens.pop()
    ids = {token: number for number, token in enumerate(tokens)}
    added: list[Json] = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[number] in (CONTROL, UNKNOWN),
        }
        for number, token in enumerate(tokens)
        if kinds[number] in (CONTROL, USER, UNKNOWN)
    ]
    parts = _byte_level(metadata, ids, where) if kind == "gpt2" else _pieces(metadata, ids, kinds, where)
    named = {
        f"{name}_token": tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if isinstance(number := metadata.get(f"{PREFIX}{key}_token_id"), int) and 0 <= number < len(tokens)
    }
    leads = metadata.get(f"{PREFIX}add_bos_token", kind == "llama") and "bos_token" in named
    whole: dict[str, Json] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    whole["post_processor"] = _leading(str(named["bos_token"]), ids) if leads else parts.get("post_processor")
    settings: dict[str, Json] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if isinstance(template := metadata.get(TEMPLATE), str):
        settings["chat_template"] = template
    return {"tokenizer.json": whole, "tokenizer_config.json": settings}


def _strings(metadata: Mapping[str, Json], name: str, where: str) -> list[str]:
    found = metadata.get(PREFIX + name)
    if not isinstance(found, list) or not found:
        raise CheckpointError(f"{where}: holds no {PREFIX}{name}")
    return [str(each) for each in found]


def _leading(bos: str, ids: Mapping[str, int]) -> dict[str, Json]:
    first: Json = {"SpecialToken": {"id": bos, "type_id": 0}}
    one: Json = {"Sequence": {"id": "A", "type_id": 0}}
    two: Json = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, one],
        "pair": [first, one, first, two],
        "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
    }


def _byte_level(metadata: Mapping[str, Json], ids: Mapping[str, int], where: str) -> dict[str, Json]:
    name = str(metadata.get(f"{PREFIX}pre", "default"))
    cut = CUTS.get(ALIASES.get(name, name))
    if cut is None:
        raise CheckpointError(f"{where}: {PREFIX}pre {name!r} (valid: {', '.join((*CUTS, *ALIASES))})")
    level: dict[str, Json] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split: Json = {"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated", "invert": False}
    digits: list[Json] = [{"type": "Digits", "individual_digits": True}] if cut.digits else []
    model = _bpe(ids, _strings(metadata, "merges", where), whole=cut.whole)
    return {
        "normalizer": None if cut.normalizer is None else {"type": cut.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*digits, split, level]},
        "post_processor": level,
        "decoder": {**level, "use_regex": True},
        "model": model,
    }


def _bpe(ids: Mapping[str, int], merges: Sequence[str], **settings: Json) -> dict[str, Json]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": settings.get("unk_token"),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": bool(settings.get("fuse_unk")),
        "byte_fallback": bool(settings.get("byte_fallback")),
        "ignore_merges": bool(settings.get("whole")),
        "vocab": dict(ids),
        "merges": list(merges),
    }


def _pieces(metadata: Mapping[str, Json], ids: Mapping[str, int], kinds: Sequence[Json], where: str) -> dict[str, Json]:
    scores = metadata.get(f"{PREFIX}scores")
    if not isinstance(scores, list) or len(scores) < len(ids):
        raise CheckpointError(f"{where}: holds no {PREFIX}scores for its {len(ids)} tokens")
    plain = {piece: number for piece, number in ids.items() if kinds[number] == NORMAL}
    found: list[tuple[float, int, int, str]] = []
    for piece, number in plain.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in plain and right in plain:
                found.append((-float(str(scores[number])), plain[left], plain[right], f"{left} {right}"))
    unknown = next((piece for piece, number in ids.items() if kinds[number] == UNKNOWN), None)
    lead: list[Json] = (
        [{"type": "Prepend", "prepend": BLANK}] if metadata.get(f"{PREFIX}add_space_prefix", True) else []
    )
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if lead else []
    blank: dict[str, Json] = {"String": BLANK}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*lead, {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": blank, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            ids, [merge for *_, merge in sorted(found)], unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


# Writing


def vocabulary_of(whole: Mapping[str, Json], ids: Mapping[str, Json], rows: int) -> dict[str, Json]:
    """The metadata of a tokenizer.json. ids: `bos_token_id` and others. rows: of the embedding; what the tokenizer does
    not fill is unused there. Errors: CheckpointError naming what llama.cpp has no name for."""
    model, added = below(whole, "model"), whole.get("added_tokens") or []
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, dict):
        raise CheckpointError(f"--to gguf: its tokenizer is {model.get('type')}; valid: BPE")
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [UNUSED] * rows
    pieces = bool(model.get("byte_fallback"))
    for piece, number in vocab.items():
        if not isinstance(number, int) or not 0 <= number < rows:
            raise CheckpointError(f"--to gguf: the token {piece!r} has the id {number}; the model has {rows}")
        byte = pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", piece) is not None
        tokens[number], kinds[number] = piece, BYTE if byte else NORMAL
    for each in added if isinstance(added, list) else []:
        number = each.get("id") if isinstance(each, dict) else None
        if isinstance(each, dict) and isinstance(number, int) and 0 <= number < rows:
            tokens[number], kinds[number] = str(each.get("content")), CONTROL if each.get("special") else USER
            if pieces and each.get("content") == model.get("unk_token"):
                kinds[number] = UNKNOWN
    found: dict[str, Json] = {"tokens": list(tokens), "token_type": list(kinds)}
    merges = [" ".join(map(str, each)) if isinstance(each, list) else str(each) for each in _list(model.get("merges"))]
    if pieces:
        found |= {"model": "llama", "scores": _scores(tokens, merges), "add_space_prefix": _leads_with_blank(whole)}
    else:
        found |= {"model": "gpt2", "pre": _pre(whole, bool(model.get("ignore_merges"))), "merges": list(merges)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        value = ids.get(f"{key}_token_id")
        first, *others = value if isinstance(value, list) else [value]
        if first is not None:
            found[f"{name}_token_id"] = first
        if name == "eos" and others:
            found["eot_token_id"] = others[0]
    if UNKNOWN in kinds:
        found["unknown_token_id"] = kinds.index(UNKNOWN)
    found["add_bos_token"] = _leads_with_bos(whole)
    return {PREFIX + name: value for name, value in found.items()}


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[Json]:
    """Minus the rank of the first merge that makes a piece: llama.cpp merges the pair of the highest score."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [float(-ranks.get(token, len(merges))) for token in tokens]


def _leads_with_blank(whole: Mapping[str, Json]) -> bool:
    return '"Prepend"' in str(whole.get("normalizer")).replace("'", '"') or below(whole, "pre_tokenizer").get(
        "prepend_scheme"
    ) in ("first", "always")


def _leads_with_bos(whole: Mapping[str, Json]) -> bool:
    processors = [below(whole, "post_processor"), *_list(below(whole, "post_processor").get("processors"))]
    for each in processors:
        single = _list(each.get("single")) if isinstance(each, dict) else []
        if single and isinstance(single[0], dict) and "SpecialToken" in single[0]:
            return True
    return False


def _pre(whole: Mapping[str, Json], ignores_merges: bool) -> str:
    """llama.cpp's name of the rule that cuts texts. Errors: CheckpointError."""
    outer = below(whole, "pre_tokenizer")
    parts = [each for each in _list(outer.get("pretokenizers")) or [outer] if isinstance(each, dict)]
    patterns = [str(below(each, "pattern").get("Regex")) for each in parts if each.get("type") == "Split"]
    digits = any(each.get("type") == "Digits" and each.get("individual_digits") for each in parts)
    level = next((each for each in parts if each.get("type") == "ByteLevel"), None)
    if level is not None and not level.get("add_prefix_space") and len(patterns) <= 1:
        patterns = patterns or ([_GPT2] if level.get("use_regex", True) else [])
        normalizer = whole.get("normalizer") and below(whole, "normalizer").get("type")
        for name, cut in CUTS.items():
            if patterns == [cut.pattern] and cut[1:] == (digits, ignores_merges and cut.whole, normalizer):
                return name
    raise CheckpointError(
        f"--to gguf: how its tokenizer cuts a text has no name of llama.cpp's that is known here: {', '.join(CUTS)}"
    )
