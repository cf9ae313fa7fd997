"""Merges many files into one, and checks that each line is a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mega.core.corpus.documents import Work, each, keep_document


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Keeps every document. key: JSON key of the text that each document must have; if "", any JSON object is a
    document."""

    name: ClassVar[str] = "merge"
    key: str = ""

    def load(self) -> Work:
        return each(keep_document)
