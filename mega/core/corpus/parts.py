"""Divides the input of a step into parts, each of which is a run of consecutive lines that are processed together.

The division depends only on the files, not on the number of workers or shards. A part therefore has the same name and
the same lines in every run. For example, `00002-000005` is the sixth part of the third file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mega.core.corpus.documents import CorpusDocument
from mega.core.data.sources import BLOCK_BYTES, STDIN, BadLine, Kind, LineBlock, SourcePiece, blocks, kind_of, pieces

PART_BYTES = 1 << 24
"""Number of bytes of text in each part of a line-based file. In Parquet files, each row group is a part; an Arrow file
is a single part."""


class UnreadLine(NamedTuple):
    """A line that is not read because it exceeds the maximum line length."""

    where: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class InputPart:
    """Consecutive lines of one input file."""

    file: int  # Index of the file
    number: int  # Index of the part in the file
    source: SourcePiece  # Location from which a worker reads the lines
    plain: bool  # Whether lines are plain text instead of JSON
    begin: int  # Number of stored bytes of all files before the part
    end: int  # Number of stored bytes of all files up to the end of the part
    blocks: tuple[LineBlock, ...] = ()  # The lines of the part, if the file is compressed
    lines_before: int | None = None  # Number of lines of the file before `blocks`

    @property
    def name(self) -> str:
        """Name of the part, with which the names of its output files begin.

        >>> lines = SourcePiece(Path("a"), "lines", 0, 9, 0)
        >>> InputPart(file=2, number=5, source=lines, plain=False, begin=0, end=9).name
        '00002-000005'
        """
        return f"{self.file:05}-{self.number:06}"

    @property
    def size(self) -> int:
        """Number of bytes of this input part's lines in memory."""
        return sum(block.size for block in self.blocks)

    def documents(self, key: str) -> Iterator[CorpusDocument | UnreadLine]:
        """Yield the documents of all lines that are not blank, in order. Errors: ValueError if the file cannot be
        read."""
        number, index = 0, 0
        for block in self.blocks or blocks(self.source, (), text_lines=True):
            lines = block.lines()
            for line in lines.removesuffix(b"\n").split(b"\n") if lines else ():
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
        """Return a location like `locate`, but without reading the file. The line number is therefore counted from the
        first byte of the part."""
        first = self.source.first if self.source.kind == "lines" else 0
        return f"{self.source.path} (from byte {first}):{number}" if first else self.locate(number)

    def locate(self, number: int) -> str:
        """Return the location "file:line" of line `number` of this input part; both numbers count from 1."""
        if self.source.kind in ("parquet", "arrow"):
            return f"{self.source.path}: row {number} of row group {self.source.first}"
        if is_dump(self.source.path):
            return f"{self.source.path}: page {(self.lines_before or 0) + number}"
        before = self.lines_before
        if before is None:  # a line that begins before this part belongs to the previous part
            before = _line_ends(self.source.path, self.source.first - 1) + 1 if self.source.first else 0
        return f"{self.source.path}:{before + number}"


def _line_ends(path: Path, end: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (data := file.read(min(BLOCK_BYTES, end))):
            count, end = count + data.count(b"\n"), end - len(data)
    return count


def parts(paths: Sequence[Path], shard: tuple[int, int] = (0, 1), part_bytes: int = PART_BYTES) -> Iterator[InputPart]:
    """Yield the parts of all files that shard i of n must process; shard = (i, n) with i in 0 .. n - 1.

    The stored bytes of all files are divided equally among the shards. A part belongs to the shard in whose range of
    bytes the part begins. All parts of a compressed file belong to the same shard.
    """
    index, count = shard
    sizes = [0 if path == STDIN else path.stat().st_size for path in paths]
    low, high = (sum(sizes) * i // count for i in (index, index + 1))
    high += index == count - 1  # include an empty last file, which begins after the last byte
    before = 0
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        for piece in pieces([path]):
            if is_dump(path):
                if low <= before < high:
                    yield from _unpacked_parts(number, piece, False, before, size, part_bytes)
                continue
            plain = is_plain(path)
            if piece.kind == "parquet" or (not _packed(path) and piece.kind in ("lines", "text")):
                direct_parts = _direct_parts(number, piece, plain, before, size, part_bytes)
                yield from (part for part in direct_parts if low <= part.begin < high)
            elif low <= before < high:
                yield from _unpacked_parts(number, piece, plain, before, size, part_bytes)
        before += size


def is_plain(path: Path) -> bool:
    """Whether the lines of a file are plain text instead of JSON."""
    return kind_of(path) == "text"


def is_dump(path: Path) -> bool:
    """Whether a file is a Wikipedia dump, in which each page is a document."""
    return path.name.lower().removesuffix(path.suffix.lower() if _packed(path) else "").endswith(".xml")


def _pages(read: Iterator[LineBlock]) -> Iterator[LineBlock]:
    """Yield blocks of whole pages of a Wikipedia dump, one page per line. Line ends within a page are replaced with
    character references."""
    rest = b""
    for block in read:
        rest += block.lines()
        *pages, rest = rest.split(b"</page>")
        complete_pages = [complete_page for page in pages for complete_page in _begun(page + b"</page>")]
        lines = b"".join(page.replace(b"\r", b"").replace(b"\n", b"&#10;") + b"\n" for page in complete_pages)
        if lines:
            yield block._replace(text=lines, problem=None)
    if b"<page>" in rest:
        raise BadLine(f"{block.name}: ends inside a page")


def _begun(text: bytes) -> list[bytes]:
    """Split a text before each `<page>`, so that a page without an end tag is separated from the next page.

    >>> _begun(b" <page>a <page>b</page>")
    [b'<page>a ', b'<page>b</page>']
    """
    return [b"<page>" + page for page in text.split(b"<page>")[1:]]


def _packed(path: Path) -> bool:
    return path == STDIN or path.suffix.lower() in (".gz", ".zst", ".xz", ".bz2")


def _direct_parts(
    file: int, piece: SourcePiece, plain: bool, before: int, size: int, part_bytes: int
) -> Iterator[InputPart]:
    """Yield the parts of a file that can be read from any position: row groups, and lines of uncompressed files."""
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
    """Yield the parts of a file that can only be read from its beginning, such as a compressed file."""
    kind: Kind = "arrow" if piece.kind == "arrow" else "packed lines"
    source = SourcePiece(piece.path, kind, piece.first, piece.last, before)
    number, lines, begin = 0, 0, before
    part_blocks: list[LineBlock] = []  # sent, because a worker cannot read from the middle of a compressed file

    def part(end: int) -> InputPart:
        return InputPart(
            file=file,
            number=number,
            source=source,
            plain=plain,
            begin=begin,
            end=end,
            blocks=tuple(part_blocks),
            lines_before=lines,
        )

    read = blocks(source, (), text_lines=True)
    for block in _pages(read) if is_dump(piece.path) else read:
        part_blocks.append(block)
        if sum(each.size for each in part_blocks) >= part_bytes:
            yield part(block.read)
            lines += sum(each.lines().count(b"\n") + bool(each.problem) for each in part_blocks)
            number, begin, part_blocks = number + 1, block.read, []
    if part_blocks:
        yield part(before + size)
