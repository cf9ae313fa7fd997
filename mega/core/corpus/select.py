"""Keeps the share of all documents that have the least value of a key, such as the least toxic half.

Documents without a value leave; ties are decided by the order of the input, and what is kept stays in that order.
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

from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, dropped, kept, stage_folder
from mega.core.corpus.folder import write_record
from mega.core.corpus.repeats import notes
from mega.core.files import whole_file
from mega.core.untrusted import Json

_MARKS = "selected.npz"


@dataclass(frozen=True, kw_only=True)
class Select:
    """by: keys from the outside in, with dots between. share: of all documents, those without a value included.

    above: a document with more counts as toxic in the report. report: file of the figures; "" is none.
    """

    name: ClassVar[str] = "select"
    stages: ClassVar[int] = 1
    key: ClassVar[str] = ""
    by: str = "score.toxicity"
    share: float = 0.5
    above: float = 0.5
    report: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"--share {self.share}: must be greater than 0 and at most 1")

    def survey(self, stage: int, folder: Path) -> Survey:
        def values(documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
            return {"values": np.array([self._value(document) for document in documents], np.float64)}

        return values

    def check(self, document: CorpusDocument) -> None:
        """A document is an object whose value, if it has one, is a number. Errors: ValueError."""
        _ = self._value(document)

    def _value(self, document: CorpusDocument) -> float:
        """NaN if the document has none. Errors: ValueError where it is not a number."""
        found: object = document.fields
        for name in self.by.split("."):
            if not isinstance(found, dict) or found.get(name) is None:
                return math.nan
            found = found[name]
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ValueError(f"{self.by} {found!r}: must be a number, or null")
        return float(found)

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Ranks all values."""
        by_part = [notes(stage_folder(folder, 0), part)["values"] for part in parts]
        values = np.concatenate([np.zeros(0), *by_part])
        if len(values) and np.isnan(values).all():
            raise ValueError(f"--by {self.by}: no document has it")
        marks = np.zeros(len(values), np.bool_)
        ranked = np.argsort(values, kind="stable")  # NaN is last
        marks[ranked[: min(int(len(values) * self.share), int((~np.isnan(values)).sum()))]] = True
        ends = np.cumsum([len(each) for each in by_part])
        with whole_file(folder / _MARKS) as file:
            own = {part: marks[end - len(values) : end] for part, values, end in zip(parts, by_part, ends, strict=True)}
            np.savez(file, **own)  # type: ignore[arg-type]  # no part is called allow_pickle
        if self.report:
            write_record(Path(self.report), self._figures(values, marks))

    def _figures(self, values: NDArray[np.float64], marks: NDArray[np.bool_]) -> dict[str, Json]:
        known, chosen = values[~np.isnan(values)], values[marks]
        sets = {"all": known, "above": known[known > self.above], "not above": known[known <= self.above]}
        found: dict[str, Json] = {
            name: {"documents": len(own), "mean": float(own.mean()), "deviation": float(own.std())}
            for name, own in sets.items()
            if len(own)
        }
        found |= {"documents": len(values), "without a value": len(values) - len(known), "kept": len(chosen)}
        found["share above"] = float((known > self.above).mean())
        if len(chosen):
            found["kept from"], found["kept to"] = float(chosen.min()), float(chosen.max())
        return found

    def judge(self, folder: Path) -> Work:
        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            marks: list[bool] = []
            for index, document in enumerate(documents):
                if not index:
                    marks = np.load(folder / _MARKS)[document.part].tolist()
                if marks[index]:
                    yield kept(document)
                else:
                    yield dropped("no value" if math.isnan(self._value(document)) else "not among the least")

        return judge
