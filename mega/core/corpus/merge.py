"""Many files into one, each line of them checked to be a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mega.core.corpus.documents import Work, each, kept


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Passes every document on. key: of a text that each must have; "": any JSON object is a document."""

    name: ClassVar[str] = "merge"
    key: str = ""

    def load(self) -> Work:
        return each(kept)
