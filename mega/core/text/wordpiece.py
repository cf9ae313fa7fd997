"""BERT's WordPiece tokenizer, from a vocab.txt with one piece per line. The ids of words are cached.

A word is a sequence of characters without white space, or one Chinese character. All rules apply within words, so a
repeated word needs only one look-up. Names of control tokens in a text are split like other text.

By default, the rules are Google's, as in Megatron-LM. If the tokenizer_config.json of a transformers BERT is next to
vocab.txt, transformers' rules apply, with the settings in tokenizer_config.json. The tokenizer.json of a BERT can be
given instead of vocab.txt.

Sources: google-research/bert, tokenization.py; BertNormalizer of Hugging Face's tokenizers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mega.core.text.probe import FILE_BYTES
from mega.core.text.tokenizer import Roles, Tokenizer
from mega.core.text.words import WordCache
from mega.core.untrusted import Json, below, parse_json, read_limited

_CHINESE = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_HF_CHINESE = _CHINESE.replace("\U0002b820", "\U0002b920")
# Control characters at which Python's `str.split` would split a word. The rules delete these characters instead, which
# joins the words on both sides.
_JOINING = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_ASCII_CONTROLS = re.compile("[\x00-\x1f\x7f]+")
_ASCII_PARTS = re.compile("[0-9A-Za-z]+|[!-/:-@[-`{-~]")
_NAMED = ("unk", "sep", "pad", "cls", "mask")
_REQUIRED = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]")


_MANY = 1000
"""A cased vocabulary with at least this number of pieces is expected to contain capital letters."""
SETTINGS = "tokenizer_config.json"
"""Name of transformers' settings file, which may be next to vocab.txt."""


class WordRules(NamedTuple):
    """Rules for normalising a word before it is split into pieces."""

    lower: bool
    strip_accents: bool
    chinese: bool = True
    """Whether each Chinese character is a separate word."""
    transformers: bool = False
    """Whether to apply the rules of transformers' BertTokenizer instead of Google's: delete private-use characters,
    lower-case each letter separately, and limit words to 100 characters."""

    @property
    def longest(self) -> int:
        return 100 if self.transformers else 200

    def words(self) -> re.Pattern[str]:
        if not self.chinese:
            return re.compile(r"\S+")
        signs = _HF_CHINESE if self.transformers else _CHINESE
        return re.compile(rf"[{signs}]|[^\s{signs}]+")

    def cleaned(self, word: str) -> str:
        """Return `word` without control characters and, depending on the rules, in lower case and without accents."""
        dropped = ("Cc", "Cf", "Co") if self.transformers else ("Cc", "Cf")
        word = "".join(c for c in word if c != "\ufffd" and unicodedata.category(c) not in dropped)
        if self.lower and not self.transformers:
            word = word.lower()
        if self.strip_accents:
            word = "".join(c for c in unicodedata.normalize("NFD", word) if unicodedata.category(c) != "Mn")
        return "".join(c.lower() for c in word) if self.lower and self.transformers else word


