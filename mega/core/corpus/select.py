"""Keeps the given share of documents with the lowest values, such as the half that is least toxic.

Documents without a value are dropped. Ties are broken by the input order, and kept documents are written in input
order.
Source: Megatron-LM 23.06, examples/detxoify_lm/annotations/filter-selfgeneration.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, drop_document, keep_document, stage_folder
from mega.core.corpus.folder import write_record
from mega.core.corpus.repeats import notes
from mega.core.files import whole_file
from mega.core.untrusted import Json

_MARKS = "selected.npz"


@dataclass(frozen=True, kw_only=True)
class Select:
    """Keeps the documents with the lowest values under a JSON key."""

    name: ClassVar[str] = "select"
    stages: ClassVar[int] = 1
    key: ClassVar[str] = ""
    by: str = "score.toxicity"
    """Key of the value. Nested keys are joined with dots, outermost first."""
    share: float = 0.5
    """Share of documents to keep, as a fraction of all documents, including documents without a value."""
    above: float = 0.5
    """The report counts documents with a value above this limit as toxic."""
    report: str = ""
    """File to which statistics are written; "" writes no file."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"--share {self.share}: must be greater than 0 and at most 1")

    def survey(self, stage: int, folder: Path) -> Survey:
        def values(documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
            return {"values": np.array([self._value(document) for document in documents], np.float64)}

        return values

    def check(self, document: CorpusDocument) -> None:
        """Check that a document is a JSON object, and that its value, if present, is a number. Errors: ValueError if
        the check fails."""
        _ = self._value(document)

    def _value(self, document: CorpusDocument) -> float:
        """Return the value of a document, or NaN if the value is missing. Errors: ValueError if the value is not a
        number."""
        value: object = document.fields
        for name in self.by.split("."):
            if not isinstance(value, dict) or value.get(name) is None:
                return math.nan
            value = value[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.by} {value!r}: must be a number, or null")
        return float(value)

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Rank the values of all documents, and mark the documents to keep."""
        by_part = [notes(stage_folder(folder, 0), part)["values"] for part in parts]
        values = np.concatenate([np.zeros(0), *by_part])
        if len(values) and np.isnan(values).all():
            raise ValueError(f"--by {self.by}: no document has it")
        marks = np.zeros(len(values), np.bool_)
        ranked = np.argsort(values, kind="stable")  # NaN is sorted last
        marks[ranked[: min(int(len(values) * self.share), int((~np.isnan(values)).sum()))]] = True
        ends = np.cumsum([len(each) for each in by_part])
        with whole_file(folder / _MARKS) as file:
            marks_by_part = {
                part: marks[end - len(values) : end] for part, values, end in zip(parts, by_part, ends, strict=True)
            }
            np.savez(file, **marks_by_part)  # type: ignore[arg-type]  # no part is called allow_pickle
        if self.report:
            write_record(Path(self.report), self._figures(values, marks))

    def _figures(self, values: NDArray[np.float64], marks: NDArray[np.bool_]) -> dict[str, Json]:
        present, kept_values = values[~np.isnan(values)], values[marks]
        sets = {"all": present, "above": present[present > self.above], "not above": present[present <= self.above]}
        figures: dict[str, Json] = {
            name: {"documents": len(subset), "mean": float(subset.mean()), "deviation": float(subset.std())}
            for name, subset in sets.items()
            if len(subset)
        }
        figures |= {"documents": len(values), "without a value": len(values) - len(present), "kept": len(kept_values)}
        figures["share above"] = float((present > self.above).mean())
        if len(kept_values):
            figures["kept from"], figures["kept to"] = float(kept_values.min()), float(kept_values.max())
        return figures

    def judge(self, folder: Path) -> Work:
        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            marks: list[bool] = []
            for index, document in enumerate(documents):
                if not index:
                    marks = np.load(folder / _MARKS)[document.part].tolist()
                if marks[index]:
                    yield keep_document(document)
                else:
                    yield drop_document("no value" if math.isnan(self._value(document)) else "not among the least")

        return judge
