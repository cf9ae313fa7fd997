"""Drops near duplicates, that is, documents whose shingles overlap enough. The first document of each group is kept.

    survey 0     compute signatures, and a key for each band of a signature
    conclude 0   two documents with an equal key are a candidate pair
    survey 1     write the shingles of all documents in candidate pairs
    conclude 1   group the documents of pairs whose exact overlap is `threshold` or more; mark all but the first of each
                 group

The overlap of a dropped document with some other document of its group is therefore at least the threshold. A pair is
missed if its documents have no equal band. With the default settings, 0.2 % of the pairs with a Jaccard similarity of
0.8 are missed. Documents of `against` precede all other documents and are not written. Source: Megatron-LM 23.06,
tools/openwebtext/find_duplicates.py, group_duplicate_url.py.
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
from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, drop_document, keep_document, stage_folder
from mega.core.corpus.folder import write_record
from mega.core.corpus.minhash import CharShingles, Overlap, Shingles, WordShingles, band_keys, overlap
from mega.core.corpus.repeats import notes
from mega.core.files import whole_file

REASON = "near duplicate"
RECORDED = 0.5
"""Megatron-LM's find_duplicates.py writes pairs whose overlap is larger than this value."""
_TOGETHER = 128


@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    """Drops documents whose shingles overlap with those of an earlier document by a given fraction."""

    name: ClassVar[str] = "near-duplicates"
    stages: ClassVar[int] = 2
    key: str = "text"  # JSON key of the text
    threshold: float = 0.8  # Minimum overlap of duplicates
    bands: int = 20  # Number of bands in a signature
    rows: int = 6  # Number of permutations in a band
    shingle_words: int = 5  # Number of words in a shingle
    overlap_of: Overlap = "union"  # The set by whose size the overlap is divided
    as_megatron: bool = False  # Whether to use the signatures and shingles of Megatron-LM's script
    id_key: str = "url"  # Key of a document's id in the files `groups` and `pairs`
    groups: str = ""  # File of JSON lines {"0": [id, id, ...]}, as in Megatron-LM; "" writes no file
    pairs: str = ""  # File of JSON lines {id: [{other id: overlap}, ...]}; "" writes no file

    @property
    def shingling(self) -> WordShingles | CharShingles:
        """The method that computes signatures and shingles."""
        if self.as_megatron:
            return CharShingles(self.bands * self.rows)
        return WordShingles(self.bands * self.rows, self.shingle_words)

    def survey(self, stage: int, folder: Path) -> Survey:
        """Return the survey function of a stage. Stage 0 computes the keys of all bands, and stage 1 the shingles of
        documents in candidate pairs."""
        self.shingling.load()
        return self._keys if stage == 0 else partial(self._shingles, folder)

    def _keys(self, documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
        blocks = [np.zeros((0, self.bands), np.uint64)]
        shingling, texts = self.shingling, (document.text for document in documents)
        while batch := list(islice(texts, _TOGETHER)):
            signatures = shingling.signatures(batch)
            keys = band_keys(signatures, self.bands)
            if not self.as_megatron:  # texts without words must not count as duplicates of each other
                keys[(signatures == 0xFFFFFFFF).all(1)] = NO_KEY
            blocks.append(keys)
        return {"keys": np.concatenate(blocks)}

    def _shingles(self, folder: Path, documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
        shingling = self.shingling
        numbers: list[int] = []
        hashes: list[Shingles] = [np.zeros(0, np.uint64)]
        ids: list[str] = []
        begin, paired = 0, np.zeros(0, np.bool_)
        for index, document in enumerate(documents):
            if not index:
                begin, paired = _marked(folder, document.part, "paired.bin")
            if paired[index]:
                numbers.append(begin + index)
                hashes.append(shingling.shingles(document.text))
                ids.append(self._id(document) if self.groups or self.pairs else "")
        ends = np.cumsum([len(document_hashes) for document_hashes in hashes[1:]], dtype=np.uint64)
        return {
            "numbers": np.array(numbers, np.uint64),
            "ends": ends,
            "hashes": np.concatenate(hashes),
            "ids": np.frombuffer(json.dumps(ids).encode(), np.uint8),
        }

    def _id(self, document: CorpusDocument) -> str:
        """Return the id of a document in the files `groups` and `pairs`. If the document has no id, return its
        location, which is slow to determine."""
        document_id = document.fields.get(self.id_key)
        return document.where if document_id is None else str(document_id)

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Determine which documents are compared (stage 0), or which documents are dropped (stage 1)."""
        if stage == 0:
            self._conclude_pairs(folder, parts)
        else:
            self._conclude_groups(folder, parts)

    def _conclude_pairs(self, folder: Path, parts: Sequence[str]) -> None:
        notes_folder = stage_folder(folder, 0)
        begins = begins_of([len(notes(notes_folder, part)["keys"]) for part in parts])
        keys = ((begin, notes(notes_folder, part)["keys"]) for begin, part in zip(begins, parts, strict=False))
        pairs_of_bands(folder, keys, begins[-1], self.bands)
        paired = np.zeros(begins[-1], np.bool_)
        with open(folder / "pairs.bin", "rb") as file:
            while len(document_numbers := np.fromfile(file, np.uint64, 1 << 20)):
                paired[document_numbers] = True
        _write_marks(folder, "paired.bin", paired)
        write_record(folder / "begins.json", dict(zip([*parts, ""], begins, strict=True)))

    def _conclude_groups(self, folder: Path, parts: Sequence[str]) -> None:
        notes_folder = stage_folder(folder, 1)
        total = int(_begins(folder)[""])
        blocks = (notes(notes_folder, part) for part in parts)
        ShingleFile.write(folder, ((block["numbers"], block["ends"], block["hashes"]) for block in blocks))
        groups = DocumentGroups(total)
        # Documents that are already in the same group are compared only if all pairs must be listed.
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
            self._write_lists(notes_folder, parts, list(members.values()), recorded)
        write_record(folder / "groups.json", {"groups": len(members)})

    def _write_lists(
        self, notes_folder: Path, parts: Sequence[str], groups: Sequence[Sequence[int]], pairs: Sequence[Pair]
    ) -> None:
        names: dict[int, str] = {}
        for part in parts:
            part_notes = notes(notes_folder, part)
            names |= zip(part_notes["numbers"].tolist(), json.loads(part_notes["ids"].tobytes()), strict=True)
        if self.groups:
            _write_lines(self.groups, ({str(i): [names[n] for n in group]} for i, group in enumerate(groups)))
        if self.pairs:
            mains: dict[int, list[dict[str, float]]] = {}
            for first, second, similarity in pairs:
                mains.setdefault(first, []).append({names[second]: similarity})
            _write_lines(self.pairs, ({names[first]: overlaps} for first, overlaps in mains.items()))

    def judge(self, folder: Path) -> Work:
        """Return the function for the final pass, which drops all documents of a group except the first."""

        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            marks = np.zeros(0, np.bool_)
            for index, document in enumerate(documents):
                if not index:
                    _, marks = _marked(folder, document.part, "dropped.bin")
                yield drop_document(REASON) if marks[index] else keep_document(document)

        return judge


def _begins(folder: Path) -> dict[str, int]:
    begins: dict[str, int] = json.loads((folder / "begins.json").read_bytes())
    return begins


def _write_marks(folder: Path, name: str, marks: NDArray[np.bool_]) -> None:
    with whole_file(folder / name) as file:
        file.write(marks.tobytes())


def _marked(folder: Path, part: str, name: str) -> tuple[int, NDArray[np.bool_]]:
    """Return the index of an input part's first document, and one mark per document of the part."""
    begins = _begins(folder)
    names = list(begins)  # in the order of the input parts
    begin, end = begins[part], begins[names[names.index(part) + 1]]
    with open(folder / name, "rb") as file:
        file.seek(begin)
        return begin, np.frombuffer(file.read(end - begin), np.bool_)


def _write_lines(path: str, lines: Iterable[Mapping[str, object]]) -> None:
    with whole_file(Path(path)) as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
