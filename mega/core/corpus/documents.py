"""Defines a corpus document, its serialization, and the interface of a step. This module does not access files.

A step that processes one document at a time is written as follows:

    @dataclass(frozen=True)
    class Shortest:
        name = "shortest"
        key: str = "text"
        least: int = 100

        def load(self) -> Work:
            return each(self.shortest)

        def shortest(self, document: CorpusDocument) -> Result:
            return drop_document("short") if len(document.text) < self.least else keep_document(document)

The fields of a step are its settings. An interrupted run is resumed only by a step with equal settings, so every
setting that affects the result must be a field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mega.core.data.sources import BadLine, describe_keys, describe_value, parsed

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NOT_EXACT = re.compile(rb"\d{18}|NaN|Infinity|\d[eE][+]?\d\d")
"""Matches a line with a number that orjson may round, or may write as null."""


class CorpusDocument:
    """One line of the input.

    line: bytes of the line, without the line end
    key: JSON key of the text
    plain: whether the line is the text itself, not JSON
    part: name of the input part that contains the line
    index: index of the document in the part, from 0; blank lines are not counted
    number: line number in the part, from 1
    locate: maps a line number to "file:number", for messages
    """

    def __init__(
        self,
        line: bytes,
        *,
        key: str = "text",
        plain: bool = False,
        part: str = "",
        index: int = 0,
        number: int = 1,
        locate: Callable[[int], str] = str,
    ) -> None:
        self.line, self.key, self.plain, self.part, self.index, self.number = line, key, plain, part, index, number
        self._locate = locate
        self._fields: dict[str, object] | None = None

    @property
    def where(self) -> str:
        """File and line number, for messages. To determine the line number, lines of the file may have to be
        counted."""
        return self._locate(self.number)

    @property
    def shown(self) -> str:
        """The text to display, or the whole line if the document has no text."""
        try:
            return self.text
        except ValueError:
            return self.line.decode("utf-8", "replace")

    @property
    def fields(self) -> dict[str, object]:
        """All keys and values of the document. Errors: ValueError with the reason if the line is not a document."""
        if self._fields is None:
            self._fields = self._plain_fields() if self.plain else _object(self.line)
        return self._fields

    @property
    def text(self) -> str:
        """The text under the key. Errors: ValueError with the reason if the text is missing."""
        value = self.fields.get(self.key)
        if isinstance(value, str):
            return value
        if self.key in self.fields:
            raise ValueError(f'"{self.key}" is not a string, but {json.dumps(value)[:40]}')
        raise ValueError(f'no key "{self.key}"; {describe_keys(self.fields, "--json-key")}')

    def with_text(self, text: str, **changes: object) -> bytes:
        """Serialize this document with a new text and new values of the keys in `changes`."""
        if self.plain:
            return text.encode()
        return as_line(self._exact_fields() | {self.key: text} | changes)

    def with_fields(self, **changes: object) -> bytes:
        """Serialize this document with new values of the keys in `changes`."""
        return as_line(self._exact_fields() | changes)

    def _exact_fields(self) -> dict[str, object]:
        """The fields of the document, with every number exactly as in the file. A slower parser is used only if the
        line has a number that orjson may round."""
        return json.loads(self.line) if not self.plain and _NOT_EXACT.search(self.line) else self.fields

    def _plain_fields(self) -> dict[str, object]:
        try:
            return {self.key: self.line.decode()}
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {error.start}") from None


def _object(line: bytes) -> dict[str, object]:
    value = parsed(line)
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object; {describe_value(value)}")
    return value


def as_line(fields: Mapping[str, object]) -> bytes:
    """Serialize a document as one JSON line without a line end, and without rounding any number.

    >>> as_line({"text": "Ünder", "id": 2**70})
    b'{"text":"\\xc3\\x9cnder","id":1180591620717411303424}'
    """
    import orjson

    try:
        line = orjson.dumps(fields)
    except TypeError:
        line = b"null"
    if b"null" in line:  # the document may contain None, NaN, or an integer of more than 64 bits
        line = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return line


class Result(NamedTuple):
    """The result of a step for one document."""

    lines: Sequence[bytes]  # Lines to write, without line ends: none, the unchanged line, or several lines
    reason: str | None = None  # Reason why the document is dropped; None if it is kept
    counts: Mapping[str, int] = {}  # Other events to count, such as "text repaired"
    measures: Mapping[str, str] = {}  # Values for the tables of the report, such as {"language": "de"}


Work = Callable[[Iterable[CorpusDocument]], Iterator[Result]]
"""Maps the documents of one input part to one result per document, in order."""


class CorpusStep(Protocol):
    """A step that processes each document separately. It is a frozen dataclass, and the fields are the step's settings.
    A step is pickled and sent to worker processes, so it must be small."""

    @property
    def name(self) -> str:
        """Name of the step's `mega corpus` subcommand."""
        ...

    @property
    def key(self) -> str:
        """Key of the text that every document must have. If the key is "", any JSON object is a document.

        A step with other requirements must define a method `check(document)` that raises a ValueError with the violated
        rule.
        """
        ...

    def load(self) -> Work:
        """Load libraries and files, and return the function that processes documents. This method is called once per
        process, in the parent process first.

        Errors: ValueError naming flag, value and rule.
        """
        ...


