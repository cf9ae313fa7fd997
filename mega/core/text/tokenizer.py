"""What a tokenizer is to the rest of the house.

It knows texts and ids. It knows neither token files nor models: padding the vocabulary is the model's affair.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Encoded(NamedTuple):
    """Many texts as one run of ids, the form in which a token file is written.

    ids: integers of any width, back to back; offsets: int64 [texts + 1], text i being
    `ids[offsets[i] : offsets[i + 1]]`.
    """

    ids: NDArray[Any]
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


class Tokenizer(Protocol):
    """Text to ids and back.

    Raw text takes the *ordinary* path in every family: the text `<|endoftext|>` or `</s>` inside a document
    is split like any other text and never becomes a control token. What a family puts around each text
    on its own (Llama's bos) is part of `encode`.
    """

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

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """The ids of many texts; the same as `encode` one by one, only faster."""
        return flatten([self.encode(text) for text in texts])

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

    def special_ids(self) -> dict[str, int | None]:
        """What a config.json of Hugging Face's says of the tokens that begin, end and fill a text; None for none.

        Where a family has no token that begins a text, the end of the document before it does, as GPT-2's.
        """
        begin = self.eod if self.bos is None else self.bos
        return {"bos_token_id": begin, "eos_token_id": self.eod, "pad_token_id": self.pad}

    def huggingface_files(self) -> dict[str, dict[str, Any]]:
        """File name -> JSON of what AutoTokenizer of transformers opens this tokenizer by, besides `files`."""
        return {}

    def files(self) -> Mapping[str, Path]:
        """Canonical name -> path of every file that made this tokenizer: what a checkpoint copies."""
        ...

    def fingerprint(self) -> str:
        """sha256 over the kind and the contents of the files: equal means the same ids for the same text."""
        return self._hash(self.vocab_size)

    def _hash(self, entries: int) -> str:
        digest = hashlib.sha256(f"{self.kind} {entries}\n".encode())
        for name, path in sorted(self.files().items()):
            digest.update(name.encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def identity(self) -> TokenizerIdentity:
        """What is noted next to ids that it made, however many sentinels it has. Another is refused with them, though
        it may only add entries."""
        entries = self.vocab_size - self.added_sentinels
        return TokenizerIdentity(self.kind, entries, self._hash(entries))

    def made(self, noted: TokenizerIdentity) -> bool:
        """Whether ids of which this is noted are its own. An earlier version noted sentinels too."""
        return noted.fingerprint in (self.identity().fingerprint, self.fingerprint())


def least_vocab(tokenizer: Tokenizer, family: str) -> int:
    """How many rows a model of `family` must have for a tokenizer's tokens: BERT writes no beginning and end of T5's,
    and others' models have no rows for them."""
    unwritten = tokenizer.added_ends if family == "bert" and not tokenizer.added_sentinels else 0
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
