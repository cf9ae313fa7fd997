"""Tokenizers from Hugging Face's tokenizer.json, which is read by the `tokenizers` library.

The post-processing template in the file is applied, as in Megatron-LM; for example, Llama-3's template prepends bos.
*Special* added tokens are not recognised in a text, but other added tokens are.

`parse` encodes a text with control tokens to the same ids as transformers' AutoTokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mega.core.text import neighbours
from mega.core.text.gpt2 import byte_letters
from mega.core.text.neighbours import AddedToken, prepend_scheme, spaces
from mega.core.text.normalization import losses_of
from mega.core.text.probe import check, hugging_face
from mega.core.text.sentencepiece_json import hidden, unreachable
from mega.core.text.special import Parsed, Span, sections
from mega.core.text.tokenizer import Encoded, Tokenizer, flatten, library_errors
from mega.core.untrusted import Json

if TYPE_CHECKING:
    from tokenizers import AddedToken as LibraryToken
    from tokenizers import Tokenizer as Library

# Names of the tokens for the end and the beginning of a text, used if no file next to tokenizer.json specifies these
# tokens.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
_STARTS = ("<|begin_of_text|>", "<s>", "<bos>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NEIGHBOURS = (neighbours.CONFIG, neighbours.SPECIAL_MAP)
_METASPACE = ("LlamaTokenizer", "CodeLlamaTokenizer")
"""Classes in transformers that apply SentencePiece's rules for spaces even to a BPE tokenizer.json."""
_BYTE_LEVEL = ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer")
"""Classes in transformers that prepend a space to a text only if tokenizer_config.json has add_prefix_space. They
ignore the setting in tokenizer.json."""
_STANDS_FOR = [chr(0xFDD8 + number) for number in range(4)]
"""Placeholder characters for tokens, one for each combination of lstrip and rstrip."""


