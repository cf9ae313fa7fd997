"""Test a user's tokenizer files before a compiled library reads them, by encoding texts in a child process with limits.

A tokenizer.json contains regular expressions, tables and templates. A damaged file can make the library panic, abort or
allocate all memory. Files that pass are recorded in the environment, so that child processes do not test them again.
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
"""Maximum size of a tokenizer file in bytes, about ten times that of the largest common vocabularies."""
MOST_IDS = 1 << 26
_SECONDS, _MEMORY = 10, 7 << 28
_READ = "MEGA_READ_TOKENIZERS"


def check(library: str, path: Path) -> None:
    """Check in a child process that `library` can read the file `path` and use it to encode and decode. Errors:
    ValueError naming the file."""
    label, status = f"--tokenizer-model {path}", path.stat()
    if status.st_size > FILE_BYTES:
        raise ValueError(f"{label}: {status.st_size} bytes; must be at most {FILE_BYTES}")
    mark = f"{library}:{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    if mark in os.environ.get(_READ, "").split():
        return
    with Confined("mega.core.text.probe", label, seconds=_SECONDS, memory=_MEMORY, about="as a tokenizer it ") as child:
        child.ask({"library": library, "path": os.fspath(path)})
    os.environ[_READ] = f"{os.environ.get(_READ, '')} {mark}".strip()


def hugging_face(path: Path) -> Tokenizer:
    """Load a tokenizer.json with Hugging Face's library. Names of control tokens in a text are treated as text, and
    texts are not truncated or padded."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def sentencepiece(path: Path) -> SentencePieceProcessor:
    """Load a .model file with the SentencePiece library."""
    import sentencepiece as library

    return library.SentencePieceProcessor(model_file=str(path))


def _try_hugging_face(path: Path) -> None:
    try:
        tokenizer = hugging_face(path)
    except Exception as error:  # the library raises plain `Exception`
        raise ValueError(f"not a tokenizer.json ({error})") from None
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids or max(ids) >= MOST_IDS:
        raise ValueError(f"must have ids, from 0 to {MOST_IDS - 1}, not {max(ids, default='none')}")
    for encoded in tokenizer.encode_batch(list(PROBES)):
        tokenizer.decode(encoded.ids, skip_special_tokens=False)


def _try_sentencepiece(path: Path) -> None:
    try:
        processor = sentencepiece(path)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"not a SentencePiece model ({error})") from None
    for token in range(processor.vocab_size()):
        processor.id_to_piece(token)
    for ids in processor.encode(list(PROBES), num_threads=1):
        processor.decode(ids)


LIBRARIES: dict[str, Callable[[Path], None]] = {
    "tokenizers": _try_hugging_face,
    "sentencepiece": _try_sentencepiece,
}


def answer(question: dict[str, str]) -> None:
    """Load the file named in `question`, and encode and decode texts. Errors: any exception from the library, or
    ValueError."""
    LIBRARIES[question["library"]](Path(question["path"]))


if __name__ == "__main__":
    serve(answer)
