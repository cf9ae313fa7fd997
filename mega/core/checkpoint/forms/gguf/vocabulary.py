"""Convert the tokenizer in GGUF's metadata to a tokenizer.json and back: byte-level BPE ("gpt2") and SentencePiece's
BPE ("llama").

GGUF names the rule that splits a text before byte-level BPE (`tokenizer.ggml.pre`), whereas a tokenizer.json contains a
regular expression; a regular expression without a name in GGUF is refused. For SentencePiece's BPE, GGUF contains
scores that imply the merges, whereas a tokenizer.json lists the merges. This module does not depend on tensors. Source:
llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.untrusted import Json, below

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""GGUF's token types."""

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
BLANK = "\u2581"
_LEAD: Json = {"type": "Prepend", "prepend": BLANK}
_BLANKS: Json = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"


class TextRule(NamedTuple):
    """A rule for splitting a text before byte-level BPE."""

    pattern: str
    """The regular expression that matches one part of the text."""
    digits: bool = False
    """Whether digits are first split off, each as a separate part."""
    whole: bool = False
    """Whether a part of the text that equals a token of the vocabulary is mapped to this token without merging."""
    normalizer: str | None = None
    """The Unicode normalization applied to the text, if any."""


CUTS = {
    "gpt-2": TextRule(_GPT2),
    "llama-bpe": TextRule(rf"{_HEAD}\p{{N}}{{1,3}}|{_TAIL}", whole=True),
    "qwen2": TextRule(rf"{_HEAD}\p{{N}}|{_TAIL}", normalizer="NFC"),
    "smollm": TextRule(_GPT2, digits=True),
}
"""Name of a rule in llama.cpp -> the rule."""

ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
"""Other names that llama.cpp uses for rules in `CUTS` -> the names in `CUTS`. `default` is a different rule and is
refused."""

ENDS = ("eos", "eot", "eom")
"""Names of tokens that end a text or a turn."""


# Reading


def tokenizer_files(metadata: Mapping[str, Json], where: str) -> dict[str, dict[str, Json]]:
    """Return tokenizer.json and tokenizer_config.json for the metadata; {} if the file has no tokenizer. Errors:
    CheckpointError."""
    kind = metadata.get(f"{PREFIX}model")
    if kind in (None, "none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{where}: {PREFIX}model {kind!r} (valid: gpt2, llama)")
    tokens, kinds = _strings(metadata, "tokens", where), metadata.get(f"{PREFIX}token_type")
    kinds = kinds if isinstance(kinds, list) else [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{where}: {PREFIX}token_type: {len(kinds)} of {len(tokens)} tokens")
    # Padding rows of the embedding are not tokens.
    while tokens and kinds[len(tokens) - 1] == UNUSED:
        tokens.pop()
    ids = _ids(tokens, kinds, where)
    added_tokens: list[Json] = [
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
    special_names = {
        f"{name}_token": tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if isinstance(number := metadata.get(f"{PREFIX}{key}_token_id"), int) and 0 <= number < len(tokens)
    }
    frame = _frame(metadata, special_names, where)
    tokenizer_json: dict[str, Json] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        **parts,
    }
    tokenizer_json["post_processor"] = _framed(*frame, ids) if any(frame) else parts.get("post_processor")
    settings: dict[str, Json] = {"tokenizer_class": "PreTrainedTokenizerFast", **special_names}
    if isinstance(template := metadata.get(TEMPLATE), str):
        settings["chat_template"] = template
    return {"tokenizer.json": tokenizer_json, "tokenizer_config.json": settings}


def _strings(metadata: Mapping[str, Json], name: str, where: str) -> list[str]:
    strings = metadata.get(PREFIX + name)
    if not isinstance(strings, list) or not strings:
        raise CheckpointError(f"{where}: holds no {PREFIX}{name}")
    return [str(each) for each in strings]


def _ids(tokens: Sequence[str], kinds: Sequence[Json], where: str) -> dict[str, int]:
    """Return the id of each token. An unused token may have the text of another token. Errors: CheckpointError if two
    other tokens have the same text, because a tokenizer.json has one id for each text."""
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens):
        first = ids.get(token)
        if first is None or kinds[first] == UNUSED:
            ids[token] = number
        elif kinds[number] != UNUSED:
            raise CheckpointError(
                f"{where}: {PREFIX}tokens: {token!r} has the ids {first} and {number} (valid: one id)"
            )
    return ids


def _frame(metadata: Mapping[str, Json], special_names: Mapping[str, str], where: str) -> tuple[str | None, str | None]:
    """Return the tokens that llama.cpp adds before and after a text. Errors: CheckpointError if a required token is
    missing."""
    pre = str(metadata.get(f"{PREFIX}pre"))
    usual = {"bos": metadata.get(f"{PREFIX}model") == "llama" or ALIASES.get(pre, pre) == "llama-bpe", "eos": False}
    tokens = []
    for name, otherwise in usual.items():
        is_added, token = metadata.get(f"{PREFIX}add_{name}_token", otherwise), special_names.get(f"{name}_token")
        if is_added and token is None:
            raise CheckpointError(
                f"{where}: {PREFIX}{name}_token_id: is none of its tokens, but is added to every text"
            )
        tokens.append(token if is_added else None)
    return tokens[0], tokens[1]