def _plain(token: LibraryToken) -> AddedToken:
    """Convert an added token of the library."""
    flags = {key: bool(getattr(token, key)) for key in AddedToken._fields[1:]}
    return AddedToken(str(token.content), **flags)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer from any tokenizer.json. eod, bos and pad are specified in a tokenizer_config.json next to
    tokenizer.json, else found by well-known names."""

    kind = "HuggingFaceTokenizer"

    def __init__(self, path: Path) -> None:
        check("tokenizers", path)
        with library_errors(f"--tokenizer-model {path}: not a tokenizer.json"):
            self._library = hugging_face(path)
        self._path = path
        self._refused = f"--tokenizer-model {path}: fails on what it is to encode or decode"
        files_beside = neighbours.paths(path)
        self._said = neighbours.read(files_beside)
        self._files = {name: files_beside[name] for name in _NEIGHBOURS if name in files_beside}
        self._prefixed = self._set_prefix()
        self._changed, self._new_ids = self._add_missing()
        if self._new_ids:
            self._files |= files_beside
        self._files["tokenizer.json"] = path
        self.eod = self._named("eos_token", _ENDS)
        self.bos = self._named("bos_token", _STARTS)
        self.pad = self._named("pad_token", ())

    def _set_prefix(self) -> bool | None:
        """Set whether the library prepends a space to each text, as transformers' class does. Return None if nothing
        has changed."""
        from tokenizers import Tokenizer as Library

        if self._said.kind not in _BYTE_LEVEL or self._library.pre_tokenizer is None:
            return None
        prefixed = bool(self._said.config.get("add_prefix_space"))
        rule = json.loads(self._library.pre_tokenizer.__getstate__())
        steps = [step for step in (rule, *rule.get("pretokenizers", ())) if step.get("type") == "ByteLevel"]
        if all(step.get("add_prefix_space") is prefixed for step in steps):
            return None
        for step in steps:
            step["add_prefix_space"] = prefixed
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        self._library.pre_tokenizer = Library.from_str(
            json.dumps({"version": "1.0", "model": empty, "pre_tokenizer": rule})
        ).pre_tokenizer
        return prefixed

    def _add_missing(self) -> tuple[list[AddedToken], int]:
        """Add the tokens of the files next to tokenizer.json, with the flags in these files, as transformers does.
        Return (the tokens that were added or changed, the number of new ids)."""
        from tokenizers import AddedToken as Added

        known = {each.content: _plain(each) for each in self._library.get_added_tokens_decoder().values()}
        size, listed = self._library.get_vocab_size(), {each.name for each in self._said.added.values()}
        changed: list[AddedToken] = []
        for token in self._said.tokens(dict(known)):
            if self._library.token_to_id(token.name) is None and token.name not in listed:
                continue  # neither the vocabulary nor a file contains an id for the token
            if known.get(token.name) != token:
                known[token.name] = token
                changed.append(token)
                flags = token._asdict() | {"content": token.name}
                del flags["name"]
                self._library.add_tokens([Added(**flags)])
        return changed, int(self._library.get_vocab_size()) - size

    def _named(self, key: str, well_known: Sequence[str]) -> int | None:
        """Return the id of the token under `key` in a file next to the vocabulary, else the id of the first well-known
        name in the vocabulary."""
        names_in_files = [
            neighbours.content(neighbours.read_object(self._files[name]).get(key))
            for name in _NEIGHBOURS
            if name in self._files
        ]
        return self._first([name for name in names_in_files if name] or well_known)

    def _first(self, names: Sequence[str]) -> int | None:
        """Return the id of the first of `names` that is in the vocabulary."""
        ids = (self._library.token_to_id(name) for name in names)
        return next((token for token in ids if token is not None), None)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one. The embedding needs a row for each id, even if some ids are unused."""
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        return max(vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        with library_errors(self._refused):
            ids: list[int] = self._ordinary.encode(text).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        with library_errors(self._refused):
            encodings = self._ordinary.encode_batch_fast(list(texts))
        return flatten([encoding.ids for encoding in encodings])

    @cached_property
    def _ordinary(self) -> Library:
        """The library's tokenizer for raw text. A unigram model recognises special tokens as pieces of a text, so the
        special tokens are renamed in this copy."""
        from tokenizers import Tokenizer as Library

        if self._metaspace_scheme() == "never":  # tokenizer.json may prepend a space
            library = Library.from_str(self._parser.to_str())
            library.encode_special_tokens = True
            return library
        whole = json.loads(self._library.to_str())
        if whole["model"].get("type") != "Unigram":
            return self._library

        whole["model"]["vocab"] = unreachable(whole["model"]["vocab"], self._special)
        for added_token in whole["added_tokens"]:  # none is left out, because the library numbers them in order
            if added_token["special"]:
                added_token["content"] = hidden(added_token["content"])
        library = Library.from_str(json.dumps(whole))
        library.encode_special_tokens = True
        return library

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids. Of tokens that stand for bytes, only the bytes that are not UTF-8 become U+FFFD; transformers
        replaces all adjacent bytes, so that an incomplete character also destroys the characters before it."""
        tokens = [int(token) for token in ids]
        with library_errors(self._refused):
            if (names := self._names_of_broken(tokens)) is not None:
                return str(self._decoder.decoder.decode(names))
            return str(self._decoder.decode(tokens, skip_special_tokens=False))

    def _names_of_broken(self, tokens: list[int]) -> list[str] | None:
        """Return the names of tokens, with U+FFFD instead of each byte that is not UTF-8; None if all bytes are."""
        names, is_broken, table = list[str](), False, self._byte_tokens
        for is_byte, run in groupby(tokens, key=table.__contains__):
            if not is_byte:
                names += filter(None, map(self._decoder.id_to_token, run))
                continue
            for letter in bytes(map(table.__getitem__, run)).decode(errors="surrogateescape"):
                is_escaped = "\udc80" <= letter <= "\udcff"  # a byte that is not UTF-8
                names += ["\ufffd"] if is_escaped else [f"<0x{byte:02X}>" for byte in letter.encode()]
                is_broken |= is_escaped
        return names if is_broken else None

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        """Return a map from the tokens that stand for a byte to this byte; empty if the decoder does not know any."""
        if '"ByteFallback"' not in json.dumps(json.loads(self._library.to_str()).get("decoder")):
            return {}
        ids = {byte: self._library.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        return {token: byte for byte, token in ids.items() if token is not None}

    @cached_property
    def _decoder(self) -> Library:
        """The library's tokenizer that decodes. The library normalises added tokens that it decodes, and transformers'
        class may have another normalizer than the file."""
        return self._parser if self._said.kind in _METASPACE else self._library

    def control(self, name: str) -> int | None:
        token_id: int | None = self._library.token_to_id(name)
        return token_id

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
        return {token for token, added_token in self._added.items() if added_token.special}

    @cached_property
    def _added(self) -> dict[int, LibraryToken]:
        return dict(self._library.get_added_tokens_decoder())

    @cached_property
    def _byte_letters(self) -> dict[str, bytes]:
        """Return a map from letters to bytes if the vocabulary represents bytes by letters, as GPT-2's does; else an
        empty map."""
        spells = '"ByteLevel"' in json.dumps(json.loads(self._library.to_str()).get("decoder"))
        return {letter: bytes([byte]) for byte, letter in byte_letters().items()} if spells else {}

    # --- tokens by name -----------------------------------------------------------------------------------------------

    def special_tokens(self) -> Mapping[str, int]:
        return {} if self._said.splits_special else self._by_name[True]

    def vocabulary_tokens(self) -> Mapping[str, int]:
        return self._by_name[False]

    @cached_property
    def _by_name(self) -> dict[bool, dict[str, int]]:
        """Return two maps from the names of added tokens to their ids: under the key True for special tokens, and under
        False for all others."""
        ids_by_name: dict[bool, dict[str, int]] = {True: {}, False: {}}
        for token, added_token in self._added.items():
            ids_by_name[added_token.special][added_token.content] = token
        return ids_by_name

    def named_tokens(self) -> Mapping[str, str]:
        return self._said.named

    def parse(self, text: str, literal: Sequence[Span] = ()) -> Parsed:
        """Encode the whole text with the library. If `literal` is not empty, added tokens outside the literal spans are
        first replaced with placeholder characters. Errors: ValueError if the placeholders change the ids of other
        text."""
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
            encoding = (self._parser if special else self._ordinary).encode(text)
        tokens = zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        spans, reached = list[Span](), 0
        for span, is_added in tokens:
            spans.append((reached, reached) if is_added and span == (0, 0) else span)
            reached = max(reached, spans[-1][1])
        return spans

    @cached_property
    def _parser(self) -> Library:
        """The library's tokenizer, configured to recognise added tokens and to split texts as transformers' tokenizer
        class does."""
        from tokenizers import Tokenizer as Library

        whole = json.loads(self._library.to_str())
        if (scheme := self._metaspace_scheme()) is not None:
            whole |= spaces(scheme)
            if scheme == "never" and isinstance(whole["decoder"], dict):
                steps = [step for step in whole["decoder"].get("decoders", ()) if step.get("type") != "Strip"]
                whole["decoder"] |= {"decoders": steps} if steps else {}
            whole["model"] |= {"unk_token": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
        library = Library.from_str(json.dumps(whole))
        library.encode_special_tokens = self._said.splits_special
        return library

    def as_earlier(self) -> bool:
        """Earlier versions numbered several new tokens in the wrong order, and the added tokens of a unigram model
        without its special ones. They did not read add_prefix_space."""
        if self._prefixed is not None or self._metaspace_scheme() == "never":
            return False
        after_special = [token for token, added_token in sorted(self._added.items()) if not added_token.special]
        pieces = self._library.get_vocab_size(with_added_tokens=False)
        shifted = any(pieces <= token < last for token in self._special for last in after_special)
        return self._new_ids < 2 and not (shifted and self._ordinary is not self._library)

    def _metaspace_scheme(self) -> str | None:
        """Return where transformers' class prepends a space to the text between control tokens, instead of following
        tokenizer.json; None if it follows tokenizer.json."""
        if self._said.kind not in _METASPACE:
            return None
        whole = json.loads(self._library.to_str())
        steps = json.dumps([whole.get("pre_tokenizer"), whole.get("decoder")])
        if whole["model"].get("type") != "BPE" or '"ByteLevel"' in steps:
            return None
        return prepend_scheme(self._said.config)

    @cached_property
    def _nameless(self) -> Library:
        """The tokenizer of `_parser`, with placeholder characters instead of the added tokens."""
        from tokenizers import AddedToken as Added
        from tokenizers import Tokenizer as Library

        whole = json.loads(self._parser.to_str())
        whole |= {"added_tokens": [], "post_processor": None}
        if whole["model"].get("type") == "Unigram" and not self._said.splits_special:
            whole["model"]["vocab"] = unreachable(whole["model"]["vocab"], self._special)
        library = Library.from_str(json.dumps(whole))
        for number, character in enumerate(_STANDS_FOR):
            flags = {"lstrip": bool(number & 1), "rstrip": bool(number & 2), "normalized": False, "special": True}
            library.add_tokens([Added(character, **flags)])
        return library

    def _replaced(self, text: str, literal: Sequence[Span]) -> Parsed:
        """Replace each added token outside of `literal` with a placeholder, encode the text, and insert the ids of the
        tokens."""
        if any(character in text for character in _STANDS_FOR):
            raise ValueError("a text of the conversation holds one of U+FDD8 .. U+FDDB, which no text should")
        tokens_by_name = {
            added_token.content: (token, added_token)
            for token, added_token in self._added.items()
            if not (added_token.special and self._said.splits_special)
        }
        placeholder_text, origin, ids = "", list[Span](), list[int]()
        for name, begin, end in sections(text, tokens_by_name, literal):
            if name is None:
                placeholder_text += text[begin:end]
                origin += [(position, position + 1) for position in range(begin, end)]
                continue
            token, added_token = tokens_by_name[name]
            placeholder_text += _STANDS_FOR[added_token.lstrip + 2 * added_token.rstrip]
            origin.append((begin, end))
            ids.append(token)
        with library_errors(self._refused):
            encoding = self._nameless.encode(placeholder_text, add_special_tokens=False)
        placeholder_ids = {self._nameless.token_to_id(character) for character in _STANDS_FOR}
        rest = iter(ids)
        restored_ids = [next(rest) if token in placeholder_ids else token for token in encoding.ids]
        spans = [(origin[a][0], origin[b - 1][1]) if b > a else (a, a) for a, b in encoding.offsets]
        return Parsed(restored_ids, spans)

    def text_loss(self) -> str | None:
        normalizer = self._library.normalizer
        if normalizer is None:
            return None
        losses = losses_of(lambda text: str(normalizer.normalize_str(text)).replace("\u2581", " "))
        return f"tokenizer.json changes texts by its normalizer: {'; '.join(losses)}" if losses else None

    # --- files --------------------------------------------------------------------------------------------------------

    def files(self) -> Mapping[str, Path]:
        return dict(self._files)

    def vocabulary_files(self) -> Mapping[str, Path]:
        return {"tokenizer.json": self._path}

    def part_for_ids(self, name: str, content: bytes) -> bytes:
        return neighbours.without_template(content) if name == neighbours.CONFIG else content

    def behaviour(self) -> Mapping[str, object]:
        """Return what the files next to tokenizer.json change: the tokens that begin, end and pad a text, added tokens,
        the rule for spaces between control tokens, and whether names of special tokens are text."""
        ends = {"bos": (self.bos, _STARTS), "eos": (self.eod, _ENDS), "pad": (self.pad, ())}
        changes: dict[str, object] = {
            name: token for name, (token, well_known) in ends.items() if token != self._first(well_known)
        }
        if self._changed:
            changes["added"] = [list(token) for token in self._changed]
        if (scheme := self._metaspace_scheme()) is not None:
            changes["metaspace"] = scheme
        if self._prefixed is not None:
            changes["prefix"] = self._prefixed
        if self._said.splits_special:
            changes["split"] = True
        return changes

    def single_file(self) -> dict[str, Json]:
        whole: dict[str, Json] = json.loads(self._library.to_str())
        return whole | (spaces("never") if self._metaspace_scheme() == "never" else {})

    def huggingface_files(self) -> dict[str, dict[str, Json]]:
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        token_names = {key: self._library.id_to_token(token) for key, token in ids.items() if token is not None}
        return {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **token_names}}
