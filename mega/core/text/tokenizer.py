"""The interface of a tokenizer.

This module does not depend on token files or models; the vocabulary is padded by the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.text.special import Parsed, Span, aligned, sections
from mega.core.untrusted import Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


NAMELESS_END = "<|endoftext|>"
"""Name of the end of a document in a template's text, for tokenizers whose end token has no name."""


class Encoded(NamedTuple):
    """The ids of many texts in one array, as a token file stores them.

    ids: integers of any width, concatenated; offsets: int64 [texts + 1]. Text i has the ids
    `ids[offsets[i] : offsets[i + 1]]`.
    """

    ids: NDArray[np.integer]
    offsets: NDArray[np.int64]


class Roles(NamedTuple):
    """Ids of the tokens that BERT and T5 samples contain."""

    cls: int
    sep: int
    mask: int
    pad: int
    bos: int
    eos: int
    sentinels: tuple[int, ...]  # <extra_id_0>, <extra_id_1> ...


class TokenizerIdentity(NamedTuple):
    """Identifies the tokenizer that made some ids. The identity is stored with the ids."""

    kind: str
    vocab_size: int
    fingerprint: str

    @classmethod
    def read(cls, noted: object) -> TokenizerIdentity | None:
        """Parse the result of `_asdict`; None if the value is damaged, or from a later version with different
        fields."""
        fields = noted if isinstance(noted, dict) else {}
        kind, size, fingerprint = (fields.get(name) for name in cls._fields)
        if isinstance(kind, str) and isinstance(size, int) and isinstance(fingerprint, str):
            return cls(kind, size, fingerprint)
        return None

    def __str__(self) -> str:
        return f"{self.kind} of {self.vocab_size} entries ({self.fingerprint[:12]})"


class TokenTable(Protocol):
    """The ids of a tokenizer: how many there are, the text of each, and which of them are control tokens."""

    kind: str
    eod: int | None  # id that ends a document; None if the family has no such token
    bos: int | None
    pad: int | None
    roles: Roles | None = None  # only in families that can train BERT and T5
    added_sentinels: int = 0  # number of sentinels appended to the vocabulary; no text encodes to a sentinel
    added_ends: int = 0  # number of T5's begin and end tokens added before the sentinels, if the file lacks them

    @property
    def vocab_size(self) -> int:
        """The true size, without padding: ids run from 0 to vocab_size - 1."""
        ...

    @property
    def start(self) -> int | None:
        """The token that precedes a text at the beginning of the input; None if the family has no such token."""
        return self.eod if self.bos is None else self.bos

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; bytes that are not UTF-8 become U+FFFD."""
        ...

    def piece(self, token: int) -> str:
        """The text of one token for display, with control tokens by name."""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text, perhaps part of a character; empty for a control token."""
        return self.decode([token]).encode()

    def continues(self, token: int) -> bool:
        """Whether a token continues the previous word, so that whole-word masking masks both tokens."""
        return False

    def control(self, name: str) -> int | None:
        """The id of a control token by its name, such as <|eot_id|>; None if the tokenizer lacks it."""
        return None

    def special_tokens(self) -> Mapping[str, int]:
        """Name -> id of all special tokens. Raw text never encodes to one of them."""
        ids = (token for token in (self.bos, self.eod, self.pad) if token is not None)
        names = {name: token for token in ids if self.control(name := self.piece(token)) == token}
        return names if self.eod is None or self.eod in names.values() else {**names, NAMELESS_END: self.eod}

    def vocabulary_tokens(self) -> Mapping[str, int]:
        """Name -> id of the added tokens that are recognised even in raw text, such as `<think>` in some models."""
        return {}

    def named_tokens(self) -> Mapping[str, str]:
        """Variables of a chat template: `bos_token`, `eos_token` and other keys of Hugging Face -> the token's name."""
        names = {token: name for name, token in self.special_tokens().items()}
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        return {key: names[token] for key, token in ids.items() if token in names}

    def special_ids(self) -> dict[str, int | None]:
        """Entries of Hugging Face's config.json for the tokens that begin, end and pad a text; None for missing ones.

        In a family without a begin token, such as GPT-2, the end of the previous document begins a text.
        """
        begin = self.eod if self.bos is None else self.bos
        return {"bos_token_id": begin, "eos_token_id": self.eod, "pad_token_id": self.pad}


