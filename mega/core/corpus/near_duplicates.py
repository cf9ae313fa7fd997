"""Near duplicates: documents whose shingles overlap enough; of each group the first one stays.

    survey 0     signatures, and a key for each of their bands
    conclude 0   documents with an equal key are a pair that may overlap
    survey 1     the shingles of the documents in such pairs
    conclude 1   their overlap, exactly; groups of those that overlap by `threshold`; all but the first of each go

So what is dropped overlaps by the threshold with another one of its group, and what is missed has met it in no band:
by default 0.2 % of the pairs at a Jaccard similarity of 0.8. Documents of `against` come before all others and are not
written. Source: Megatron-LM 23.06, tools/openwebtext/find_duplicates.py, group_duplicate_url.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.buckets import (
    NO_KEY,
    DocumentGroups,
    Pair,
    ShingleFile,
    begins_of,
    pairs_of_bands,
    similar_pairs,
)
from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, dropped, kept, stage_folder
from mega.core.corpus.folder import write_record
from mega.core.corpus.minhash import CharShingles, Overlap, Shingles, WordShingles, band_keys, overlap
from mega.core.corpus.repeats import notes
from mega.core.files import whole_file

REASON = "near duplicate"
RECORDED = 0.5
"""Pairs of a larger overlap are what Megatron-LM's find_duplicates.py writes."""
_TOGETHER = 128


