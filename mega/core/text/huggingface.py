"""Vocabularies in Hugging Face's tokenizer.json, read by the `tokenizers` library.

The file's own template applies (Llama-3's puts bos in front), as in Megatron-LM. Its *special* added tokens
are not looked for in text; its other added tokens are part of the vocabulary and are.

A text in which tokens stand by name (`parse`) has the ids that transformers' AutoTokenizer gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega.core.text import neighbours
from mega.core.text.gpt2 import byte_letters
from mega.core.text.neighbours import AddedToken, prepend_scheme
from mega.core.text.probe import check, hugging_face
from mega.core.text.sentencepiece_json import unreachable
from mega.core.text.special import Parsed, Span, sections
from mega.core.text.tokenizer import Encoded, Tokenizer, flatten, library_errors
from mega.core.untrusted import Json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

# Names of the end of a text, where no file next to tokenizer.json names it.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
_STARTS = ("<|begin_of_text|>", "<s>", "<bos>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NEIGHBOURS = (neighbours.CONFIG, neighbours.SPECIAL_MAP)
_METASPACE = ("LlamaTokenizer", "CodeLlamaTokenizer")
"""Classes of transformers that split text by SentencePiece's rule for blanks, also with a BPE tokenizer.json."""
_STANDS_FOR = [chr(0xFDD8 + number) for number in range(4)]
"""Characters that stand for a token: one for each way in which it takes the blanks around it."""


