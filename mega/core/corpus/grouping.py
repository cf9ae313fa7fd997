"""Groups near duplicates that are listed in a file of pairs, and removes all documents of a group except the first.

    pairs    {id: [{other id: overlap}, ...]}      one object per line, from find_duplicates.py or --pairs
    groups   {"0": [id, id, ...]}                  one object per line, from group_duplicate_url.py or --groups

`mega corpus near-duplicates` finds pairs, groups them and removes documents in one call. This module also reads pairs
and groups that other programs wrote. The document of a group that comes first in the input is kept, whereas
Megatron-LM's script keeps an arbitrary document. Source: Megatron-LM 23.06, tools/openwebtext.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mega.core.corpus.buckets import DocumentGroups
from mega.core.corpus.documents import CorpusDocument, Result, Survey, Work, drop_document, keep_document, stage_folder
from mega.core.corpus.repeats import keys_of, mark_repeats, repeats
from mega.core.files import check_folder, whole_file
from mega.core.untrusted import parse_json

REASON = "in a group whose first is kept"


def group_pairs(pairs: Path, groups: Path, threshold: float) -> tuple[int, int]:
    """Write the groups of documents that overlap by `threshold` or more. Returns the number of groups and the number of
    documents.

    Groups, and ids within a group, are written in the order of first occurrence. Errors: ValueError naming file and
    line.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"--threshold {threshold}: must be greater than 0 and at most 1")
    check_folder("--groups", groups, groups.parent)
    if groups.resolve() == pairs.resolve():
        raise ValueError(f"--groups {groups}: is the file of pairs; name another")
    numbers: dict[str, int] = {}
    similar: list[tuple[int, int]] = []
    for location, row in _rows("--pairs", pairs):
        for main, overlaps in row.items():
            if not isinstance(overlaps, list) or not all(map(_is_overlap, overlaps)):
                raise ValueError(f"{location}: must be an object of lists of {{id: overlap}}")
            for other, overlap in ((id, value) for each in overlaps for id, value in each.items()):
                if overlap >= threshold:  # documents are numbered in the order of their first occurrence
                    similar.append((numbers.setdefault(main, len(numbers)), numbers.setdefault(other, len(numbers))))
    document_groups = DocumentGroups(len(numbers))
    for first, second in similar:
        document_groups.join(first, second)
    names, members = list(numbers), document_groups.members()
    groups.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(groups) as file:
        for number, group in enumerate(members.values()):
            row = {str(number): [names[each] for each in group]}
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return len(members), sum(map(len, members.values()))


def _is_overlap(entry: object) -> bool:
    values = entry.values() if isinstance(entry, dict) else [None]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _rows(flag: str, path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (location, object) for each line of a file. Errors: ValueError naming file and line."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                location = f"{flag} {path}:{number}"
                row = parse_json(line, location)
                if not isinstance(row, dict):
                    raise ValueError(f"{location}: must be an object")
                yield location, row
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: cannot be read ({error})") from None


@dataclass(frozen=True, kw_only=True)
class RemoveGroups:
    """Drops all documents of a group except the one that comes first in the input."""

    name: ClassVar[str] = "remove-groups"
    stages: ClassVar[int] = 1
    groups: str
    """File that lists the groups of near duplicates."""
    key: str = "url"
    """JSON key of a document's id."""

    def survey(self, stage: int, folder: Path) -> Survey:
        owner: dict[str, int] = {}
        groups: list[list[str]] = []
        for location, row in _rows("--groups", Path(self.groups)):
            for ids in row.values():
                if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
                    raise ValueError(f"{location}: must be an object of lists of ids")
                groups.append(ids)
        merged_groups = DocumentGroups(len(groups))
        for number, ids in enumerate(groups):
            for each in ids:  # a line is merged into an earlier group if both contain the same id
                merged_groups.join(owner.setdefault(each, number), number)

        def keys(documents: Iterable[CorpusDocument]) -> Mapping[str, NDArray[np.generic]]:
            numbers = (owner.get(document.text) for document in documents)
            return {
                "keys": keys_of(None if each is None else str(merged_groups.root(each)).encode() for each in numbers)
            }

        return keys

    def conclude(self, stage: int, folder: Path, parts: Sequence[str]) -> None:
        """Mark all documents of a group except the one that comes first in the input."""
        mark_repeats(stage_folder(folder, stage), parts)

    def judge(self, folder: Path) -> Work:
        def judge(documents: Iterable[CorpusDocument]) -> Iterator[Result]:
            marks: list[bool] = []
            for index, document in enumerate(documents):
                if not index:
                    marks = repeats(stage_folder(folder, 0), document.part).tolist()
                yield drop_document(REASON) if marks[index] else keep_document(document)

        return judge