class TextEncoder(TokenTable, Protocol):
    """Encode text to ids, and locate each id in the text.

    Raw text takes the *ordinary* path in every family: `<|endoftext|>` or `</s>` inside a document is split like any
    other text and never becomes a control token. Tokens that a family adds to each text (Llama's bos) are part of
    `encode`.
    """

    def encode(self, text: str) -> list[int]:
        """Encode one text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode many texts. The ids of each text are the same as from `encode`, but computed faster."""
        return flatten([self.encode(text) for text in texts])

    def parse(self, text: str, literal: Sequence[Span] = ()) -> Parsed:
        """Encode a text that spells control tokens by name, without tokens in front of it. literal: spans of characters
        that are text even if they spell a control token. Adjacent texts are encoded as one piece."""
        names, ids, spans = {**self.vocabulary_tokens(), **self.special_tokens()}, list[int](), list[Span]()
        has_spans = True
        for name, begin, end in sections(text, names, literal):
            parsed = Parsed([names[name]], [(0, end - begin)]) if name else self.section(text[begin:end], begin == 0)
            ids += parsed.ids
            spans += [(begin + first, begin + last) for first, last in parsed.spans or ()]
            has_spans = has_spans and parsed.spans is not None
        return Parsed(ids, spans if has_spans else None)

    def encode_special(self, text: str) -> list[int]:
        """Encode one text that spells special tokens by name, with the tokens that the family adds to each text."""
        return [*self.encode(""), *self.parse(text).ids]

    def located(self, text: str, special: bool = False) -> list[Span] | None:
        """The span of characters of each id of `encode`, or of `encode_special`; tokens that the family adds have an
        empty span. None if the family cannot determine spans."""
        lead: list[Span] = [(0, 0)] * len(self.encode(""))
        spans = self.parse(text).spans if special else self.spans_of(text, self.encode(text)[len(lead) :])
        return None if spans is None else lead + spans

    def spans_of(self, text: str, ids: Sequence[int]) -> list[Span] | None:
        """The span of characters of each id of raw text; None if the family cannot determine spans."""
        return aligned(text, [self.token_bytes(token) for token in ids])

    def section(self, text: str, first: bool) -> Parsed:
        """Encode raw text between two tokens that are spelled by name; first: the text is the first section."""
        ids = self.encode(text)[len(self.encode("")) :]
        return Parsed(ids, self.spans_of(text, ids))


class Tokenizer(TextEncoder, Protocol):
    """A text encoder together with its files: what identifies it, and how other libraries open it."""

    def huggingface_files(self) -> Mapping[str, Mapping[str, Json]]:
        """File name -> the file's JSON. transformers' AutoTokenizer needs these files, in addition to `files`, to
        open the tokenizer."""
        return {}

    def unpublished(self) -> str | None:
        """The reason why transformers has no equivalent, in which case an export omits the tokenizer's files; else
        None."""
        return None

    def doubt(self) -> str | None:
        """A warning if the files may belong to another kind of tokenizer; else None."""
        return None

    def publishing_loss(self) -> str | None:
        """A description of what transformers does differently with the exported files; None if all ids are equal."""
        return None

    def files(self) -> Mapping[str, Path]:
        """Canonical name -> path of every file that this tokenizer was read from; a checkpoint copies them."""
        ...

    def vocabulary_files(self) -> Mapping[str, Path]:
        """The members of `files` whose bytes decide the ids of a text."""
        return self.files()

    def behaviour(self) -> Mapping[str, object]:
        """Values for JSON, in addition to `vocabulary_files` and `kind`, that decide the ids of a text."""
        return {}

    def fingerprint(self) -> str:
        """sha256 of kind, vocabulary and behaviour. Equal fingerprints mean the same ids for the same text."""
        return self._hash(self.vocab_size)

    def _hash(self, entries: int, whole: bool = False) -> str:
        """whole: hash all files entirely, as earlier versions did; else only the parts that affect ids."""
        behaviour = {} if whole else self.behaviour()
        header = f"{self.kind} {entries}\n" + (json.dumps(behaviour, sort_keys=True) if behaviour else "")
        digest = hashlib.sha256(header.encode())
        for name, path in sorted((self.files() if whole else self.vocabulary_files()).items()):
            content = path.read_bytes()
            digest.update(name.encode())
            digest.update(hashlib.sha256(content if whole else self.part_for_ids(name, content)).digest())
        return digest.hexdigest()

    def part_for_ids(self, name: str, content: bytes) -> bytes:
        """The part of a file's content that affects ids: the whole file except a chat template, which may differ
        between an export and its source."""
        return content

    def identity(self) -> TokenizerIdentity:
        """The identity to store with ids that this tokenizer makes. The identity does not depend on the number of
        sentinels, but depends on other added entries."""
        entries = self.vocab_size - self.added_sentinels
        return TokenizerIdentity(self.kind, entries, self._hash(entries))

    def made(self, noted: TokenizerIdentity) -> bool:
        """Whether this tokenizer made ids that were stored with the identity `noted`. Earlier versions counted the
        sentinels, and hashed whole files."""
        counts = self.vocab_size - self.added_sentinels, self.vocab_size
        return noted.fingerprint in {self._hash(count, whole) for count in counts for whole in (False, True)}


def least_vocab(tokenizer: Tokenizer, family: str) -> int:
    """The minimum number of rows in the embedding of a `family` model for this tokenizer. BERT never uses T5's begin
    and end tokens, and foreign BERT models have no rows for these tokens."""
    ends = FAMILY_DEFAULTS[family].writes_ends or tokenizer.added_sentinels
    unwritten = 0 if ends else tokenizer.added_ends
    return tokenizer.vocab_size - unwritten


def flatten(rows: Sequence[Sequence[int]]) -> Encoded:
    """Concatenate lists of ids: [[5, 6], [], [7]] -> ids 5 6 7, offsets 0 2 2 3."""
    import numpy as np

    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.fromiter((token for row in rows for token in row), np.int64, count=int(offsets[-1]))
    return Encoded(ids, offsets)


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn errors of a compiled library, including panics (which are not `Exception`s), into a ValueError that begins
    with `what`."""
    try:
        yield
    except (ValueError, MemoryError, OSError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} ({type(error).__name__}: {error})") from None