@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    """bands: each of `rows` permutations; id_key: of what identifies a document in `groups` and `pairs`.

    groups, pairs: files of JSON lines, in the forms of Megatron-LM's scripts: {"0": [id, id, ...]} and
    {id: [{other id: overlap}, ...]}.
    """

    name: ClassVar[str] = "near-duplicates"
    stages: ClassVar[int] = 2
    key: str = "text"
    threshold: float = 0.8
    bands: int = 20
    rows: int = 6
    shingle_words: int = 5
    overlap_of: Overlap = "union"
    as_megatron: bool = False
    id_key: str = "url"
    groups: str = ""
    pairs: str = ""

    @property
    def shingling(self) -> WordShingles | CharShingles:
        """How signatures and overlap are computed."""
        if self.as_megatron:
            return CharShingles(self.bands * self.rows)
        return WordShingles(self.bands * self.rows, self.shingle_words)

    def survey(self, stage: int, folder: Path) -> Survey:
        """Of stage 0 the keys of all bands; of stage 1 shingles, of documents that are in a pair."""
        self.shingling.load()
        return self._keys if stage == 0 else partial(self._shingles, folder)

    def _keys(self, documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
        found = [np.zeros((0, self.bands), np.uint64)]
        shingling, texts = self.shingling, (document.text for document in documents)
        while together := list(islice(texts, _TOGETHER)):
            signatures = shingling.signatures(together)
            keys = band_keys(signatures, self.bands)
            if not self.as_megatron:  # a text without words is no duplicate of another one
                keys[(signatures == 0xFFFFFFFF).all(1)] = NO_KEY
            found.append(keys)
        return {"keys": np.concatenate(found)}

    def _shingles(self, folder: Path, documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
        shingling = self.shingling
        numbers: list[int] = []
        hashes: list[Shingles] = [np.zeros(0, np.uint64)]
        ids: list[str] = []
        begin, wanted = 0, np.zeros(0, np.bool_)
        for index, document in enumerate(documents):
            if not index:
                begin, wanted = _marked(folder, document.part, "paired.bin")
            if wanted[index]:
                numbers.append(begin + index)
                hashes.append(shingling.shingles(document.text))
                ids.append(self._id(document) if self.groups or self.pairs else "")
        ends = np.cumsum([len(own) for own in hashes[1:]], dtype=np.uint64)
        return {
            "numbers": np.array(numbers, np.uint64),
            "ends": ends,
            "hashes": np.concatenate(hashes),
            "ids": np.frombuffer(json.dumps(ids).encode(), np.uint8),
        }

    def _id(self, document: CorpusDocument) -> str:
        """What names a document in lists. Its place is looked for only if there is no other name, which takes long."""
        found = document.fields.get(self.id_key)
        return document.where if found is None else str(found)

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Of stage 0 which documents are to be compared; of stage 1 which are dropped."""
        if stage == 0:
            self._conclude_pairs(folder, parts)
        else:
            self._conclude_groups(folder, parts)

    def _conclude_pairs(self, folder: Path, parts: Sequence[str]) -> None:
        own = stage_folder(folder, 0)
        begins = begins_of([len(notes(own, part)["keys"]) for part in parts])
        keys = ((begin, notes(own, part)["keys"]) for begin, part in zip(begins, parts, strict=False))
        pairs_of_bands(folder, keys, begins[-1], self.bands)
        paired = np.zeros(begins[-1], np.bool_)
        with open(folder / "pairs.bin", "rb") as file:
            while len(found := np.fromfile(file, np.uint64, 1 << 20)):
                paired[found] = True
        _write_marks(folder, "paired.bin", paired)
        write_record(folder / "begins.json", dict(zip([*parts, ""], begins, strict=True)))

    def _conclude_groups(self, folder: Path, parts: Sequence[str]) -> None:
        own = stage_folder(folder, 1)
        total = int(_begins(folder)[""])
        blocks = (notes(own, part) for part in parts)
        ShingleFile.write(folder, ((found["numbers"], found["ends"], found["hashes"]) for found in blocks))
        groups = DocumentGroups(total)
        skip = groups.joined if not self.pairs else lambda first, second: False
        compare = partial(overlap, of=self.overlap_of)
        recorded: list[Pair] = []
        for pair in similar_pairs(
            folder, compare, min(self.threshold, RECORDED) if self.pairs else self.threshold, skip
        ):
            if pair.similarity >= self.threshold:
                groups.join(pair.first, pair.second)
            if self.pairs and pair.similarity > RECORDED:
                recorded.append(pair)
        members = groups.members()
        marks = np.zeros(total, np.bool_)
        for group in members.values():
            marks[group[1:]] = True
        _write_marks(folder, "dropped.bin", marks)
        if self.groups or self.pairs:
            self._write_lists(own, parts, list(members.values()), recorded)
        write_record(folder / "groups.json", {"groups": len(members)})

    def _write_lists(
        self, own: Path, parts: Sequence[str], groups: Sequence[Sequence[int]], pairs: Sequence[Pair]
    ) -> None:
        names: dict[int, str] = {}
        for part in parts:
            found = notes(own, part)
            names |= zip(found["numbers"].tolist(), json.loads(found["ids"].tobytes()), strict=True)
        if self.groups:
            _write_lines(self.groups, ({str(i): [names[n] for n in group]} for i, group in enumerate(groups)))
        if self.pairs:
            mains: dict[int, list[dict[str, float]]] = {}
            for first, second, similarity in pairs:
                mains.setdefault(first, []).append({names[second]: similarity})
            _write_lines(self.pairs, ({names[first]: others} for first, others in mains.items()))

    def judge(self, folder: Path) -> Work:
        """Drops all of a group but its first document."""

        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            marks = np.zeros(0, np.bool_)
            for index, document in enumerate(documents):
                if not index:
                    _, marks = _marked(folder, document.part, "dropped.bin")
                yield dropped(REASON) if marks[index] else kept(document)

        return judge


def _begins(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "begins.json").read_bytes())
    return found


def _write_marks(folder: Path, name: str, marks: NDArray[np.bool_]) -> None:
    with whole_file(folder / name) as file:
        file.write(marks.tobytes())


def _marked(folder: Path, part: str, name: str) -> tuple[int, NDArray[np.bool_]]:
    """The number of a part's first document, and the marks of its documents."""
    begins = _begins(folder)
    names = list(begins)  # in the order of the parts
    begin, end = begins[part], begins[names[names.index(part) + 1]]
    with open(folder / name, "rb") as file:
        file.seek(begin)
        return begin, np.frombuffer(file.read(end - begin), np.bool_)


def _write_lines(path: str, lines: Iterable[Mapping[str, object]]) -> None:
    with whole_file(Path(path)) as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
