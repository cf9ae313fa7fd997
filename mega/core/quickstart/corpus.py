"""Build a corpus from files that every machine has: the documentation and source code of the running Python.

Each topic of Python's help and each module of its standard library is a document. Held-out documents are selected by a
hash of their names, so that the same version of Python always gives the same files. This module does not depend on a
tokenizer.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mega.core.files import whole_file

LARGEST = 120_000
"""Maximum length of a module, in characters. Most of the longer modules are tables."""

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "site-packages", "dist-packages"}
"""Folders of the library that are not part of the corpus: tests, an editor, tables, and installed packages."""

HELD_OUT = 25
"""One of HELD_OUT documents, on average, is held out of training."""


class Document(NamedTuple):
    """A document. name: the source of the document, such as `help/lambda` or `json/decoder.py`."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is held out of training."""
        return hashlib.sha256(self.name.encode()).digest()[0] % HELD_OUT == 0


class Corpus(NamedTuple):
    """The files of a corpus, with one JSON object {"name", "text"} per line."""

    train: Path
    held_out: Path
    documents: int
    """Number of documents in both files."""
    characters: int
    """Number of characters in both files."""


def make_corpus(directory: Path) -> Corpus:
    """Write train.jsonl and held-out.jsonl, about 9 MB, into `directory`. This takes a few seconds."""
    documents = [*_help(), *_modules()]
    directory.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(
        directory / "train.jsonl",
        directory / "held-out.jsonl",
        len(documents),
        sum(len(document.text) for document in documents),
    )
    _write(corpus.train, (document for document in documents if not document.held_out))
    _write(corpus.held_out, (document for document in documents if document.held_out))
    return corpus


def read_corpus(path: Path) -> list[Document]:
    """Read the documents of a file that `make_corpus` wrote."""
    return [Document(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, documents: Iterable[Document]) -> None:
    with whole_file(path) as file:
        file.writelines(json.dumps(document._asdict()).encode() + b"\n" for document in documents)


def _help() -> Iterator[Document]:
    """Yield the topics of `help()`; no topics if this Python was installed without them."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return
    for name in sorted(topics):
        yield Document(f"help/{name}", topics[name])


def _modules() -> Iterator[Document]:
    """Yield the modules of the standard library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if LEFT_OUT.intersection(inside.parts):
            continue
        try:
            with tokenize.open(path) as file:  # with the encoding that the module declares
                text = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if text.strip() and len(text) <= LARGEST:
            yield Document(inside.as_posix(), text)
