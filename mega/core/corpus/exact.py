"""Exact duplicates: whole documents, or paragraphs (lines) wherever they came before. The first one stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, dropped, kept, stage_folder
from mega.core.corpus.repeats import keys_of, mark_repeats, repeats


@dataclass(frozen=True, kw_only=True)
class ExactDuplicates:
    """paragraphs: cut out lines of at least `least` characters that came before, in any document; a document of which
    less is left than that is dropped."""

    name: ClassVar[str] = "exact-duplicates"
    stages: ClassVar[int] = 1
    key: str = "text"
    paragraphs: bool = False
    least: int = 60

    def survey(self, stage: int, folder: Path) -> Survey:
        """Notes a key for every item."""

        def survey(documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
            return {"keys": keys_of(item for document in documents for item in self._items(document.text))}

        return survey

    def _items(self, text: str) -> Iterator[bytes | None]:
        if not self.paragraphs:
            yield text.encode("utf-8", "surrogatepass")
            return
        for line in text.split("\n"):
            line = line.strip()
            yield line.encode("utf-8", "surrogatepass") if len(line) >= self.least else None

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Marks the repeated items."""
        mark_repeats(stage_folder(folder, stage), parts)

    def judge(self, folder: Path) -> Work:
        """Drops documents, or cuts paragraphs."""

        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            marks, at = np.zeros(0, np.bool_), 0
            for index, document in enumerate(documents):
                if not index:
                    marks = repeats(stage_folder(folder, 0), document.part)
                count = document.text.count("\n") + 1 if self.paragraphs else 1
                yield self._judged(document, marks[at : at + count])
                at += count

        return judge

    def _judged(self, document: CorpusDocument, marks: NDArray[np.bool_]) -> Result:
        if not marks.any():
            return kept(document)
        if not self.paragraphs:
            return dropped("exact duplicate")
        lines = document.text.split("\n")
        text = "\n".join(line for line, mark in zip(lines, marks, strict=True) if not mark).strip("\n")
        counts = {"repeated paragraphs": int(marks.sum())}
        if len(text) < self.least:
            return dropped("repeated paragraphs", **counts)
        return Result((document.with_text(text),), counts=counts)
