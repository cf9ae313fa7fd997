"""A document of a corpus, the result of a step for it, and its serialization. The module does not access files.

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

The fields of a step are its settings. Earlier work is resumed only if its settings are equal, so everything that
affects the result must be a field.
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
"""Matches a line with numbers that orjson may round, or write as null."""


class CorpusDocument:
    """One line of the input.

    line: bytes of the line, without the line end
    key: key of the text
    plain: whether the line is the text itself, not JSON
    part: name of the input part that contains the line
    index: index of the document in the part, from 0; blank lines do not count
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
        """File and line number. The file may have to be read to count lines."""
        return self._locate(self.number)

    @property
    def shown(self) -> str:
        """The text for display, or the whole line if the document has no text."""
        try:
            return self.text
        except ValueError:
            return self.line.decode("utf-8", "replace")

    @property
    def fields(self) -> dict[str, object]:
        """All keys and values. Errors: ValueError with the reason if the line does not hold a document."""
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
        """The line of this document with a new text, and new values of other keys."""
        if self.plain:
            return text.encode()
        return as_line(self._exact_fields() | {self.key: text} | changes)

    def with_fields(self, **changes: object) -> bytes:
        """The line of this document with new values of some keys."""
        return as_line(self._exact_fields() | changes)

    def _exact_fields(self) -> dict[str, object]:
        """The fields, with every number exactly as written. The fast parser is used if the line has no critical
        number."""
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
    """Serialize a document as one JSON line, without a line end. No number is rounded.

    >>> as_line({"text": "Ünder", "id": 2**70})
    b'{"text":"\\xc3\\x9cnder","id":1180591620717411303424}'
    """
    import orjson

    try:
        line = orjson.dumps(fields)
    except TypeError:
        line = b"null"
    if b"null" in line:  # None, or NaN, or a whole number beyond 64 bits
        line = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return line


class Result(NamedTuple):
    """The result of a step for one document."""

    lines: Sequence[bytes]  # Replacement lines without line ends: none, the line itself, or several
    reason: str | None = None  # Why the document is dropped, or None
    counts: Mapping[str, int] = {}  # Other events to count, such as "text repaired"
    measures: Mapping[str, str] = {}  # Values for the tables of the report, such as {"language": "de"}


Work = Callable[[Iterable[CorpusDocument]], Iterator[Result]]
"""Maps the documents of a part to one result per document, in order."""


class CorpusStep(Protocol):
    """A step: a frozen dataclass whose fields are its settings. A step must be small, since it is sent to other
    processes."""

    @property
    def name(self) -> str:
        """Name of the verb."""
        ...

    @property
    def key(self) -> str:
        """Key of the text, which every document must have. If "", any JSON object is a document.

        A step with other requirements has a method `check(document)`, which raises ValueError with the rule.
        """
        ...

    def load(self) -> Work:
        """Load libraries and files, and return the work. Called once per process, and first in the parent.

        Errors: ValueError naming flag, value and rule.
        """
        ...


Survey = Callable[[Iterable[CorpusDocument]], Mapping[str, "NDArray[np.generic]"]]
"""Maps the documents of a part to notes: named arrays, which stay on disk until the work is done."""


@runtime_checkable
class SurveyStep(Protocol):
    """A step that must see all documents before it can decide about any of them. A frozen dataclass like
    `CorpusStep`."""

    @property
    def name(self) -> str:
        """Name of the verb."""
        ...

    @property
    def key(self) -> str:
        """See `CorpusStep.key`."""
        ...

    @property
    def stages(self) -> int:
        """The number of surveys."""
        ...

    def survey(self, stage: int, folder: Path) -> Survey:
        """Load libraries, and return the pass. For stage 0, this method is also called once before the folder exists.

        Errors: ValueError naming flag, value and rule.
        """
        ...

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Read the notes of all parts, PART.npz in `stage_folder(folder, stage)`, and write files for later passes."""
        ...

    def judge(self, folder: Path) -> Work:
        """The last pass over the same documents, part by part."""
        ...


def stage_folder(folder: Path, stage: int) -> Path:
    """The folder with the notes of a survey."""
    return folder / f"stage-{stage}"


def each(function: Callable[[CorpusDocument], Result]) -> Work:
    """Build the work of a step that processes one document at a time."""
    return lambda documents: map(function, documents)


def keep_document(document: CorpusDocument, **counts: int) -> Result:
    """Keep the document unchanged, byte for byte."""
    return Result((document.line,), counts=counts)


def drop_document(reason: str, **counts: int) -> Result:
    """Drop the document. `reason` is a few words, equal for all documents that are dropped by the same rule."""
    return Result((), reason, counts)


Check = Callable[[CorpusDocument], None]
"""Raises ValueError with the rule if a line does not hold a document."""


def check_of(step: CorpusStep | SurveyStep) -> Check:
    """The method `check` of a step, if it has one. Without this method, a document is a JSON object, with a text if the
    step has a key."""
    check: Check | None = getattr(step, "check", None)
    if check is not None:
        return check
    return _has_text if step.key else _is_object


def _has_text(document: CorpusDocument) -> None:
    _ = document.text


def _is_object(document: CorpusDocument) -> None:
    _ = document.fields


def check_readable(document: CorpusDocument, check: Check) -> None:
    """Errors: BadLine with file, line number and rule."""
    try:
        check(document)
    except ValueError as error:
        raise BadLine(f"{document.where}: {error}") from None
