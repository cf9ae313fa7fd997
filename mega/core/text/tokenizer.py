"""What a tokenizer is to the rest of the house.

It knows texts and ids. It knows neither token files nor models: padding the vocabulary is the model's affair.
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
"""Stands in a template's text for the end of a document of a tokenizer that has no name for it."""


class Encoded(NamedTuple):
    """Many texts as one run of ids, the form in which a token file is written.

    ids: integers of any width, back to back; offsets: int64 [texts + 1], text i being
    `ids[offsets[i] : offsets[i + 1]]`.
    """

    ids: NDArray[np.integer]
    offsets: NDArray[np.int64]


class Roles(NamedTuple):
    """Ids of the tokens that BERT and T5 samples are built with. `sentinels` are <extra_id_0>, <extra_id_1> ..."""

    cls: int
    sep: int
    mask: int
    pad: int
    bos: int
    eos: int
    sentinels: tuple[int, ...]


class TokenizerIdentity(NamedTuple):
    """Which tokenizer made some ids, as it is noted next to them."""

    kind: str
    vocab_size: int
    fingerprint: str

    @classmethod
    def read(cls, noted: object) -> TokenizerIdentity | None:
        """The inverse of `_asdict`, of something that may be damaged, or of a later version; None where it is."""
        found = noted if isinstance(noted, dict) else {}
        kind, size, fingerprint = (found.get(name) for name in cls._fields)
        if isinstance(kind, str) and isinstance(size, int) and isinstance(fingerprint, str):
            return cls(kind, size, fingerprint)
        return None

    def __str__(self) -> str:
        return f"{self.kind} of {self.vocab_size} entries ({self.fingerprint[:12]})"


class TokenTable(Protocol):
    """What the ids of a tokenizer are: how many, what each stands for, and which of them are control tokens."""

    kind: str
    eod: int | None  # the end of a document; None where the family has none
    bos: int | None
    pad: int | None
    roles: Roles | None = None  # of the families that BERT and T5 can be trained with
    added_sentinels: int = 0  # entries after all others, that no text becomes
    added_ends: int = 0  # entries before those, of T5's beginning and end, that its file lacks

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1: the true size, without padding."""
        ...

    @property
    def start(self) -> int | None:
        """What stands in front of a text that has nothing before it; None where the family has no such token."""
        return self.eod if self.bos is None else self.bos

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def piece(self, token: int) -> str:
        """One token as a person should see it, control tokens by name."""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text, which may be part of a character; none for a control token."""
        return self.decode([token]).encode()

    def continues(self, token: int) -> bool:
        """Whether a token continues the word before it, so that whole-word masking takes both."""
        return False

    def control(self, name: str) -> int | None:
        """The id of a control token by its name, such as <|eot_id|>; None where there is none."""
        return None

    def special_tokens(self) -> Mapping[str, int]:
        """Name -> id of every token that a text can hold by name. Raw text never becomes one of them."""
        ids = (token for token in (self.bos, self.eod, self.pad) if token is not None)
        found = {name: token for token in ids if self.control(name := self.piece(token)) == token}
        return found if self.eod is None or self.eod in found.values() else {**found, NAMELESS_END: self.eod}

    def vocabulary_tokens(self) -> Mapping[str, int]:
        """Name -> id of the tokens that are looked for in every text, raw text included, as `<think>` of some."""
        return {}

    def named_tokens(self) -> Mapping[str, str]:
        """What a chat template is given: `bos_token`, `eos_token` and others of Hugging Face's -> the token's name."""
        names = {token: name for name, token in self.special_tokens().items()}
        ids = {"bos_token": self.bos, "eos_token": self.eod, "pad_token": self.pad}
        return {key: names[token] for key, token in ids.items() if token in names}

    def special_ids(self) -> dict[str, int | None]:
        """What a config.json of Hugging Face's says of the tokens that begin, end and fill a text; None for none.

        Where a family has no token that begins a text, the end of the document before it does, as GPT-2's.
        """
        begin = self.eod if self.bos is None else self.bos
        return {"bos_token_id": begin, "eos_token_id": self.eod, "pad_token_id": self.pad}