def _framed(bos: str | None, eos: str | None, ids: Mapping[str, int]) -> dict[str, Json]:
    def special(token: str | None, kind: int) -> list[Json]:
        return [] if token is None else [{"SpecialToken": {"id": token, "type_id": kind}}]

    def one(name: str, kind: int) -> list[Json]:
        return [*special(bos, kind), {"Sequence": {"id": name, "type_id": kind}}, *special(eos, kind)]

    return {
        "type": "TemplateProcessing",
        "single": one("A", 0),
        "pair": [*one("A", 0), *one("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (bos, eos) if token is not None
        },
    }


def _byte_level(metadata: Mapping[str, Json], ids: Mapping[str, int], where: str) -> dict[str, Json]:
    name = str(metadata.get(f"{PREFIX}pre"))
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
    merges: list[tuple[float, int, int, str]] = []
    # Every pair of tokens whose concatenation is a token is a merge. The pair with the highest score is merged first.
    for piece, number in plain.items():
        for cut in range(1, len(piece)):
            left_piece, right_piece = piece[:cut], piece[cut:]
            if left_piece in plain and right_piece in plain:
                merges.append(
                    (-float(str(scores[number])), plain[left_piece], plain[right_piece], f"{left_piece} {right_piece}")
                )
    unknown = next((piece for piece, number in ids.items() if kinds[number] == UNKNOWN), None)
    lead = [_LEAD] if metadata.get(f"{PREFIX}add_space_prefix", True) else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if lead else []
    blank: dict[str, Json] = {"String": BLANK}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*lead, _BLANKS],
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
            ids, [merge for *_, merge in sorted(merges)], unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


# Writing


def vocabulary_of(whole: Mapping[str, Json], ids: Mapping[str, Json], rows: int) -> dict[str, Json]:
    """Return the metadata for a tokenizer.json. ids: the token ids `bos_token_id` and similar. rows: number of rows of
    the embedding. Ids that the tokenizer does not use are marked as unused. Errors: CheckpointError naming a setting
    that llama.cpp does not support."""
    model, added_tokens = below(whole, "model"), whole.get("added_tokens") or []
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, dict):
        raise CheckpointError(f"--to gguf: its tokenizer is {model.get('type')}; valid: BPE")
    # llama.cpp requires a text for every row of the embedding.
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [UNUSED] * rows
    pieces = bool(model.get("byte_fallback"))
    for piece, number in vocab.items():
        if not isinstance(number, int) or not 0 <= number < rows:
            raise CheckpointError(f"--to gguf: the token {piece!r} has the id {number}; the model has {rows}")
        byte = pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", piece) is not None
        tokens[number], kinds[number] = piece, BYTE if byte else NORMAL
    for each in added_tokens if isinstance(added_tokens, list) else []:
        number = each.get("id") if isinstance(each, dict) else None
        if isinstance(each, dict) and isinstance(number, int) and 0 <= number < rows:
            tokens[number], kinds[number] = str(each.get("content")), CONTROL if each.get("special") else USER
            if pieces and each.get("content") == model.get("unk_token"):
                kinds[number] = UNKNOWN
    fields: dict[str, Json] = {"tokens": list(tokens), "token_type": list(kinds)}
    merges = [" ".join(map(str, each)) if isinstance(each, list) else str(each) for each in _list(model.get("merges"))]
    if pieces:
        lead = _leads_with_blank(whole, vocab)
        fields |= {"model": "llama", "scores": _scores(tokens, merges), "add_space_prefix": lead}
    else:
        fields |= {"model": "gpt2", "pre": _pre(whole, bool(model.get("ignore_merges"))), "merges": list(merges)}
    fields |= _special(whole, ids, rows)
    if UNKNOWN in kinds:
        fields["unknown_token_id"] = kinds.index(UNKNOWN)
    return {PREFIX + name: value for name, value in fields.items()}


def lost(whole: Mapping[str, Json]) -> str | None:
    """Describe the rules of added tokens that llama.cpp does not apply; None if there are none."""
    flags = {"lstrip": "strip spaces before them", "rstrip": "strip spaces after them", "single_word": "be whole words"}
    tokens = [each for each in _list(whole.get("added_tokens")) if isinstance(each, dict)]
    names = {flag: [str(each.get("content")) for each in tokens if each.get(flag)] for flag in flags}
    rules = [f"{', '.join(names[flag][:3])} {rule}" for flag, rule in flags.items() if names[flag]]
    return f"llama.cpp does not let {'; '.join(rules)}, as the tokenizer does" if rules else None


