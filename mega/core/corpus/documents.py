"""A document of a corpus, what a step does with it, and how it is written. It knows no files.

A step that looks at one document at a time is written so:

    @dataclass(frozen=True)
    class Shortest:
        name = "shortest"
        key: str = "text"
        least: int = 100

        def load(self) -> Work:
            return each(lambda document: dropped("short") if len(document.text) < self.least else kept(document))

Its fields are its settings: they say whether former work can be resumed, so all that the result depends on is a field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mega.core.data.sources import BadLine, keys_there, not_an_object, parsed

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NOT_EXACT = re.compile(rb"\d{18}|NaN|Infinity|\d[eE][+]?\d\d")
"""In a line: numbers that orjson may round, or write as null."""


class CorpusDocument:
    """One line of the input.

    line: its bytes, without the line end; key: the key of its text; plain: the line is the text itself; part: the name
    of the input part that it belongs to; index: its number there, from 0, blank lines left out; number: its line's
    number there, from 1; locate: from that number to "file:number", for messages.
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
        """File and line number. Finding the latter may take reading the file."""
        return self._locate(self.number)

    @property
    def shown(self) -> str:
        """The text, or the whole line if it has no text, for people."""
        try:
            return self.text
        except ValueError:
            return self.line.decode("utf-8", "replace")

    @property
    def fields(self) -> dict[str, object]:
        """All keys and values. Errors: ValueError saying why the line does not hold a document."""
        if self._fields is None:
            self._fields = self._plain_fields() if self.plain else _object(self.line)
        return self._fields

    @property
    def text(self) -> str:
        """The text under the key. Errors: ValueError with the reason if it is missing."""
        found = self.fields.get(self.key)
        if isinstance(found, str):
            return found
        if self.key in self.fields:
            raise ValueError(f'"{self.key}" is not a string, but {json.dumps(found)[:40]}')
        raise ValueError(f'no key "{self.key}"; {keys_there(self.fields, "--json-key")}')

    def with_text(self, text: str, **others: object) -> bytes:
        """The line of this document with another text, and other values of other keys."""
        if self.plain:
            return text.encode()
        return as_line(self._exact_fields() | {self.key: text} | others)

    def with_fields(self, **others: object) -> bytes:
        """The line of this document with other values of some keys."""
        return as_line(self._exact_fields() | others)

    def _exact_fields(self) -> dict[str, object]:
        """The fields with every number as it is written. Looking for such numbers costs more than parsing a line."""
        return json.loads(self.line) if not self.plain and _NOT_EXACT.search(self.line) else self.fields

    def _plain_fields(self) -> dict[str, object]:
        try:
            return {self.key: self.line.decode()}
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {error.start}") from None


def _object(line: bytes) -> dict[str, object]:
    found = parsed(line)
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object; {not_an_object(found)}")
    return found


def as_line(fields: Mapping[str, object]) -> bytes:
    """One JSON line, without its end. No number is rounded.

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
    """What a step does with a document.

    lines: what replaces it, without line ends: nothing, itself or several; reason: why it is dropped, or None;
    counts: what else happened to it (such as "text repaired"); measures: values of the report's tables, as
    {"language": "de"}.
    """

    lines: Sequence[bytes]
    reason: str | None = None
    counts: Mapping[str, int] = {}
    measures: Mapping[str, str] = {}


Work = Callable[[Iterable[CorpusDocument]], Iterator[Result]]
"""From the documents of a part to their results, one each, in order."""


class CorpusStep(Protocol):
    """A step: a frozen dataclass whose fields are its settings, small enough to be sent to another process."""

    @property
    def name(self) -> str:
        """Of the verb."""
        ...

    @property
    def key(self) -> str:
        """The key of the text, which every document must have; "": any object is a document.

        A step that needs something else has a method `check(document)`, which raises ValueError with the rule.
        """
        ...

    def load(self) -> Work:
        """The work, with its libraries and files loaded. Called once in a process, and in the parent first.

        Errors: ValueError naming flag, value and rule.
        """
        ...


Survey = Callable[[Iterable[CorpusDocument]], Mapping[str, "NDArray[np.generic]"]]
"""From the documents of a part to notes about them: arrays by name, which stay on disk until the work is done."""


@runtime_checkable
class SurveyStep(Protocol):
    """A step that has to see all documents before it can judge one. A frozen dataclass like any step."""

    @property
    def name(self) -> str:
        """Of the verb."""
        ...

    @property
    def key(self) -> str:
        """See `CorpusStep.key`."""
        ...

    @property
    def stages(self) -> int:
        """How many surveys it needs."""
        ...

    def survey(self, stage: int, folder: Path) -> Survey:
        """A pass, with its libraries loaded. Of stage 0 it is called once before there is a folder, too.

        Errors: ValueError naming flag, value and rule.
        """
        ...

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """From the notes of all parts, PART.npz of `stage_folder(folder, stage)`, to files that later passes read."""
        ...

    def judge(self, folder: Path) -> Work:
        """The last pass: the same documents, part by part."""
        ...


def stage_folder(folder: Path, stage: int) -> Path:
    """Where the notes of a survey are."""
    return folder / f"stage-{stage}"


def each(function: Callable[[CorpusDocument], Result]) -> Work:
    """The work of a step that looks at one document at a time."""
    return lambda documents: map(function, documents)


def kept(document: CorpusDocument, **counts: int) -> Result:
    """The document stays as it is, byte for byte."""
    return Result((document.line,), counts=counts)


def dropped(reason: str, **counts: int) -> Result:
    """The document goes, for a reason, which is a few words that are the same for all such documents."""
    return Result((), reason, counts)


Check = Callable[[CorpusDocument], None]
"""Raises ValueError with the rule that a line breaks, if it does not hold a document."""


def check_of(step: CorpusStep | SurveyStep) -> Check:
    """The check of a step, its method `check` if it has one: by default a document is a JSON object, and has a text if
    the step has a key."""
    own: Check | None = getattr(step, "check", None)
    if own is not None:
        return own
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
