"""The interface of a tokenizer.

This module does not depend on token files or models. Padding of the vocabulary belongs to the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.text.special import Parsed, Span, aligned, sections
from mega.core.untrusted import Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


NAMELESS_END = "<|endoftext|>"
"""Name of the end-of-document token in a chat template's text, for tokenizers whose end token has no name."""


class Encoded(NamedTuple):
    """The ids of many texts in one array, as in a token file.

    ids: integers of any width, concatenated; offsets: int64 [texts + 1]. Text i has the ids
    `ids[offsets[i] : offsets[i + 1]]`.
    """

    ids: NDArray[np.integer]
    offsets: NDArray[np.int64]


class Roles(NamedTuple):
    """Ids of the special tokens in BERT and T5 samples."""

    cls: int
    sep: int
    mask: int
    pad: int
    bos: int
    eos: int
    sentinels: tuple[int, ...]  # <extra_id_0>, <extra_id_1> ...


class TokenizerIdentity(NamedTuple):
    """Identifies the tokenizer that produced ids, and is stored together with the ids."""

    kind: str
    vocab_size: int
    fingerprint: str

    @classmethod
    def read(cls, noted: object) -> TokenizerIdentity | None:
        """Parse the result of `_asdict`. Return None if the value is damaged or was written by a later version with
        different fields."""
        fields = noted if isinstance(noted, dict) else {}
        kind, size, fingerprint = (fields.get(name) for name in cls._fields)
        if isinstance(kind, str) and isinstance(size, int) and isinstance(fingerprint, str):
            return cls(kind, size, fingerprint)
        return None

    def __str__(self) -> str:
        return f"{self.kind} of {self.vocab_size} entries ({self.fingerprint[:12]})"


class TokenTable(Protocol):
    """The vocabulary of a tokenizer: the number of ids, the text of each id, and which ids are control tokens."""

    kind: str
    eod: int | None  # id that ends a document; None if there is no such token
    bos: int | None
    pad: int | None
    roles: Roles | None = None  # None unless the tokenizer can be used for BERT and T5
    added_sentinels: int = 0  # number of sentinels appended to the vocabulary; encoding a text never yields a sentinel
    added_ends: int = 0  # number of T5's begin and end tokens added before the sentinels, if the file lacks them

    @property
    def vocab_size(self) -> int:
        """Number of ids without padding; ids run from 0 to vocab_size - 1."""
        ...

    @property
    def start(self) -> int | None:
        """The id that precedes a text at the beginning of the input; None if the tokenizer has no such token."""
        return self.eod if self.bos is None else self.bos

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; invalid UTF-8 is replaced with U+FFFD."""
        ...

    def piece(self, token: int) -> str:
        """Return the text of one token for display, or the name of a control token."""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, possibly only part of a character; empty for control tokens."""
        return self.decode([token]).encode()

    def continues(self, token: int) -> bool:
        """Whether a token continues the previous word, so that whole-word masking masks both tokens."""
        return False

    def control(self, name: str) -> int | None:
        """Return the id of a control token by its name, such as <|eot_id|>; None if the tokenizer lacks this token."""
        return None

    def special_tokens(self) -> Mapping[str, int]:
        """Return a map from name to id of the special tokens that `parse` recognises. Encoding raw text never yields a
        special token."""
        ids = (token for token in (self.bos, self.eod, self.pad) if token is not None)
        names = {name: token for token in ids if self.control(name := self.piece(token)) == token}
        return names if self.eod is None or self.eod in names.values() else {**names, NAMELESS_END: self.eod}

    def vocabulary_tokens(self) -> Mapping[str, int]:
        """Return a map from name to id of the added tokens that are recognised even in raw text, such as `<think>` in
        some models."""
        return {}

    def named_tokens(self) -> Mapping[str, str]:
        """Return a map from variables of chat templates, such as Hugging Face's `bos_token`, to names of tokens."""
        names = {token: name for name, token in self.special_tokens().items()}
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        return {key: names[token] for key, token in ids.items() if token in names}

    def special_ids(self) -> dict[str, int | None]:
        """Return the entries in Hugging Face's config.json for the ids that begin, end and pad a text; None for missing
        tokens.

        For tokenizers without a begin token, such as GPT-2's, the end-of-document token also begins a text.
        """
        begin = self.eod if self.bos is None else self.bos
        return {"bos_token_id": begin, "eos_token_id": self.eod, "pad_token_id": self.pad}


