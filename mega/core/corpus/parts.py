"""The input of a step, cut into parts: runs of neighbouring lines that are processed together.

How files are cut depends on the files alone, not on workers or shards, so a part has the same name and the same
lines in every run: `00002-000005` is the sixth part of the third file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mega.core.corpus.documents import CorpusDocument
from mega.core.data.sources import BLOCK_BYTES, STDIN, BadLine, Kind, LineBlock, SourcePiece, blocks, kind_of, pieces

PART_BYTES = 1 << 24
"""Of text in a part of lines. A part of parquet is a row group, one of arrow a whole file."""


class UnreadLine(NamedTuple):
    """A line that is longer than any that is read."""

    where: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class InputPart:
    """source: where a worker reads the lines; blocks: the lines themselves, of a packed file, with the number of lines
    before them; plain: a line is text, not JSON; begin, end: stored bytes of all files before and after it.
    """

    file: int
    number: int
    source: SourcePiece
    plain: bool
    begin: int
    end: int
    blocks: tuple[LineBlock, ...] = ()
    lines_before: int | None = None

    @property
    def name(self) -> str:
        """Of the part, and the beginning of the name of its output.

        >>> lines = SourcePiece(Path("a"), "lines", 0, 9, 0)
        >>> InputPart(file=2, number=5, source=lines, plain=False, begin=0, end=9).name
        '00002-000005'
        """
        return f"{self.file:05}-{self.number:06}"

    @property
    def size(self) -> int:
        """Bytes that it keeps in memory."""
        return sum(block.size for block in self.blocks)

    def documents(self, key: str) -> Iterator[CorpusDocument | UnreadLine]:
        """The lines that are not blank, in order. Errors: ValueError where the file cannot be read."""
        number, index = 0, 0
        for block in self.blocks or blocks(self.source, (), text_lines=True):
            found = block.lines()
            for line in found.removesuffix(b"\n").split(b"\n") if found else ():
                number += 1
                if not line or line.isspace():
                    continue
                yield CorpusDocument(
                    line.removesuffix(b"\r"),
                    key=key,
                    plain=self.plain,
                    part=self.name,
                    index=index,
                    number=number,
                    locate=self.locate,
                )
                index += 1
            if block.problem:
                number += 1
                yield UnreadLine(self.locate(number), block.problem)

    def near(self, number: int) -> str:
        """The same as `locate` without reading the file: a line number that counts from the part's first byte."""
        first = self.source.first if self.source.kind == "lines" else 0
        return f"{self.source.path} (from byte {first}):{number}" if first else self.locate(number)

    def locate(self, number: int) -> str:
        """File and line of the part's line `number`, from 1."""
        if self.source.kind in ("parquet", "arrow"):
            return f"{self.source.path}: row {number} of row group {self.source.first}"
        if is_dump(self.source.path):
            return f"{self.source.path}: page {(self.lines_before or 0) + number}"
        before = self.lines_before
        if before is None:  # a line that begins before the part is the part's before it
            before = _line_ends(self.source.path, self.source.first - 1) + 1 if self.source.first else 0
        return f"{self.source.path}:{before + number}"


def _line_ends(path: Path, end: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (data := file.read(min(BLOCK_BYTES, end))):
            count, end = count + data.count(b"\n"), end - len(data)
    return count


def parts(paths: Sequence[Path], shard: tuple[int, int] = (0, 1), part_bytes: int = PART_BYTES) -> Iterator[InputPart]:
    """The parts of all files that shard i of n processes, i of 0 .. n - 1; those of all shards are all parts.

    A part belongs to the shard in whose equal share of all stored bytes it begins, a packed file as a whole.
    """
    index, count = shard
    sizes = [0 if path == STDIN else path.stat().st_size for path in paths]
    low, high = (sum(sizes) * i // count for i in (index, index + 1))
    high += index == count - 1  # an empty last file begins at the very end
    before = 0
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        for piece in pieces([path]):
            if is_dump(path):
                if low <= before < high:
                    yield from _unpacked_parts(number, piece, False, before, size, part_bytes)
                continue
            plain = is_plain(path)
            if piece.kind == "parquet" or (not _packed(path) and piece.kind in ("lines", "text")):
                found = _direct_parts(number, piece, plain, before, size, part_bytes)
                yield from (part for part in found if low <= part.begin < high)
            elif low <= before < high:
                yield from _unpacked_parts(number, piece, plain, before, size, part_bytes)
        before += size


def is_plain(path: Path) -> bool:
    """Whether the lines of a file are texts, not JSON."""
    return kind_of(path) == "text"


def is_dump(path: Path) -> bool:
    """Whether a file is a dump of Wikipedia, whose pages are its documents."""
    return path.name.lower().removesuffix(path.suffix.lower() if _packed(path) else "").endswith(".xml")


def _pages(read: Iterator[LineBlock]) -> Iterator[LineBlock]:
    """Blocks of whole pages, each one line: a line end inside is the character reference that means one."""
    rest = b""
    for block in read:
        rest += block.lines()
        *pages, rest = rest.split(b"</page>")
        found = [begun for page in pages for begun in _begun(page + b"</page>")]
        lines = b"".join(page.replace(b"\r", b"").replace(b"\n", b"&#10;") + b"\n" for page in found)
        if lines:
            yield block._replace(text=lines, problem=None)
    if b"<page>" in rest:
        raise BadLine(f"{block.name}: ends inside a page")


def _begun(text: bytes) -> list[bytes]:
    """The pages that begin in a text; where one lacks its end, it and the next one are two lines.

    >>> _begun(b" <page>a <page>b</page>")
    [b'<page>a ', b'<page>b</page>']
    """
    return [b"<page>" + page for page in text.split(b"<page>")[1:]]


def _packed(path: Path) -> bool:
    return path == STDIN or path.suffix.lower() in (".gz", ".zst", ".xz", ".bz2")


def _direct_parts(
    file: int, piece: SourcePiece, plain: bool, before: int, size: int, part_bytes: int
) -> Iterator[InputPart]:
    """Parts that can be read without what comes before them: row groups, and lines that are not packed."""
    rows = piece.kind == "parquet"
    step, last = (1, piece.last) if rows else (part_bytes, size)
    for number, first in enumerate(range(0, last, step)):
        end = min(first + step, last)
        source = SourcePiece(piece.path, "parquet" if rows else "lines", first, end, before)
        begin_byte, end_byte = (before + (size * at // last if rows else at) for at in (first, end))
        yield InputPart(file=file, number=number, source=source, plain=plain, begin=begin_byte, end=end_byte)


def _unpacked_parts(
    file: int, piece: SourcePiece, plain: bool, before: int, size: int, part_bytes: int
) -> Iterator[InputPart]:
    """Parts of a file that is read from its beginning."""
    kind: Kind = "arrow" if piece.kind == "arrow" else "packed lines"
    source = SourcePiece(piece.path, kind, piece.first, piece.last, before)
    number, lines, begin = 0, 0, before
    held: list[LineBlock] = []

    def part(end: int) -> InputPart:
        return InputPart(
            file=file,
            number=number,
            source=source,
            plain=plain,
            begin=begin,
            end=end,
            blocks=tuple(held),
            lines_before=lines,
        )

    read = blocks(source, (), text_lines=True)
    for block in _pages(read) if is_dump(piece.path) else read:
        held.append(block)
        if sum(each.size for each in held) >= part_bytes:
            yield part(block.read)
            lines += sum(each.lines().count(b"\n") + bool(each.problem) for each in held)
            number, begin, held = number + 1, block.read, []
    if held:
        yield part(before + size)
