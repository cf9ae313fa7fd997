"""Tokenizer files of others that a compiled library reads: first in a process of its own, within limits, with texts.

A tokenizer.json is a program in pieces (pieces of regular expressions, tables, templates), of which a damaged one makes
the library panic, abort, or ask for all memory. What has been read once is noted in the environment, so that processes
started by this one do not repeat it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mega.core.text.probes import PROBES
from mega.core.untrusted import Confined, serve

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

FILE_BYTES = 1 << 28
"""Most bytes of a tokenizer's file. The largest vocabularies of today take a tenth."""
MOST_IDS = 1 << 26
_SECONDS, _MEMORY = 10, 7 << 28
_READ = "MEGA_READ_TOKENIZERS"


def check(library: str, path: Path) -> None:
    """See that `library` reads `path`, and encodes and decodes with it. Errors: ValueError naming the file."""
    what, status = f"--tokenizer-model {path}", path.stat()
    if status.st_size > FILE_BYTES:
        raise ValueError(f"{what}: {status.st_size} bytes; must be at most {FILE_BYTES}")
    mark = f"{library}:{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    if mark in os.environ.get(_READ, "").split():
        return
    with Confined("mega.core.text.probe", what, seconds=_SECONDS, memory=_MEMORY, about="as a tokenizer it ") as child:
        child.ask({"library": library, "path": os.fspath(path)})
    os.environ[_READ] = f"{os.environ.get(_READ, '')} {mark}".strip()


def hugging_face(path: Path) -> Tokenizer:
    """The library's object of a tokenizer.json, set to encode texts as they are."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(path))
    found.encode_special_tokens = True
    found.no_truncation()
    found.no_padding()
    return found


def sentencepiece(path: Path) -> SentencePieceProcessor:
    """The library's processor of a .model file."""
    import sentencepiece as library

    return library.SentencePieceProcessor(model_file=str(path))


def _try_hugging_face(path: Path) -> None:
    try:
        found = hugging_face(path)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"not a tokenizer.json ({error})") from None
    ids = found.get_vocab(with_added_tokens=True).values()
    if not ids or max(ids) >= MOST_IDS:
        raise ValueError(f"must have ids, from 0 to {MOST_IDS - 1}, not {max(ids, default='none')}")
    for encoded in found.encode_batch(list(PROBES)):
        found.decode(encoded.ids, skip_special_tokens=False)


def _try_sentencepiece(path: Path) -> None:
    try:
        found = sentencepiece(path)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"not a SentencePiece model ({error})") from None
    for token in range(found.vocab_size()):
        found.id_to_piece(token)
    for ids in found.encode(list(PROBES), num_threads=1):
        found.decode(ids)


LIBRARIES: dict[str, Callable[[Path], None]] = {
    "tokenizers": _try_hugging_face,
    "sentencepiece": _try_sentencepiece,
}


def answer(question: dict[str, str]) -> None:
    """Read the file and use it. Errors: whatever the library raises, and ValueError."""
    LIBRARIES[question["library"]](Path(question["path"]))


if __name__ == "__main__":
    serve(answer)