class TextEncoder(TokenTable, Protocol):
    """Encodes text to ids, and locates each id in the text.

    Raw text is encoded as *ordinary* text: `<|endoftext|>` or `</s>` inside a document is split like any other text and
    never becomes a control token. `encode` adds the tokens that belong to each text, such as Llama's bos.
    """

    def encode(self, text: str) -> list[int]:
        """Encode one text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode many texts to the same ids as `encode`. Some libraries are faster if they encode many texts at a
        time."""
        return flatten([self.encode(text) for text in texts])

    def parse(self, text: str, literal: Sequence[Span] = ()) -> Parsed:
        """Encode a text in which names of control tokens are parsed as these tokens, and add no tokens such as Llama's
        bos. literal: spans of ordinary text, in which names of control tokens are not parsed. Adjacent sections of
        ordinary text are encoded together."""
        names, ids, spans = {**self.vocabulary_tokens(), **self.special_tokens()}, list[int](), list[Span]()
        has_spans = True
        for name, begin, end in sections(text, names, literal):
            parsed = Parsed([names[name]], [(0, end - begin)]) if name else self.section(text[begin:end], begin == 0)
            ids += parsed.ids
            spans += [(begin + first, begin + last) for first, last in parsed.spans or ()]
            has_spans = has_spans and parsed.spans is not None
        return Parsed(ids, spans if has_spans else None)

    def encode_special(self, text: str) -> list[int]:
        """Encode one text in which names of special tokens are parsed as these tokens, and add tokens such as Llama's
        bos."""
        return [*self.encode(""), *self.parse(text).ids]

    def located(self, text: str, special: bool = False) -> list[Span] | None:
        """Return the span of characters of each id of `encode` (or of `encode_special` if `special`). Added tokens have
        an empty span. Return None if the tokenizer cannot determine spans."""
        lead: list[Span] = [(0, 0)] * len(self.encode(""))
        spans = self.parse(text).spans if special else self.spans_of(text, self.encode(text)[len(lead) :])
        return None if spans is None else lead + spans

    def spans_of(self, text: str, ids: Sequence[int]) -> list[Span] | None:
        """Return the span of characters of each id of raw text, or None if the tokenizer cannot determine spans."""
        return aligned(text, [self.token_bytes(token) for token in ids])

    def section(self, text: str, first: bool) -> Parsed:
        """Encode a section of raw text between control tokens. first: whether the section begins the whole text."""
        ids = self.encode(text)[len(self.encode("")) :]
        return Parsed(ids, self.spans_of(text, ids))


class Tokenizer(TextEncoder, Protocol):
    """A text encoder with its files, its identity, and the files that other libraries need to open it."""

    def huggingface_files(self) -> Mapping[str, Mapping[str, Json]]:
        """Return the JSON files that transformers' AutoTokenizer needs in addition to `files`, as a map from name to
        content."""
        return {}

    def single_file(self) -> dict[str, Json] | None:
        """Return a tokenizer.json that without other files encodes texts as `encode` does, and that contains all added
        tokens; None if no tokenizer.json can do this."""
        return None

    def unpublished(self) -> str | None:
        """Return the reason why transformers has no equivalent tokenizer; None if it has one. If a reason is returned,
        an export omits the tokenizer's files."""
        return None

    def doubt(self) -> str | None:
        """Return a warning if the files may belong to a tokenizer of another kind, or None."""
        return None

    def text_loss(self) -> str | None:
        """Describe the changes that the tokenizer's normalization makes and that decoding does not undo; None if there
        are none. BERT's tokenizers return None, although they never preserve white space."""
        return None

    def publishing_loss(self) -> str | None:
        """Describe how the ids that transformers computes with the exported files differ from this tokenizer's; None if
        all ids are equal."""
        return None

    def files(self) -> Mapping[str, Path]:
        """Return a map from canonical name to path of all files from which the tokenizer was read. Checkpoints contain
        copies of these files."""
        ...

    def vocabulary_files(self) -> Mapping[str, Path]:
        """Return the members of `files` whose bytes affect the ids of a text."""
        return self.files()

    def behaviour(self) -> Mapping[str, object]:
        """Return the values (JSON) that affect the ids of a text in addition to `vocabulary_files` and `kind`."""
        return {}

    def fingerprint(self) -> str:
        """Return the sha256 of kind, vocabulary and behaviour. Tokenizers with equal fingerprints encode every text to
        the same ids."""
        return self._hash(self.vocab_size)

    def _hash(self, entries: int, earlier: Literal["whole files", "all files"] | None = None) -> str:
        """Compute a fingerprint. earlier: compute the fingerprint of an earlier version, which hashed all files instead
        of behaviour and vocabulary: entirely, or only the parts that affect ids."""
        behaviour, whole = {} if earlier else self.behaviour(), earlier == "whole files"
        header = f"{self.kind} {entries}\n" + (json.dumps(behaviour, sort_keys=True) if behaviour else "")
        digest = hashlib.sha256(header.encode())
        for name, path in sorted((self.files() if earlier else self.vocabulary_files()).items()):
            content = path.read_bytes()
            digest.update(name.encode())
            digest.update(hashlib.sha256(content if whole else self.part_for_ids(name, content)).digest())
        return digest.hexdigest()

    def part_for_ids(self, name: str, content: bytes) -> bytes:
        """Return the part of a file's content that affects ids: everything except a chat template. A chat template may
        differ between an export and its source."""
        return content

    def identity(self) -> TokenizerIdentity:
        """Return the identity to store with this tokenizer's ids. The identity does not depend on the number of
        sentinels, but does depend on other added entries."""
        entries = self.vocab_size - self.added_sentinels
        return TokenizerIdentity(self.kind, entries, self._hash(entries))

    def made(self, noted: TokenizerIdentity) -> bool:
        """Whether the identity `noted` belongs to this tokenizer. Identities from earlier versions, which count
        sentinels or hash all files, are also accepted."""
        counts = self.vocab_size - self.added_sentinels, self.vocab_size
        fingerprints = {self._hash(count) for count in counts}
        if self.as_earlier():
            fingerprints |= {self._hash(count, "all files") for count in counts}
            fingerprints |= {self._hash(count, "whole files") for count in counts}
        return noted.fingerprint in fingerprints

    def as_earlier(self) -> bool:
        """Whether earlier versions encoded every text to the same ids, so that their fingerprints are accepted."""
        return True


def least_vocab(tokenizer: Tokenizer, family: str) -> int:
    """Return the minimum number of embedding rows of a `family` model for this tokenizer. BERT never uses T5's begin
    and end tokens, and BERT models from other sources have no rows for these tokens."""
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
    """Convert errors of a compiled library to a ValueError that begins with `what`. Panics, which are not `Exception`s,
    are also converted."""
    try:
        yield
    except (ValueError, MemoryError, OSError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} ({type(error).__name__}: {error})") from None
