"""What Hugging Face's small files next to a vocabulary say of its tokens: tokenizer_config.json,
special_tokens_map.json and added_tokens.json, by the rules of transformers' AutoTokenizer.

It knows no vocabulary. Source: transformers 5, `PreTrainedTokenizerBase.from_pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mega.core.text.probe import FILE_BYTES
from mega.core.untrusted import Json, parse_json, read_limited

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens that a chat template is given, where the tokenizer has them."""

_END = "<|endoftext|>"
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "CodeLlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "GPTNeoXTokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": "<|padding|>"},
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "GemmaTokenizer": {
        **{"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
}
"""`tokenizer_class` -> the tokens that it has where no file says otherwise."""


class AddedToken(NamedTuple):
    """A token added to the vocabulary. special: raw text never becomes it. The rest as in Hugging Face's files."""

    name: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Neighbours:
    """kind: `tokenizer_class`, without Fast; None where no file says it. named: of NAMES. added: id -> token. config:
    the whole tokenizer_config.json."""

    kind: str | None
    named: Mapping[str, str]
    added: Mapping[int, AddedToken]
    config: Mapping[str, object]


def paths(vocabulary: Path) -> dict[str, Path]:
    """The files next to a vocabulary, by name."""
    found = {name: vocabulary.with_name(name) for name in (CONFIG, SPECIAL_MAP, ADDED)}
    return {name: path for name, path in found.items() if path.is_file()}


def read(files: Mapping[str, Path]) -> Neighbours:
    """Errors: ValueError naming the file."""
    config, mapped, added = (read_object(files[name]) if name in files else {} for name in (CONFIG, SPECIAL_MAP, ADDED))
    kind = config.get("tokenizer_class")
    kind = kind.removesuffix("Fast") if isinstance(kind, str) else None
    listed = config.get("added_tokens_decoder")
    whole = config if isinstance(listed, dict) else {**config, **mapped}
    named = {key: text for key, text in DEFAULTS.get(kind or "", {}).items() if key not in whole}
    named |= {key: text for key in NAMES if (text := content(whole.get(key))) is not None}
    if isinstance(listed, dict):
        return Neighbours(kind, named, dict(_listed(listed, named, files[CONFIG])), config)
    others = whole.get("additional_special_tokens") or whole.get("extra_special_tokens") or []
    others = list(others.values()) if isinstance(others, dict) else others if isinstance(others, list) else []
    special = {*named.values(), *filter(None, map(content, others))}
    return Neighbours(kind, named, dict(_older(added, special, files.get(ADDED))), config)


def _listed(found: Mapping[str, object], named: Mapping[str, str], file: Path) -> Iterator[tuple[int, AddedToken]]:
    """tokenizer_config.json's `added_tokens_decoder`."""
    for number, token in found.items():
        text = content(token)
        if not number.isdecimal() or text is None or not isinstance(token, dict):
            raise ValueError(f"--tokenizer-model: {file}: added_tokens_decoder {number[:20]!r}: must be a token's id")
        flags = {key: bool(token.get(key)) for key in ("lstrip", "rstrip", "single_word", "normalized")}
        yield int(number), AddedToken(text, bool(token.get("special")) or text in named.values(), **flags)


def _older(found: Mapping[str, object], special: set[str], file: Path | None) -> Iterator[tuple[int, AddedToken]]:
    """added_tokens.json: name -> id; which are special, other files say."""
    for name, number in found.items():
        if type(number) is not int or number < 0:
            raise ValueError(f"--tokenizer-model: {file}: {name[:40]!r}: must have an id of 0 or more")
        yield number, AddedToken(name, name in special, normalized=name not in special)


def read_object(path: Path) -> dict[str, Json]:
    """A JSON object; ValueError naming the file where it is not one."""
    what = f"--tokenizer-model: {path}"
    found = parse_json(read_limited(path, FILE_BYTES, what), what)
    if not isinstance(found, dict):
        raise ValueError(f"{what} holds no JSON object")
    return found


def prepend_scheme(config: Mapping[str, object]) -> str:
    """Where SentencePiece's blank is put in front of a text, by a tokenizer_config.json of LlamaTokenizer: before every
    text between two control tokens, before the first alone, or never."""
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") else "first"


def without_template(config: bytes) -> bytes:
    """A tokenizer_config.json without its chat template, however it was written."""
    found = parse_json(config, f"--tokenizer-model: {CONFIG}")
    if not isinstance(found, dict):
        return config
    return json.dumps({**found, "chat_template": None}, sort_keys=True).encode()


def content(token: object) -> str | None:
    """A token is written as its text or as {"content": text, ...}."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