class TextEncoder(TokenTable, Protocol):
    """Text to ids, and where in the text each comes from.

    Raw text takes the *ordinary* path in every family: the text `<|endoftext|>` or `</s>` inside a document
    is split like any other text and never becomes a control token. What a family puts around each text
    on its own (Llama's bos) is part of `encode`.
    """

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of many texts; the same as `encode` one by one, only faster."""
        return flatten([self.encode(text) for text in texts])

    def parse(self, text: str, literal: Sequence[Span] = ()) -> Parsed:
        """The ids of a text in which tokens stand by name, and nothing in front of it. literal: characters that are
        text, also where they spell a control token. Adjacent text is encoded as one piece."""
        names, ids, spans = {**self.vocabulary_tokens(), **self.special_tokens()}, list[int](), list[Span]()
        known = True
        for name, begin, end in sections(text, names, literal):
            found = Parsed([names[name]], [(0, end - begin)]) if name else self.section(text[begin:end], begin == 0)
            ids += found.ids
            spans += [(begin + first, begin + last) for first, last in found.spans or ()]
            known = known and found.spans is not None
        return Parsed(ids, spans if known else None)

    def encode_special(self, text: str) -> list[int]:
        """The ids of one text in which special tokens stand by name, with what the family puts around each text."""
        return [*self.encode(""), *self.parse(text).ids]

    def located(self, text: str, special: bool = False) -> list[Span] | None:
        """The characters that each id of `encode` stands for, or of `encode_special`; an empty span for what the family
        puts around a text. None where it cannot tell."""
        lead: list[Span] = [(0, 0)] * len(self.encode(""))
        spans = self.parse(text).spans if special else self.spans_of(text, self.encode(text)[len(lead) :])
        return None if spans is None else lead + spans

    def spans_of(self, text: str, ids: Sequence[int]) -> list[Span] | None:
        """The characters that each id of raw text stands for; None where the family cannot tell."""
        return aligned(text, [self.token_bytes(token) for token in ids])

    def section(self, text: str, first: bool) -> Parsed:
        """The ids of raw text between two tokens that stand by name; first: nothing is before it."""
        ids = self.encode(text)[len(self.encode("")) :]
        return Parsed(ids, self.spans_of(text, ids))


class Tokenizer(TextEncoder, Protocol):
    """Text to ids and back, by files: those that made it, which tokenizer it is by them, and what others open it by."""

    def huggingface_files(self) -> Mapping[str, Mapping[str, Json]]:
        """File name -> JSON of what AutoTokenizer of transformers opens this tokenizer by, besides `files`."""
        return {}

    def unpublished(self) -> str | None:
        """Why transformers has no such tokenizer, so that its files are left out of an export; None where it has."""
        return None

    def doubt(self) -> str | None:
        """Why its files may be those of another kind of tokenizer, for a line to the user; else None."""
        return None

    def publishing_loss(self) -> str | None:
        """What transformers does otherwise with the files of an export; None where all ids are equal."""
        return None

    def files(self) -> Mapping[str, Path]:
        """Canonical name -> path of every file that made this tokenizer: what a checkpoint copies."""
        ...

    def vocabulary_files(self) -> Mapping[str, Path]:
        """Of `files`, those whose bytes decide which ids a text has."""
        return self.files()

    def behaviour(self) -> Mapping[str, object]:
        """JSON values that decide the ids of a text, in addition to `vocabulary_files` and `kind`."""
        return {}

    def fingerprint(self) -> str:
        """sha256 over kind, vocabulary and behaviour: equal means the same ids for the same text."""
        return self._hash(self.vocab_size)

    def _hash(self, entries: int, whole: bool = False) -> str:
        """whole: over all files as they are, as earlier versions noted it; else over what has to do with ids."""
        behaviour = {} if whole else self.behaviour()
        about = f"{self.kind} {entries}\n" + (json.dumps(behaviour, sort_keys=True) if behaviour else "")
        digest = hashlib.sha256(about.encode())
        for name, path in sorted((self.files() if whole else self.vocabulary_files()).items()):
            content = path.read_bytes()
            digest.update(name.encode())
            digest.update(hashlib.sha256(content if whole else self.part_for_ids(name, content)).digest())
        return digest.hexdigest()

    def part_for_ids(self, name: str, content: bytes) -> bytes:
        """What of a file's content has to do with ids: all of it, but for a chat template, with which an export differs
        from what it was made of."""
        return content

    def identity(self) -> TokenizerIdentity:
        """What is noted next to ids that it made, however many sentinels it has. Another is refused with them, though
        it may only add entries."""
        entries = self.vocab_size - self.added_sentinels
        return TokenizerIdentity(self.kind, entries, self._hash(entries))

    def made(self, noted: TokenizerIdentity) -> bool:
        """Whether ids of which this is noted are its own. Earlier versions noted sentinels, and all files."""
        counts = self.vocab_size - self.added_sentinels, self.vocab_size
        return noted.fingerprint in {self._hash(count, whole) for count in counts for whole in (False, True)}


def least_vocab(tokenizer: Tokenizer, family: str) -> int:
    """How many rows a model of `family` must have for a tokenizer's tokens: BERT writes no beginning and end of T5's,
    and others' models have no rows for them."""
    ends = FAMILY_DEFAULTS[family].writes_ends or tokenizer.added_sentinels
    unwritten = 0 if ends else tokenizer.added_ends
    return tokenizer.vocab_size - unwritten


def flatten(rows: Sequence[Sequence[int]]) -> Encoded:
    """Lists of ids as one `Encoded`: [[5, 6], [], [7]] -> ids 5 6 7, offsets 0 2 2 3."""
    import numpy as np

    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.fromiter((token for row in rows for token in row), np.int64, count=int(offsets[-1]))
    return Encoded(ids, offsets)


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """What a compiled library raises as a ValueError that begins with `what`: also a panic, which is no Exception."""
    try:
        yield
    except (ValueError, MemoryError, OSError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} ({type(error).__name__}: {error})") from None
