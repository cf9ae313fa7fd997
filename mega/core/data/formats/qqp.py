"""Read QQP (Quora 2017) in GLUE's format. The labels state whether two questions have the same meaning.

Columns are separated by tabs, with one header line and no quoting. A file has six columns: id, qid1, qid2, question1,
question2, is_duplicate. A file without labels has three columns: id, question1, question2. The original files contain
some rows with a different number of columns or with an empty question. These rows are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mega.core.data.formats.glue import number, table
from mega.core.data.labelled import Format, Note, Question, clean

LABELS = ("different", "duplicate")


def read(flag: str, path: Path, note: Note) -> Iterator[Question]:
    """Read the questions of QQP. Errors: ValueError naming file and line if the header differs, or a label is neither 0
    nor 1."""
    header, lines = table(flag, path)
    if len(header) not in (3, 6):
        raise ValueError(
            f"{flag} {path}: its header has {len(header)} columns; QQP's has 6 (id qid1 qid2 question1 question2 "
            "is_duplicate), or 3 without labels (id question1 question2)"
        )
    labelled, skipped, example = len(header) == 6, 0, ""
    for location, columns in lines:
        texts = columns[3:5] if labelled else columns[1:3]
        first, second = (clean(text) for text in texts) if len(columns) == len(header) else ("", "")
        if not first or not second:
            skipped, example = skipped + 1, example or location.rpartition(":")[2]
            continue
        if labelled and columns[5].strip() not in ("0", "1"):
            raise ValueError(f"{location}: the label is {columns[5].strip()!r}; valid: 0, 1")
        yield Question(number(location, columns[0]), (first,), second, int(columns[5]) if labelled else None)
    if skipped:
        note(f"{skipped} rows of other widths or with an empty question are left out, the first in line {example}")


FORMAT = Format("qqp", LABELS, read)
