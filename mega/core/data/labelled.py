"""Build classification samples for BERT: texts with one or two parts, packed into rows, and their classes.

    [CLS] first [SEP] second [SEP]        type 0 up to the first [SEP], then 1; padded with [PAD] of type 0

A sample with several choices (RACE) has one row per choice, with different first parts and the same second part. This
module does not depend on file formats; a `Format` (formats/) reads the files. torch is imported only to build a batch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mega.core.data.cache import Arrays, cached
from mega.core.text.tokenizer import Roles, Tokenizer

if TYPE_CHECKING:
    from mega.core.batch import MaskedBatch

Note = Callable[[str], None]
NAMES = ("ids", "offsets", "firsts", "seconds", "labels", "uids", "notes")


class Question(NamedTuple):
    """One sample as text."""

    uid: int  # Number of the question in the file
    firsts: tuple[str, ...]  # The first part of each choice
    second: str  # The second part
    label: int | None  # Index of the class or choice; None if the file has no labels


@dataclass(frozen=True)
class Format:
    """The file format of a benchmark."""

    name: str
    """Name of the task."""
    labels: tuple[str, ...]
    """Names of the classes, or of the choices."""
    read: Callable[[str, Path, Note], Iterator[Question]]
    """Function (flag, path, note) -> questions. Errors: ValueError naming the line. Messages passed to `note` contain
    neither flag nor path."""
    choices: int = 1
    """Number of rows in a sample."""
    most_first: int | None = None
    """Maximum number of tokens in a first part."""


class LabelledRow(NamedTuple):
    """One sample as tokens."""

    tokens: NDArray[np.int64]  # int64 [choices, s]
    types: NDArray[np.int64]  # int64 [choices, s]
    lengths: NDArray[np.int64]  # int64 [choices]
    label: int  # Index of the class or choice, or -1


def clean(text: str) -> str:
    """Normalize text as Megatron-LM does: single spaces, and no space before a full stop that is followed by a space.

    >>> clean("A cat .\\n It  sat . ")
    'A cat. It sat.'
    """
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text.strip()


def set_name(path: str) -> str:
    """Return the name of a set: its path within the benchmark's folder, or the file name.

    >>> set_name("GLUE/MNLI/dev_matched.tsv"), set_name("data/RACE/dev/middle/"), set_name("/tmp/a.tar.gz")
    ('dev-matched', 'dev-middle', 'a')
    """
    parts = [part for part in path.split("/") if part]
    benchmark_folders = [place for place, part in enumerate(parts) if part.upper() in ("MNLI", "QQP", "RACE")]
    rest = (
        parts[benchmark_folders[-1] + 1 :]
        if benchmark_folders and benchmark_folders[-1] + 1 < len(parts)
        else parts[-1:]
    )
    rest[-1] = re.sub(r"\.(tsv|tar|tgz|gz|txt)$", "", re.sub(r"\.gz$", "", rest[-1]))
    name = "-".join(rest).replace("_", "-")
    return f"set-{name}" if name in ("train", "valid", "test") else name


def set_names(paths: Sequence[str]) -> dict[str, str]:
    """Return a map from the name of each set to the path of the set. Errors: ValueError if two sets have the same
    name."""
    paths_by_name: dict[str, str] = {}
    for path in paths:
        if paths_by_name.setdefault(name := set_name(path), path) != path:
            raise ValueError(f"--valid-data {path}: is named {name}, as {paths_by_name[name]} is; rename one of them")
    return paths_by_name


class LabelledSet:
    """All questions of a set of files, as tokens. The second part of a row is truncated so that the row has at most
    seq_length tokens.

    arrays: concatenated ids, and the offsets of the texts; firsts, int64 [n, choices], and seconds, int64 [n], text
    indices; labels, int64 [n], -1 for a missing label; uids, int64 [n].
    """

    def __init__(self, arrays: Arrays, roles: Roles, seq_length: int, digest: str) -> None:
        self._ids, self._offsets = arrays["ids"], arrays["offsets"]
        self._firsts, self._seconds = arrays["firsts"], arrays["seconds"]
        self.labels, self.uids = arrays["labels"], arrays["uids"]
        self._roles, self.length, self.digest = roles, seq_length, digest

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def cut(self) -> int:
        """Number of rows that are longer than `length`."""
        return int((self._sizes(slice(None)) > self.length).sum())

    @property
    def rows(self) -> int:
        return int(self._firsts.size)

    def row(self, number: int, width: int | None = None) -> LabelledRow:
        """Return question `number` as tokens. width: padded length of the row; default: `length`."""
        second = self._text(self._seconds[number])
        packed = [pack(self._text(first), second, self._roles, self.length) for first in self._firsts[number]]
        width = width or self.length
        tokens = np.full((len(packed), width), self._roles.pad, np.int64)
        types = np.zeros_like(tokens)
        for row, (ids, begin) in enumerate(packed):
            tokens[row, : len(ids)], types[row, begin : len(ids)] = ids, 1
        lengths = np.array([len(ids) for ids, _ in packed], np.int64)
        return LabelledRow(tokens, types, lengths, int(self.labels[number]))

    def longest(self, numbers: Sequence[int]) -> int:
        """Return the number of tokens in the longest packed row of the questions `numbers`."""
        return min(self.length, int(self._sizes(list(numbers)).max()))

    def _sizes(self, numbers: slice | list[int] | NDArray[np.integer]) -> NDArray[np.integer]:
        """Return the number of tokens in each row before truncation, [questions, choices]."""
        sizes: NDArray[np.integer] = np.diff(self._offsets)
        row_sizes: NDArray[np.integer] = sizes[self._firsts[numbers]] + sizes[self._seconds[numbers]][:, None] + 3
        return row_sizes

    def _text(self, number: int) -> list[int]:
        text_ids: list[int] = self._ids[self._offsets[number] : self._offsets[number + 1]].tolist()
        return text_ids


def pack(first: Sequence[int], second: Sequence[int], roles: Roles, limit: int) -> tuple[list[int], int]:
    """Return the ids of a row of at most `limit` tokens, and the first position of type 1. A truncated row still ends
    with [SEP].

    >>> roles = Roles(cls=1, sep=2, mask=3, pad=0, bos=4, eos=5, sentinels=())
    >>> pack([7, 8], [9], roles, 6), pack([7, 8], [9], roles, 5), pack([7, 8], [9], roles, 3)
    (([1, 7, 8, 2, 9, 2], 4), ([1, 7, 8, 2, 2], 4), ([1, 7, 2], 2))
    """
    ids = [roles.cls, *first, roles.sep, *second][: limit - 1]
    return [*ids, roles.sep], min(len(first) + 2, len(ids))


def labelled_set(
    flag: str, path: str, form: Format, tokenizer: Tokenizer, *, seq_length: int, cache: Path | None, note: Note
) -> LabelledSet:
    """Read the questions of one file or folder. note: function called with messages about truncated or skipped rows.

    Errors: ValueError naming flag, file and line.
    """
    roles, source = tokenizer.roles, f"{flag} {path}"
    if roles is None:
        raise ValueError(f"--tokenizer {tokenizer.kind}: has no CLS and SEP, which --task {form.name} packs rows with")
    source_path = Path(path)
    if not source_path.exists():
        raise ValueError(f"{source}: there is no such file or folder")
    digest = content(source_path)
    key = {"kind": form.name, "content": digest, "tokenizer": tokenizer.fingerprint()}
    arrays = cached(cache, key, NAMES, lambda: _tokenised(flag, source_path, form, tokenizer))
    for line in bytes(arrays["notes"].tolist()).decode().splitlines():
        note(f"{source}: {line}")
    dataset = LabelledSet(arrays, roles, seq_length, digest)
    if dataset.cut:
        note(
            f"{source}: {dataset.cut} of {dataset.rows} rows are longer than --seq-length {seq_length} "
            "and lose their end"
        )
    return dataset


def content(path: Path) -> str:
    """Return a digest of a file, or of the files of a folder."""
    digest = hashlib.sha256()
    for part in [path] if path.is_file() else sorted(path.rglob("*.txt")):
        digest.update(hashlib.sha256(part.read_bytes()).digest())
    return digest.hexdigest()


@dataclass
class _Texts:
    """Tokenized texts. If consecutive questions have the same second part, it is stored once."""

    tokenizer: Tokenizer
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    last: tuple[str | None, int] = (None, -1)

    def add(self, text: str, limit: int | None = None) -> int:
        """Tokenize a text, and return its index."""
        text_ids = np.array(self.tokenizer.encode(text)[:limit], np.int32)
        self.ids.append(text_ids)
        return len(self.ids) - 1

    def shared(self, text: str) -> int:
        if text != self.last[0]:
            self.last = text, self.add(text)
        return self.last[1]


def _tokenised(flag: str, path: Path, form: Format, tokenizer: Tokenizer) -> Arrays:
    notes: list[str] = []
    texts, firsts, seconds, labels, uids = _Texts(tokenizer), list[list[int]](), list[int](), list[int](), list[int]()
    for question in form.read(flag, path, notes.append):
        seconds.append(texts.shared(question.second))
        firsts.append([texts.add(first, form.most_first) for first in question.firsts])
        labels.append(-1 if question.label is None else question.label)
        uids.append(question.uid)
    if not firsts:
        raise ValueError(f"{flag} {path}: holds no question of {form.name.upper()}")
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in texts.ids])]).astype(np.int64)
    return {
        "ids": np.concatenate(texts.ids),
        "offsets": offsets,
        "firsts": np.array(firsts, np.int64),
        "seconds": np.array(seconds, np.int64),
        "labels": np.array(labels, np.int64),
        "uids": np.array(uids, np.int64),
        "notes": np.array(
            list("\n".join(notes).encode()), np.uint16
        ),  # cached, so that the messages are repeated when the set is read from the cache
    }


class LabelledDataset:
    """A dataset of at least `samples` samples from several sets. Each pass consists of whole global batches.

    batch: number of samples in a global batch.
    seed: pass i is shuffled with seed + i. If None, passes are not shuffled.
    keep_last: whether to pad an incomplete last batch of a pass with samples of weight 0 instead of dropping the batch.
    A set smaller than one batch is always padded.
    """

    def __init__(
        self, sets: Sequence[LabelledSet], *, samples: int, batch: int, seed: int | None, keep_last: bool
    ) -> None:
        self._sets, self._seed, self._ends = tuple(sets), seed, np.cumsum([len(one) for one in sets])
        self.questions = int(self._ends[-1])
        self.one_pass = pass_length(self.questions, batch, keep_last)
        self._samples = -(-samples // self.one_pass) * self.one_pass
        self._order: tuple[int, NDArray[np.integer]] = (0, self._shuffled(0))

    def __len__(self) -> int:
        return self._samples

    @property
    def passed(self) -> int:
        """Number of questions that one pass reads."""
        return min(self.questions, self.one_pass)

    def _shuffled(self, number: int) -> NDArray[np.integer]:
        if self._seed is None:
            return np.arange(self.questions)
        return np.random.RandomState((self._seed + number) % 2**32).permutation(self.questions)

    def __getitem__(self, sample: int) -> LabelledRow:
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}, there are {len(self)}")
        number, within = divmod(sample, self.one_pass)
        order = self._order  # local copy: the read-ahead thread may assign another pass
        if order[0] != number:
            order = self._order = number, self._shuffled(number)
        if within >= self.questions:
            return self._question(0)._replace(label=-1)
        return self._question(int(order[1][within]))

    def _question(self, number: int) -> LabelledRow:
        set_index = int(np.searchsorted(self._ends, number, side="right"))
        return self._sets[set_index].row(number - (int(self._ends[set_index - 1]) if set_index else 0))

    def collate(self, rows: Sequence[LabelledRow], first_sample: int) -> MaskedBatch:
        """Build a microbatch whose first sample is global sample `first_sample`."""
        return labelled_batch(rows, first_sample * len(rows[0].tokens))


def pass_length(questions: int, batch: int, keep_last: bool) -> int:
    """Return the number of samples in one pass over all questions, in whole batches.

    >>> pass_length(10, 4, False), pass_length(10, 4, True), pass_length(3, 4, False)
    (8, 12, 4)
    """
    return -(-questions // batch) * batch if keep_last else max(questions // batch, 1) * batch


def labelled_batch(rows: Sequence[LabelledRow], first_row: int) -> MaskedBatch:
    """Build a `MaskedBatch` without masks. It has one row per choice, and the classes as `pairs`, int64 [samples]."""
    import torch

    from mega.core.batch import MaskedBatch

    tokens, types, lengths = (torch.from_numpy(np.concatenate(part)) for part in list(zip(*rows, strict=True))[:3])
    return MaskedBatch(
        tokens=tokens,
        labels=torch.zeros_like(tokens),
        loss_weights=torch.zeros(tokens.shape),
        types=types,
        lengths=lengths,
        pairs=torch.tensor([row.label for row in rows]),
        samples=torch.arange(first_row, first_row + len(tokens)),
    )