class WordPieceTokenizer(Tokenizer):
    """BERT's tokenizer. If vocab.txt lacks [BOS], [EOS] or <extra_id_0> ..., these tokens are added after its last
    id."""

    bos: int
    pad: int
    eod = None

    def __init__(self, path: Path, *, lower: bool, extra_ids: int = 0) -> None:
        self.kind = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
        self._path, settings = path, path.with_name(SETTINGS)
        self._settings = settings if (configured := _settings(settings)) is not None else None
        whole = _whole_json(path) if path.suffix == ".json" else None
        if whole is not None:
            self._settings = settings if settings.is_file() else None
        if whole is not None and configured is None:
            configured, settings = _settings_of(whole, settings), path
        self._rules = _rules(configured, settings, self.kind, lower)
        self._words = self._rules.words()
        self._vocab = read_pieces(path) if whole is None else _pieces(whole)
        for name in _REQUIRED:
            if name not in self._vocab:
                raise ValueError(f"--vocab-file {path}: has no {name}, which {self.kind} needs")
        self._sentinels = sentinels = [f"<extra_id_{i}>" for i in range(extra_ids)]
        self.added_sentinels = sum(name not in self._vocab for name in sentinels)
        self.added_ends = sum(name not in self._vocab for name in ("[BOS]", "[EOS]"))
        for name in ("[BOS]", "[EOS]", *sentinels):
            self._vocab.setdefault(name, len(self._vocab))
        self._pieces = {token: piece for piece, token in self._vocab.items()}
        self._ids_of = WordCache(self._word_ids)
        token_id = self._vocab.__getitem__
        self.pad, self.bos = token_id("[PAD]"), token_id("[BOS]")
        self.roles = Roles(
            cls=token_id("[CLS]"),
            sep=token_id("[SEP]"),
            mask=token_id("[MASK]"),
            pad=self.pad,
            bos=self.bos,
            eos=token_id("[EOS]"),
            sentinels=tuple(map(token_id, sentinels)),
        )

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    def encode(self, text: str) -> list[int]:
        if _JOINING.search(text):
            text = _JOINING.sub("", text)
        ids_of = self._ids_of
        return [token for word in self._words.findall(text) for token in ids_of[word]]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids. Pieces are joined with spaces, except continuation pieces."""
        return " ".join(self._pieces[int(token)] for token in ids).replace(" ##", "")

    def continues(self, token: int) -> bool:
        return self._pieces[token].startswith("##")

    def control(self, name: str) -> int | None:
        return self._vocab.get(name)

    def special_tokens(self) -> Mapping[str, int]:
        names = (*_REQUIRED, "[BOS]", "[EOS]", *self._sentinels)
        return {name: self._vocab[name] for name in names}

    def files(self) -> Mapping[str, Path]:
        name = "vocab.txt" if self._path.suffix != ".json" else "tokenizer.json"
        return {name: self._path} | ({} if self._settings is None else {SETTINGS: self._settings})

    def vocabulary_files(self) -> Mapping[str, Path]:
        return {"vocab.txt": self._path}

    def part_for_ids(self, name: str, content: bytes) -> bytes:
        """Reduce a tokenizer.json to a vocab.txt with the same pieces."""
        if name != "vocab.txt" or self._path.suffix != ".json":
            return content
        pieces = _pieces(parse_json(content, f"--vocab-file {self._path}"))
        return "".join(f"{piece}\n" for piece in sorted(pieces, key=pieces.__getitem__)).encode()

    def doubt(self) -> str | None:
        """Return a warning if a lower-casing tokenizer has capital letters in its vocabulary, or a cased tokenizer has
        none."""
        capitals = sum(piece.lower() != piece for piece in self._vocab if not piece.startswith("["))
        if self._rules.lower and capitals > len(self._vocab) / 20:
            return f"--tokenizer {self.kind}: {capitals} pieces of {self._path} have capital letters, which no text has"
        if not self._rules.lower and not capitals and len(self._vocab) > _MANY:
            return f"--tokenizer {self.kind}: no piece of {self._path} has a capital letter: such words become [UNK]"
        return None

    def behaviour(self) -> Mapping[str, object]:
        """Return the settings that the kind of tokenizer does not imply. Google's and transformers' rules are treated
        as equal, because they differ only for characters that do not occur in normal text."""
        rules = self._rules
        usual = rules.strip_accents == rules.lower and rules.chinese
        return {} if usual else {"strip_accents": rules.strip_accents, "chinese": rules.chinese}

    def huggingface_files(self) -> Mapping[str, Mapping[str, Json]]:
        """Return the files in Hugging Face's format. do_lower_case is always included, because transformers lower-cases
        by default."""
        rules = self._rules
        settings: dict[str, Json] = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": rules.lower,
            "strip_accents": rules.strip_accents,
            "tokenize_chinese_chars": rules.chinese,
        }
        return {SETTINGS: {**settings, **{f"{name}_token": f"[{name.upper()}]" for name in _NAMED}}}

    def _word_ids(self, word: str) -> list[int]:
        """Encode a text without white space: clean and lower-case the text, split it at punctuation, and split each
        part into pieces."""
        if word.isascii():  # fast path for nearly all words
            word = _ASCII_CONTROLS.sub("", word)
            parts = _ASCII_PARTS.findall(word.lower() if self._rules.lower else word)
            return [token for part in parts for token in self._spell(part)]
        return [token for part in _parts(self._rules.cleaned(word)) for token in self._spell(part)]

    def _spell(self, word: str) -> list[int]:
        """Split a word from left to right into the longest possible pieces. Return [UNK] if this fails or the word is
        too long."""
        token_ids: list[int] = []
        start = 0
        while start < len(word) <= self._rules.longest:
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                token = self._vocab.get(prefix + word[start:end])
                if token is not None:
                    token_ids.append(token)
                    start = end
                    break
            else:
                return [self._vocab["[UNK]"]]
        return token_ids if start else [self._vocab["[UNK]"]]


def _settings(path: Path) -> Mapping[str, Json] | None:
    """Read transformers' settings for a BERT tokenizer; None if the file is missing or describes another class."""
    if not path.is_file():
        return None
    label = f"--vocab-file: {path}"
    settings = parse_json(read_limited(path, FILE_BYTES, label), label)
    if not isinstance(settings, dict):
        raise ValueError(f"{label} holds no JSON object")
    class_name = str(settings.get("tokenizer_class", "BertTokenizer"))
    return settings if "Bert" in class_name and "JapaneseTokenizer" not in class_name else None


