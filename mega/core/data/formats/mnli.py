"""Read MNLI (Williams et al. 2018) in GLUE's format. The labels state whether the second sentence follows from the
first.

Columns are separated by tabs, with one header line and no quoting. Column 0 is the row number, columns 8 and 9 are the
sentences, and the last column is the label. A file with 10 columns has no labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mega.core.data.formats.glue import number, table
from mega.core.data.labelled import Format, Note, Question, clean

LABELS = ("contradiction", "entailment", "neutral")
UNLABELLED = 10


def read(flag: str, path: Path, note: Note) -> Iterator[Question]:
    """Read the questions of MNLI. Errors: ValueError naming file and line if a column is missing or empty, or a label
    is unknown."""
    header, lines = table(flag, path)
    if len(header) < UNLABELLED or [name.strip() for name in header[8:10]] != ["sentence1", "sentence2"]:
        raise ValueError(
            f"{flag} {path}: its header has {len(header)} columns; MNLI's has sentence1 and sentence2 as columns 9 and "
            f"10, and the label as the last of more than {UNLABELLED}"
        )
    for location, columns in lines:
        if len(columns) != len(header):
            raise ValueError(f"{location}: has {len(columns)} columns, and the header {len(header)}")
        first, second, label = clean(columns[8]), clean(columns[9]), columns[-1].strip()
        if not first or not second:
            raise ValueError(f"{location}: sentence{1 if not first else 2} is empty")
        if len(header) != UNLABELLED and label not in LABELS:
            raise ValueError(f"{location}: the label is {label!r}; valid: {', '.join(LABELS)}")
        label_index = None if len(header) == UNLABELLED else LABELS.index(label)
        yield Question(number(location, columns[0]), (first,), second, label_index)


FORMAT = Format("mnli", LABELS, read)
