"""A corpus step that drops, cuts, changes and keeps documents, and can end its process in the middle of its work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mega.core.corpus.documents import CorpusDocument, Result, Work, drop_document, keep_document


@dataclass(frozen=True, kw_only=True)
class ToyStep:
    """kill_file: while this file exists, the process that gets to the document "kill" removes it and kills itself."""

    name: ClassVar[str] = "toy"
    key: str = "text"
    kill_file: str = ""

    def load(self) -> Work:
        return self._work

    def _work(self, documents: Iterable[CorpusDocument]) -> Iterator[Result]:
        for document in documents:
            if document.text == "kill" and self.kill_file and Path(self.kill_file).exists():
                Path(self.kill_file).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            if "bad" in document.text:
                yield drop_document("bad word")
            elif "cut" in document.text:
                first, second = document.text.split("cut")
                yield Result((document.with_text(first), document.with_text(second)), counts={"cut": 1})
            elif "change" in document.text:
                yield Result((document.with_text("changed"),), measures={"kind": "changed"})
            else:
                yield keep_document(document)