class HuggingFaceTokenizer(Tokenizer):
    """Any tokenizer.json. eod, bos and pad come from tokenizer_config.json next to it, or are well-known names."""

    kind = "HuggingFaceTokenizer"

    def __init__(self, path: Path) -> None:
        check("tokenizers", path)
        with library_errors(f"--tokenizer-model {path}: not a tokenizer.json"):
            self._library = hugging_face(path)
        self._path = path
        self._refused = f"--tokenizer-model {path}: fails on what it is to encode or decode"
        near = neighbours.paths(path)
        self._said = neighbours.read(near)
        self._files = {name: near[name] for name in _NEIGHBOURS if name in near}
        if self._add_missing():
            self._files |= near
        self._files["tokenizer.json"] = path
        self.eod = self._named("eos_token", _ENDS)
        self.bos = self._named("bos_token", _STARTS)
        self.pad = self._named("pad_token", ())

    def _add_missing(self) -> bool:
        """Give the library the tokens that only the files next to tokenizer.json have, as transformers does. Whether
        any of them has an id of its own."""
        from tokenizers import AddedToken as Added

        known = {added.content for added in self._library.get_added_tokens_decoder().values()}
        found = [token for _, token in sorted(self._said.added.items())]
        found += [AddedToken(name, special=True) for name in self._said.named.values()]
        missing = [token for token in dict.fromkeys(found) if token.name not in known]
        size = self._library.get_vocab_size()
        for token in {each.name: each for each in reversed(missing)}.values():
            if self._library.token_to_id(token.name) is None and token not in self._said.added.values():
                continue  # a name of a token that the vocabulary lacks, and no file gives an id
            flags = token._asdict() | {"content": token.name}
            del flags["name"]
            self._library.add_tokens([Added(**flags)])
        return bool(self._library.get_vocab_size() > size)

    def _named(self, key: str, well_known: Sequence[str]) -> int | None:
        """The id of the token that a neighbour file calls `key`, else of the first known name."""
        said = [
            neighbours.content(neighbours.read_object(self._files[name]).get(key))
            for name in _NEIGHBOURS
            if name in self._files
        ]
        names = [name for name in said if name] or well_known
        ids = [self._library.token_to_id(name) for name in names]
        return next((token for token in ids if token is not None), None)

    @property
    def vocab_size(self) -> int:
        """One above the largest id: a vocabulary with holes still needs a row for each id."""
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        return max(vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        with library_errors(self._refused):
            ids: list[int] = self._ordinary.encode(text).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        with library_errors(self._refused):
            found = self._ordinary.encode_batch_fast(list(texts))
        return flatten([encoding.ids for encoding in found])

    @cached_property
    def _ordinary(self) -> Library:
        """The library for raw text. A unigram model finds its special tokens in text, as pieces: for text they have
        other names."""
        whole = json.loads(self._library.to_str())
        if whole["model"].get("type") != "Unigram":
            return self._library
        from tokenizers import Tokenizer as Library

        whole["model"]["vocab"] = unreachable(whole["model"]["vocab"], self._special)
        whole["added_tokens"] = [each for each in whole["added_tokens"] if not each["special"]]
        found = Library.from_str(json.dumps(whole))
        found.encode_special_tokens = True
        return found

    def decode(self, ids: Iterable[int]) -> str:
        with library_errors(self._refused):
            return str(self._library.decode([int(token) for token in ids], skip_special_tokens=False))

    def control(self, name: str) -> int | None:
        found: int | None = self._library.token_to_id(name)
        return found

    def token_bytes(self, token: int) -> bytes:
        piece = self._library.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        if self._byte_letters:
            return b"".join(self._byte_letters.get(letter) or letter.encode() for letter in piece)
        if _BYTE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode()

    @cached_property
    def _special(self) -> set[int]:
        return {token for token, added in self._added.items() if added.special}

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(self._library.get_added_tokens_decoder())

    @cached_property
    def _byte_letters(self) -> dict[str, bytes]:
        """Letter -> byte where the vocabulary spells bytes as letters, as GPT-2's; else empty."""
        spells = '"ByteLevel"' in json.dumps(json.loads(self._library.to_str()).get("decoder"))
        return {letter: bytes([byte]) for byte, letter in byte_letters().items()} if spells else {}

    # --- tokens by name -----------------------------------------------------------------------------------------------

    def special_tokens(self) -> Mapping[str, int]:
        return self._by_name[True]

    def vocabulary_tokens(self) -> Mapping[str, int]:
        return self._by_name[False]

    @cached_property
    def _by_name(self) -> dict[bool, dict[str, int]]:
        """Whether they are special -> the added tokens' names -> ids."""
        found: dict[bool, dict[str, int]] = {True: {}, False: {}}
        for token, added in self._added.items():
            found[added.special][added.content] = token
        return found

    def named_tokens(self) -> Mapping[str, str]:
        return self._said.named

    def parse(self, text: str, literal: Sequence[Span] = ()) -> Parsed:
        """The library's own ids of the whole text. Where a part of it is literal, tokens are replaced by characters
        that stand for them; what that gives without literal parts must be the same."""
        with library_errors(self._refused):
            whole = self._parser.encode(text, add_special_tokens=False)
        if not literal:
            return Parsed(whole.ids, whole.offsets)
        if self._replaced(text, ()).ids != whole.ids:
            raise ValueError(
                "the text between its control tokens has other ids by itself than in the whole text, so that a message "
                "that spells a control token cannot be kept as text"
            )
        return self._replaced(text, literal)

    def encode_special(self, text: str) -> list[int]:
        with library_errors(self._refused):
            ids: list[int] = self._parser.encode(text).ids
        return ids

    def located(self, text: str, special: bool = False) -> list[Span] | None:
        with library_errors(self._refused):
            found = (self._parser if special else self._ordinary).encode(text)
        tokens = zip(found.offsets, found.special_tokens_mask, strict=True)
        spans, at = list[Span](), 0
        for span, put in tokens:
            spans.append((at, at) if put and span == (0, 0) else span)
            at = max(at, spans[-1][1])
        return spans

    @cached_property
    def _parser(self) -> Library:
        """The library, set to look for all added tokens, and to cut texts as transformers' class does."""
        from tokenizers import Tokenizer as Library

        whole = json.loads(self._library.to_str())
        steps = json.dumps([whole.get("pre_tokenizer"), whole.get("decoder")])
        if self._said.kind in _METASPACE and whole["model"].get("type") == "BPE" and '"ByteLevel"' not in steps:
            scheme = prepend_scheme(self._said.config)
            whole["normalizer"] = None
            whole["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "split": False}
            whole["pre_tokenizer"]["prepend_scheme"] = scheme
            whole["model"] |= {"unk_token": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
        return Library.from_str(json.dumps(whole))

    @cached_property
    def _nameless(self) -> Library:
        """The same without added tokens, but for the characters that stand for them."""
        from tokenizers import AddedToken as Added
        from tokenizers import Tokenizer as Library

        whole = json.loads(self._parser.to_str())
        whole |= {"added_tokens": [], "post_processor": None}
        if whole["model"].get("type") == "Unigram":
            whole["model"]["vocab"] = unreachable(whole["model"]["vocab"], self._special)
        library = Library.from_str(json.dumps(whole))
        for number, character in enumerate(_STANDS_FOR):
            flags = {"lstrip": bool(number & 1), "rstrip": bool(number & 2), "normalized": False, "special": True}
            library.add_tokens([Added(character, **flags)])
        return library

    def _replaced(self, text: str, literal: Sequence[Span]) -> Parsed:
        """`text` with a character for each added token outside of `literal`, and their ids put in afterwards."""
        if any(character in text for character in _STANDS_FOR):
            raise ValueError("a text of the conversation holds one of U+FDD8 .. U+FDDB, which no text should")
        named = {added.content: (token, added) for token, added in self._added.items()}
        shown, origin, ids = "", list[Span](), list[int]()
        for name, begin, end in sections(text, named, literal):
            if name is None:
                shown += text[begin:end]
                origin += [(at, at + 1) for at in range(begin, end)]
                continue
            token, added = named[name]
            shown += _STANDS_FOR[added.lstrip + 2 * added.rstrip]
            origin.append((begin, end))
            ids.append(token)
        with library_errors(self._refused):
            found = self._nameless.encode(shown, add_special_tokens=False)
        stands = {self._nameless.token_to_id(character) for character in _STANDS_FOR}
        rest = iter(ids)
        made = [next(rest) if token in stands else token for token in found.ids]
        spans = [(origin[a][0], origin[b - 1][1]) if b > a else (a, a) for a, b in found.offsets]
        return Parsed(made, spans)

    # --- files --------------------------------------------------------------------------------------------------------

    def files(self) -> Mapping[str, Path]:
        return dict(self._files)

    def part_for_ids(self, name: str, content: bytes) -> bytes:
        return neighbours.without_template(content) if name == neighbours.CONFIG else content

    def huggingface_files(self) -> dict[str, dict[str, Json]]:
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        named = {key: self._library.id_to_token(token) for key, token in ids.items() if token is not None}
        return {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named}}