def _special(whole: Mapping[str, Json], ids: Mapping[str, Json], rows: int) -> dict[str, Json]:
    """Return the metadata for special tokens: the ids for which the embedding has a row, and which of these tokens are
    added to every text."""
    token_ids = {name: _tokens(ids.get(f"{name}_token_id"), rows) for name in ("bos", "eos", "pad")}
    fields: dict[str, Json] = {}
    for name, added_id in zip(("bos", "eos"), _added(whole), strict=True):
        if added_id is not None:
            if token_ids[name] and added_id not in token_ids[name]:
                raise CheckpointError(
                    f"--to gguf: its tokenizer adds the token {added_id}; {name}_token_id {token_ids[name]}"
                )
            token_ids[name] = [added_id, *(each for each in token_ids[name] if each != added_id)]
        fields[f"add_{name}_token"] = added_id is not None
    fields |= {f"{name}_token_id": number for name, number in zip(ENDS, token_ids["eos"], strict=False)}
    fields |= {
        f"{name}_token_id": token_ids[key][0] for name, key in (("bos", "bos"), ("padding", "pad")) if token_ids[key]
    }
    return fields


def _tokens(value: Json, rows: int) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int and 0 <= each < rows]


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[Json]:
    """Return a score for each token: the negative rank of the first merge that produces the token. A higher score means
    an earlier merge in llama.cpp."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [float(-ranks.get(token, len(merges))) for token in tokens]


def _leads_with_blank(whole: Mapping[str, Json], vocab: Mapping[str, Json]) -> bool:
    """Whether a space is added before a text. Errors: CheckpointError if the normalization does more than replace
    spaces."""
    outer, before = below(whole, "normalizer"), below(whole, "pre_tokenizer")
    steps = [each for each in _list(outer.get("normalizers")) or [outer] if isinstance(each, dict) and each]
    if not before and steps in ([_BLANKS], [_LEAD, _BLANKS]):
        return len(steps) == 2
    whole_text = before.get("split") is False or not any(BLANK in piece[1:] for piece in vocab)
    if not steps and before.get("type") == "Metaspace" and before.get("replacement") == BLANK and whole_text:
        usual = "always" if before.get("add_prefix_space", True) else "never"
        return before.get("prepend_scheme", usual) != "never"
    raise CheckpointError(
        "--to gguf: its tokenizer has byte_fallback, and its normalizer or pre_tokenizer does more to a text than "
        f"write {BLANK} for blanks, which llama.cpp does not"
    )


def _added(whole: Mapping[str, Json]) -> tuple[int | None, int | None]:
    """Return the ids of the tokens that are added before and after every text. Errors: CheckpointError if several
    tokens are added on one side."""
    outer = below(whole, "post_processor")
    before: list[int] = []
    after: list[int] = []
    for each in _list(outer.get("processors")) or [outer]:
        kind = each.get("type") if isinstance(each, dict) else None
        if kind not in (None, "ByteLevel", "TemplateProcessing"):
            raise CheckpointError(f"--to gguf: its post_processor is {kind}; valid: ByteLevel, TemplateProcessing")
        side = before
        for part in _list(each.get("single")) if isinstance(each, dict) else []:
            token = below(part, "SpecialToken").get("id")
            if token is None:
                side = after
            else:
                numbers = below(each, "special_tokens", str(token)).get("ids")
                side += [number for number in _list(numbers) if isinstance(number, int)]
    if len(before) > 1 or len(after) > 1:
        raise CheckpointError(
            f"--to gguf: its post_processor adds the tokens {before} and {after}; valid: one, and one"
        )
    return next(iter(before), None), next(iter(after), None)


PARTS = (["ByteLevel"], ["Digits", "ByteLevel"], ["Split", "ByteLevel"], ["Digits", "Split", "ByteLevel"])
"""The supported sequences of pre-tokenizer steps."""


def _pre(whole: Mapping[str, Json], ignores_merges: bool) -> str:
    """Return llama.cpp's name for the rule by which a tokenizer splits texts. Errors: CheckpointError if the rule is
    not supported."""
    outer = below(whole, "pre_tokenizer")
    steps = [each for each in _list(outer.get("pretokenizers")) or [outer] if isinstance(each, dict)]
    parts = {str(each.get("type")): each for each in steps}
    split, digits, level = (below(parts, name) for name in ("Split", "Digits", "ByteLevel"))
    pattern = below(split, "pattern").get("Regex") if split else _GPT2
    plain = not level.get("add_prefix_space") and bool(level.get("use_regex", True)) is not bool(split)
    isolated = not split or (split.get("behavior") == "Isolated" and not split.get("invert"))
    single_digits = not digits or digits.get("individual_digits") is True
    if [each.get("type") for each in steps] in PARTS and plain and isolated and single_digits:
        normalizer = whole.get("normalizer") and below(whole, "normalizer").get("type")
        for name, cut in CUTS.items():
            if cut == (pattern, bool(digits), ignores_merges, normalizer):
                return name
    raise CheckpointError(
        "--to gguf: the rule by which its tokenizer splits a text has no known name in llama.cpp "
        f"(valid: {', '.join(CUTS)})"
    )
