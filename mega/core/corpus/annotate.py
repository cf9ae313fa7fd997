"""Gives every document a score by attributes such as toxicity; one that cannot be scored gets null.

Source: Megatron-LM 23.06, examples/detxoify_lm/annotations/perspective_api_annotate.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from mega.core.corpus.documents import CorpusDocument, Result, Work
from mega.core.corpus.scorers import Scorer, ScorerOptions, cleaned, make_scorer, scored

_TOGETHER = 256
PART_BYTES_ASKED = 1 << 17
"""Of text that is asked for again at most, where work that asks a server is interrupted."""


@dataclass(frozen=True, kw_only=True)
class Annotate:
    """The text without marks of a document's end, and its scores under `score_key`. most_bytes: that are scored.

    how: how a server is asked, on which no score depends.
    """

    name: ClassVar[str] = "annotate"
    scorer: str
    key: str = "text"
    score_key: str = "score"
    most_bytes: int = 20480
    how: ScorerOptions = field(metadata={"setting": False})

    @property
    def part_bytes(self) -> int | None:
        """Of text that is done together."""
        return PART_BYTES_ASKED if self.how.is_server else None

    @property
    def one_process(self) -> str:
        """Why it runs in one process; "" where it may run in several."""
        return "a server is asked by --connections of one process" if self.how.is_server else ""

    def check(self, document: CorpusDocument) -> None:
        """A document is an object with a text: a line of text has no place for scores. Errors: ValueError."""
        if document.plain:
            raise ValueError("a line of text has no place for scores; must be JSON lines")
        _ = document.text

    def load(self) -> Work:
        scorer = make_scorer(self.how)

        def annotate(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            rest = iter(documents)
            while together := list(islice(rest, _TOGETHER)):
                yield from self._annotated(scorer, together)

        return annotate

    def _annotated(self, scorer: Scorer, documents: list[CorpusDocument]) -> Iterator[Result]:
        scores = scored(scorer, [document.text for document in documents], self.most_bytes)
        for document, found in zip(documents, scores, strict=True):
            line = document.with_text(cleaned(document.text), **{self.score_key: found})
            yield Result((line,), counts={"scored" if found is not None else "without a score": 1})
