"""Cuts benchmark questions out of a corpus, together with the text around each question.

    survey    count each n-gram; an n-gram that occurs `common` times or more is a common phrase and is not cut
    judge     cut each document at the remaining n-grams, and keep the pieces that are long enough

Source: Megatron-LM 23.06, tools/openwebtext/filter_ngrams.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.contamination import Finder, before_and_after, ngrams, questions
from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, keep_document, stage_folder
from mega.core.corpus.folder import read_record, write_record
from mega.core.corpus.repeats import notes

_DICTIONARY = "dictionary.json"


class Pieces(NamedTuple):
    """The pieces of a document that remain after cutting. trimmed: whether exactly one piece remains and is shorter
    than the document."""

    texts: list[str]
    trimmed: bool


@dataclass(frozen=True, kw_only=True)
class Decontaminate:
    """Cuts the n-grams of benchmark questions out of each document."""

    name: ClassVar[str] = "decontaminate"
    stages: ClassVar[int] = 1
    key: str = "text"
    """JSON key of the text."""
    tasks: tuple[tuple[str, str], ...] = ()
    """Names and files of the benchmarks."""
    shortest: int = 8
    """Minimum number of words in a question. Shorter questions are ignored."""
    longest: int = 13
    """Maximum number of words in an n-gram; a longer question has several n-grams."""
    common: int = 10
    """An n-gram that occurs at least this often in the corpus is a common phrase and is not cut."""
    least: int = 200
    """A piece with this many characters or fewer is dropped."""
    margin: int = 200
    """Minimum number of characters that are cut on each side of an n-gram."""
    most_pieces: int = 10
    """A document cut into more pieces than this is dropped."""
    save: str = ""
    """File to which the n-grams and their counts are written; "" writes no file."""
    load: str = ""
    """File of n-grams and counts to use instead of the n-grams of `tasks`; "" if not used."""
    as_megatron: bool = False
    """Whether every document gets a split_id and offsets refer to the lower-cased text, as in Megatron-LM."""

    def ngrams(self) -> dict[str, int]:
        """Return a dict: n-gram -> number of its words, for the n-grams of all tasks or of the file `load`. Errors:
        ValueError."""
        if not self.load:
            texts = (text for task, path in self.tasks for text in questions(task, Path(path)))
            return ngrams(texts, self.shortest, self.longest)
        counts = read_record(Path(self.load))
        if not counts or not all(isinstance(count, int) for count in counts.values()):
            raise ValueError(f"--load-dictionary {self.load}: must be a JSON object of n-grams and their counts")
        return {ngram: ngram.count(" ") + 1 for ngram in counts}

    def survey(self, stage: int, folder: Path) -> Survey:
        """Return the survey function, which counts documents. The function also counts n-grams, unless a file with
        their counts was loaded."""
        finder = Finder(self.ngrams(), self.longest, self.as_megatron)
        numbers = {ngram: number for number, ngram in enumerate(finder.ngrams)}

        def survey(documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
            total, occurrence_counts = 0, Counter[str]()
            for document in documents:
                total += 1
                if not self.load and finder.may_have(document.text):
                    occurrence_counts.update(occurrences(document.text, finder))
            pairs = sorted((numbers[ngram], count) for ngram, count in occurrence_counts.items())
            return {"counts": np.array(pairs, np.int64).reshape(-1, 2), "documents": np.array([total])}

        return survey

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Write the n-grams that are not common phrases."""
        names = list(self.ngrams())
        counts = np.zeros(len(names), np.int64)
        begins: dict[str, int] = {}
        total = 0
        for part in parts:
            part_notes = notes(stage_folder(folder, stage), part)
            counts[part_notes["counts"][:, 0]] += part_notes["counts"][:, 1]
            begins[part] = total
            total += int(part_notes["documents"][0])
        kept_ngrams = {
            name: int(count) for name, count in zip(names, counts, strict=True) if self.load or count < self.common
        }
        write_record(folder / _DICTIONARY, kept_ngrams)
        write_record(folder / "begins.json", begins)
        if self.save:
            write_record(Path(self.save), kept_ngrams)

    def judge(self, folder: Path) -> Work:
        """Return the function for the final pass, which cuts the documents."""
        dictionary = json.loads((folder / _DICTIONARY).read_bytes())
        begins = json.loads((folder / "begins.json").read_bytes())
        finder = Finder({ngram: ngram.count(" ") + 1 for ngram in dictionary}, self.longest, self.as_megatron)

        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            for index, document in enumerate(documents):
                yield self._judged(document, begins[document.part] + index + 1, finder)

        return judge

    def _judged(self, document: CorpusDocument, number: int, finder: Finder) -> Result:
        if not finder.may_have(document.text):
            return self._whole(document, number)
        pieces, trimmed = self.pieces(document.text, finder)
        if pieces == [document.text]:
            return self._whole(document, number)
        if not pieces or len(pieces) > self.most_pieces:
            return Result((), "nothing left" if not pieces else f"more than {self.most_pieces} pieces")
        lines = [document.with_text(piece, **self._split_id(document, number, i)) for i, piece in enumerate(pieces)]
        return Result(lines, counts={"trimmed" if trimmed else "split": 1})

    def _whole(self, document: CorpusDocument, number: int) -> Result:
        if not self.as_megatron or document.plain:
            return keep_document(document)
        return Result((document.with_fields(**self._split_id(document, number, 0)),))

    def _split_id(self, document: CorpusDocument, number: int, piece: int) -> dict[str, str]:
        if document.plain:
            return {}
        old = document.fields.get("split_id")
        tasks = "-".join(task for task, _ in self.tasks)
        return {"split_id": f"{f'{old}-' if old is not None else ''}{tasks}-{number:010}-{piece:04}"}

    def pieces(self, text: str, finder: Finder) -> Pieces:
        """Return the pieces of a text that contain no n-gram, in order."""
        waiting, free = [text], []
        while waiting:
            part = waiting.pop(0)
            if (hit := finder.first(part)) is None:
                free.append(part)
                continue
            before, after = before_and_after(part, hit, self.margin)
            if len(before) > self.least:
                free.append(before)
            if len(after) > self.least:
                waiting.append(after)
        return Pieces(free, len(free) == 1 and len(free[0]) < len(text))


def occurrences(text: str, finder: Finder) -> Counter[str]:
    """Count each n-gram in a text. The search continues after the end of each match."""
    counts: Counter[str] = Counter()
    while (hit := finder.first(text)) is not None:
        counts[hit.ngram] += 1
        text = text[hit.begin + len(hit.ngram) + 1 :]
    return counts
