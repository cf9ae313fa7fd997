"""Adds to every document a score for each attribute, such as toxicity. If a document cannot be scored, null is stored.

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
"""Number of bytes of text per input part if a server scores the texts. After an interruption, at most one part is sent
to the server again."""


@dataclass(frozen=True, kw_only=True)
class Annotate:
    """Stores the scores of each document under `score_key`, and removes end-of-document marks from the text."""

    name: ClassVar[str] = "annotate"
    scorer: str
    """The scorer, as in `ScorerOptions.scorer`."""
    key: str = "text"
    """JSON key of the text."""
    score_key: str = "score"
    """JSON key under which the scores are stored."""
    most_bytes: int = 20480
    """Maximum number of bytes of a text to score."""
    how: ScorerOptions = field(metadata={"setting": False})
    """Connection settings of a server. The scores do not depend on these settings."""

    @property
    def part_bytes(self) -> int | None:
        """Number of bytes of text per input part; None selects the default."""
        return PART_BYTES_ASKED if self.how.is_server else None

    @property
    def one_process(self) -> str:
        """Reason why the step must run in one process; "" if several processes are allowed."""
        return "a server is asked by --connections of one process" if self.how.is_server else ""

    def check(self, document: CorpusDocument) -> None:
        """Check that a document is a JSON object with a text, because scores cannot be stored in a line of plain text.
        Errors: ValueError if the check fails."""
        if document.plain:
            raise ValueError("a line of text has no place for scores; must be JSON lines")
        _ = document.text

    def load(self) -> Work:
        scorer = make_scorer(self.how)

        def annotate(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            remaining = iter(documents)
            while batch := list(islice(remaining, _TOGETHER)):
                yield from self._annotated(scorer, batch)

        return annotate

    def _annotated(self, scorer: Scorer, documents: list[CorpusDocument]) -> Iterator[Result]:
        scores = scored(scorer, [document.text for document in documents], self.most_bytes)
        for document, score in zip(documents, scores, strict=True):
            line = document.with_text(cleaned(document.text), **{self.score_key: score})
            yield Result((line,), counts={"scored" if score is not None else "without a score": 1})
