"""Read the tokens described in the small files next to a Hugging Face vocabulary: tokenizer_config.json,
special_tokens_map.json and added_tokens.json. The rules are those of transformers' AutoTokenizer.

This module does not depend on the vocabulary. Source: transformers 5, `PreTrainedTokenizerBase.from_pretrained`.
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
"""Names of the tokens that any model may have. They are passed to chat templates as variables."""
_NAME_ENDS = "_token"
"""End of the names of tokens that only some models have, such as image_token. They are variables of templates too."""
DECODER = "added_tokens_decoder"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")

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
"""`tokenizer_class` -> default tokens of this class, which files can override."""


class AddedToken(NamedTuple):
    """A token added to the vocabulary, with the fields of Hugging Face's files."""

    name: str
    special: bool  # if True, encoding raw text never yields this token
    lstrip: bool = False  # whether the token absorbs spaces to its left
    rstrip: bool = False  # whether the token absorbs spaces to its right
    single_word: bool = False  # whether the token matches only whole words
    normalized: bool = False  # whether the token is searched for in normalised text


@dataclass(frozen=True)
class Neighbours:
    """The tokens and settings in Hugging Face's small files next to a vocabulary."""

    kind: str | None  # `tokenizer_class` without the suffix Fast; None if no file contains it
    named: Mapping[str, str]  # name, such as "bos_token" -> the token's text
    added: Mapping[int, AddedToken]  # by id
    special: tuple[AddedToken, ...]  # tokens that are special, if the vocabulary has them
    config: Mapping[str, object]  # the whole tokenizer_config.json

    @property
    def splits_special(self) -> bool:
        """Whether the names of special tokens are text wherever they occur, even in a chat template's output."""
        return self.config.get("split_special_tokens") is True

    def tokens(self, known: Mapping[str, AddedToken]) -> Iterator[AddedToken]:
        """Yield the tokens that transformers adds to a tokenizer.json, or whose flags it changes, in order. known: the
        added tokens of the tokenizer.json, by name."""
        names = set(self.named.values())
        if isinstance(self.config.get(DECODER), dict):
            listed = [token for _, token in sorted(self.added.items())]
        else:  # the flags in tokenizer.json take precedence over an added_tokens.json
            listed = [token for _, token in sorted(self.added.items()) if token.name not in known]
            listed += [token._replace(special=True) for token in known.values() if token.name in names]
        yield from listed
        old = {*known, *(token.name for token in listed)}
        yield from (token for token in self.special if token.name not in old)


def paths(vocabulary: Path) -> dict[str, Path]:
    """Return a map from name to path of the small files that exist next to a vocabulary."""
    candidates = {name: vocabulary.with_name(name) for name in (CONFIG, SPECIAL_MAP, ADDED)}
    return {name: path for name, path in candidates.items() if path.is_file()}


def read(files: Mapping[str, Path]) -> Neighbours:
    """Parse the files that `paths` returned. Errors: ValueError naming the file."""
    config, mapped, older = (read_object(files[name]) if name in files else {} for name in (CONFIG, SPECIAL_MAP, ADDED))
    kind = config.get("tokenizer_class")
    kind = kind.removesuffix("Fast") if isinstance(kind, str) else None
    decoder = config.get(DECODER)
    whole = config if isinstance(decoder, dict) else {**config, **mapped}
    named = {key: AddedToken(text, True) for key, text in DEFAULTS.get(kind or "", {}).items() if key not in whole}
    named |= {key: token for key in NAMES if (token := _special(whole.get(key))) is not None}
    extra = whole.get("additional_special_tokens") or whole.get("extra_special_tokens") or []
    own = extra if isinstance(extra, dict) else {}  # names that only this model has -> tokens
    own = {key: token for key, token in whole.items() if key.endswith(_NAME_ENDS) and key not in NAMES} | own
    named_by_model = {key: token for key, each in own.items() if (token := _special(each)) is not None}
    extra_tokens = [token for each in extra if (token := _special(each))] if isinstance(extra, list) else []
    texts = {key: token.name for key, token in (named | named_by_model).items()}
    if isinstance(decoder, dict):
        added = dict(_listed(decoder, texts, files[CONFIG]))
    else:
        special_names = {*texts.values(), *(token.name for token in extra_tokens)}
        added = dict(_older(older, special_names, files.get(ADDED)))
    special = (*named.values(), *named_by_model.values(), *extra_tokens)
    return Neighbours(kind, texts, added, special, config)


def _special(token: object) -> AddedToken | None:
    """Parse a special token, which is stored as a string or as an object with flags."""
    text = content(token)
    if text is None:
        return None
    flags = {key: bool(token.get(key)) for key in _FLAGS} if isinstance(token, dict) else {}
    return AddedToken(text, True, **flags)


def _listed(decoder: Mapping[str, object], named: Mapping[str, str], file: Path) -> Iterator[tuple[int, AddedToken]]:
    """Parse `added_tokens_decoder` of a tokenizer_config.json."""
    for number, token in decoder.items():
        text = content(token)
        if not number.isdecimal() or text is None or not isinstance(token, dict):
            raise ValueError(f"--tokenizer-model: {file}: added_tokens_decoder {number[:20]!r}: must be a token's id")
        flags = {key: bool(token.get(key)) for key in _FLAGS}
        yield int(number), AddedToken(text, bool(token.get("special")) or text in named.values(), **flags)


def _older(ids: Mapping[str, object], special: set[str], file: Path | None) -> Iterator[tuple[int, AddedToken]]:
    """Parse added_tokens.json (name -> id). special: the tokens that other files list as special."""
    for name, number in ids.items():
        if type(number) is not int or number < 0:
            raise ValueError(f"--tokenizer-model: {file}: {name[:40]!r}: must have an id of 0 or more")
        yield number, AddedToken(name, name in special, normalized=name not in special)


def read_object(path: Path) -> dict[str, Json]:
    """Read a JSON object. Errors: ValueError naming the file."""
    label = f"--tokenizer-model: {path}"
    parsed = parse_json(read_limited(path, FILE_BYTES, label), label)
    if not isinstance(parsed, dict):
        raise ValueError(f"{label} holds no JSON object")
    return parsed


def prepend_scheme(config: Mapping[str, object]) -> str:
    """Return where a LlamaTokenizer with the given tokenizer_config.json prepends SentencePiece's space: "always" for
    every text between control tokens, "first" for only the first text, or "never"."""
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") else "first"


def spaces(scheme: str) -> dict[str, Json]:
    """Return the entries of a tokenizer.json with which transformers' class prepends a space. scheme: as of
    `prepend_scheme`."""
    rule: Json = {"type": "Metaspace", "replacement": "\u2581", "split": False, "prepend_scheme": scheme}
    return {"normalizer": None, "pre_tokenizer": rule}


def without_template(config: bytes) -> bytes:
    """Return the content of a tokenizer_config.json without its chat template, in canonical JSON."""
    parsed = parse_json(config, f"--tokenizer-model: {CONFIG}")
    if not isinstance(parsed, dict):
        return config
    return json.dumps({**parsed, "chat_template": None}, sort_keys=True).encode()


def content(token: object) -> str | None:
    """Return the text of a token. The token is stored as a string or as {"content": text, ...}."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