def _whole_json(path: Path) -> dict[str, Json]:
    """Read the tokenizer.json of a BERT model. Errors: ValueError if the file is not for BERT or has different
    rules."""
    label = f"--vocab-file {path}"
    whole = parse_json(read_limited(path, FILE_BYTES, label), label)
    if not isinstance(whole, dict) or not is_bert(whole):
        raise ValueError(
            f"{label}: must be a vocab.txt, or a tokenizer.json of a BERT: WordPiece with BertNormalizer and "
            "BertPreTokenizer, ids without gaps, and no tokens but those of its vocabulary"
        )
    return whole


def _pieces(whole: Json) -> dict[str, int]:
    """Return the vocabulary of a tokenizer.json, as a map from pieces to ids."""
    return {piece: token for piece, token in below(whole, "model", "vocab").items() if isinstance(token, int)}


_PARTS = ("model", "normalizer", "pre_tokenizer")


def is_bert(whole: Mapping[str, Json]) -> bool:
    """Whether a tokenizer.json splits texts in the same way as BERT's tokenizer."""
    model, normalizer, pre = (below(whole, name) for name in _PARTS)
    vocab, added_tokens = model.get("vocab"), whole.get("added_tokens") or []
    if not isinstance(vocab, dict) or not all(type(token) is int for token in vocab.values()):
        return False
    kinds = (model.get("type"), normalizer.get("type"), pre.get("type"))
    usual = model.get("continuing_subword_prefix") == "##" and model.get("max_input_chars_per_word") == 100
    whole_range = sorted(vocab.values()) == list(range(len(vocab)))
    adds_nothing = isinstance(added_tokens, list) and all(
        isinstance(each, dict) and vocab.get(each.get("content")) == each.get("id") for each in added_tokens
    )
    return kinds == ("WordPiece", "BertNormalizer", "BertPreTokenizer") and usual and whole_range and adds_nothing


def _settings_of(whole: Mapping[str, Json], settings: Path) -> dict[str, Json]:
    """Return the settings in a tokenizer.json, under the names used in a tokenizer_config.json. Return no settings if
    the file `settings` does not exist, because transformers then uses BertTokenizer with default settings. If the file
    exists, it names a class that reads only tokenizer.json."""
    if not settings.is_file():
        return {}
    rules = below(whole, "normalizer")
    names = {"lowercase": "do_lower_case", "strip_accents": "strip_accents"}
    names["handle_chinese_chars"] = "tokenize_chinese_chars"
    return {key: rules.get(name) for name, key in names.items()}


def _rules(settings: Mapping[str, Json] | None, path: Path, kind: str, lower: bool) -> WordRules:
    """Convert settings to rules. Errors: ValueError if settings contradict the requested kind of tokenizer, or are
    malformed."""
    if settings is None:
        return WordRules(lower, lower)
    values = {name: settings.get(name) for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars")}
    for name, value in values.items():
        if value not in (None, True, False):
            raise ValueError(f"--vocab-file: {path}: {name} {value!r}: must be true or false")
    if (lowers := values["do_lower_case"] is not False) != lower:
        other_kind = "BertWordPieceLowerCase" if lowers else "BertWordPieceCase"
        raise ValueError(
            f"--tokenizer {kind}: {path} says do_lower_case {str(lowers).lower()}; give --tokenizer {other_kind}, or "
            "a copy of vocab.txt without that file"
        )
    strip = values["strip_accents"]
    return WordRules(
        lower, lower if strip is None else bool(strip), values["tokenize_chinese_chars"] is not False, True
    )


def read_pieces(path: Path) -> dict[str, int]:
    """Read a vocab.txt, and return a map from pieces to line numbers. Errors: ValueError if the file is not UTF-8 or
    repeats a piece."""
    try:
        lines = read_limited(path, FILE_BYTES, f"--vocab-file {path}").decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--vocab-file {path}: not UTF-8 ({error})") from None
    vocab: dict[str, int] = {}
    for number, line in enumerate(lines):
        if vocab.setdefault(line.strip(), number) != number:
            raise ValueError(f"--vocab-file {path}:{number + 1}: {line.strip()!r} stands on an earlier line too")
    return vocab


def _parts(word: str) -> Iterator[str]:
    """Split a word at punctuation: `don't!` -> don ' t !"""
    begin = 0
    for i, character in enumerate(word):
        if _is_punctuation(character):
            if begin < i:
                yield word[begin:i]
            yield character
            begin = i + 1
    if begin < len(word):
        yield word[begin:]


def _is_punctuation(character: str) -> bool:
    """Whether a character is Unicode punctuation, or an ASCII character other than letters, digits, spaces and control
    characters."""
    code = ord(character)
    return (
        33 <= code <= 47
        or 58 <= code <= 64
        or 91 <= code <= 96
        or 123 <= code <= 126
        or unicodedata.category(character).startswith("P")
    )