Survey = Callable[[Iterable[CorpusDocument]], Mapping[str, "NDArray[np.generic]"]]
"""Maps the documents of one input part to notes, which are named arrays. Notes are stored on disk until all work is
done."""


@runtime_checkable
class SurveyStep(Protocol):
    """A step that must read all documents before it can decide about any document. Like `CorpusStep`, it is a frozen
    dataclass."""

    @property
    def name(self) -> str:
        """Name of the step's `mega corpus` subcommand."""
        ...

    @property
    def key(self) -> str:
        """Key of the text that every document must have, as in `CorpusStep.key`."""
        ...

    @property
    def stages(self) -> int:
        """Number of passes over all documents before the final pass."""
        ...

    def survey(self, stage: int, folder: Path) -> Survey:
        """Load libraries, and return the function that surveys an input part. For stage 0, this method is also called
        once before the output folder is created.

        Errors: ValueError naming flag, value and rule.
        """
        ...

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Read the notes of all parts (files PART.npz in `stage_folder(folder, stage)`), and write files for later
        passes."""
        ...

    def judge(self, folder: Path) -> Work:
        """Return the function for the final pass. The function returns a result for each document of an input part."""
        ...


def stage_folder(folder: Path, stage: int) -> Path:
    """Return the folder that contains the notes of a survey."""
    return folder / f"stage-{stage}"


def each(function: Callable[[CorpusDocument], Result]) -> Work:
    """Convert a function of one document to a function of all documents of an input part."""
    return lambda documents: map(function, documents)


def keep_document(document: CorpusDocument, **counts: int) -> Result:
    """Return a result that keeps the document unchanged, byte for byte."""
    return Result((document.line,), counts=counts)


def drop_document(reason: str, **counts: int) -> Result:
    """Return a result that drops the document. reason: a short text that is the same for all documents dropped by one
    rule."""
    return Result((), reason, counts)


Check = Callable[[CorpusDocument], None]
"""Raises a ValueError with the violated rule if a line is not a document."""


def check_of(step: CorpusStep | SurveyStep) -> Check:
    """Return the step's `check` method, or a default check, which requires a JSON object and, if the step has a key, a
    text."""
    check: Check | None = getattr(step, "check", None)
    if check is not None:
        return check
    return _has_text if step.key else _is_object


def _has_text(document: CorpusDocument) -> None:
    _ = document.text


def _is_object(document: CorpusDocument) -> None:
    _ = document.fields


def check_readable(document: CorpusDocument, check: Check) -> None:
    """Apply `check` to a document. Errors: BadLine with file, line number and violated rule."""
    try:
        check(document)
    except ValueError as error:
        raise BadLine(f"{document.where}: {error}") from None
