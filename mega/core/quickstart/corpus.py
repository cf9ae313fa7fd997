"""A corpus that every machine has: the documentation and source of the Python that runs this.

A topic of Python's help and a module of its standard library are a document each. Which of them are held out
follows from their names alone, so the same Python always gives the same files. It knows no tokenizer.
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
"""Longer modules are left out: most of them are tables. Characters."""

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "site-packages", "dist-packages"}
"""Folders of the library that teach nothing: its tests, an editor, tables, and what was installed later."""

HELD_OUT = 25
"""One document of so many is held out of training."""


class Document(NamedTuple):
    """name: where it comes from, such as `help/lambda` or `json/decoder.py`."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] % HELD_OUT == 0


class Corpus(NamedTuple):
    """The files of a corpus, JSON lines of {"name", "text"}, and what they hold."""

    train: Path
    held_out: Path
    documents: int
    characters: int


def make_corpus(directory: Path) -> Corpus:
    """Write train.jsonl and held-out.jsonl into `directory`; a few seconds, about 9 MB."""
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
    """The documents of a file of `make_corpus`."""
    return [Document(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, documents: Iterable[Document]) -> None:
    with whole_file(path) as file:
        file.writelines(json.dumps(document._asdict()).encode() + b"\n" for document in documents)


def _help() -> Iterator[Document]:
    """The topics that `help()` knows; none where this Python was installed without them."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return
    for name in sorted(topics):
        yield Document(f"help/{name}", topics[name])


def _modules() -> Iterator[Document]:
    """The standard library, module by module, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if LEFT_OUT.intersection(inside.parts):
            continue
        try:
            with tokenize.open(path) as file:  # in the encoding that the module declares
                text = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if text.strip() and len(text) <= LARGEST:
            yield Document(inside.as_posix(), text)
