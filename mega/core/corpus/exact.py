"""Removes exact duplicates of whole documents, or of paragraphs (lines) anywhere in the corpus. The first occurrence is
kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, drop_document, keep_document, stage_folder
from mega.core.corpus.repeats import keys_of, mark_repeats, repeats


@dataclass(frozen=True, kw_only=True)
class ExactDuplicates:
    """Drops repeated documents, or cuts out repeated lines."""

    name: ClassVar[str] = "exact-duplicates"
    stages: ClassVar[int] = 1
    key: str = "text"  # JSON key of the text
    paragraphs: bool = False  # Whether to cut out repeated lines instead of dropping repeated documents
    least: int = 60  # Minimum length in characters of a line to compare, and of a document to keep after cutting

    def survey(self, stage: int, folder: Path) -> Survey:
        """Return the survey function, which computes a key for every document or line."""

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
        """Mark repeated documents or lines."""
        mark_repeats(stage_folder(folder, stage), parts)

    def judge(self, folder: Path) -> Work:
        """Return the function for the final pass, which drops repeated documents or cuts out repeated lines."""

        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            marks, item = np.zeros(0, np.bool_), 0
            for index, document in enumerate(documents):
                if not index:
                    marks = repeats(stage_folder(folder, 0), document.part)
                count = document.text.count("\n") + 1 if self.paragraphs else 1
                yield self._judged(document, marks[item : item + count])
                item += count

        return judge

    def _judged(self, document: CorpusDocument, marks: NDArray[np.bool_]) -> Result:
        if not marks.any():
            return keep_document(document)
        if not self.paragraphs:
            return drop_document("exact duplicate")
        lines = document.text.split("\n")
        text = "\n".join(line for line, mark in zip(lines, marks, strict=True) if not mark).strip("\n")
        counts = {"repeated paragraphs": int(marks.sum())}
        if len(text) < self.least:
            return drop_document("repeated paragraphs", **counts)
        return Result((document.with_text(text),), counts=counts)
