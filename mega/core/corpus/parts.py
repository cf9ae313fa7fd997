"""Cut the input of a step into parts: runs of consecutive lines that are processed together.

The cuts depend only on the files, not on workers or shards. A part therefore has the same name and the same lines in
every run: `00002-000005` is the sixth part of the third file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mega.core.corpus.documents import CorpusDocument
from mega.core.data.sources import BLOCK_BYTES, STDIN, BadLine, Kind, LineBlock, SourcePiece, blocks, kind_of, pieces

PART_BYTES = 1 << 24
"""Number of bytes of text per part of lines. For parquet a part is a row group, for arrow a whole file."""


class UnreadLine(NamedTuple):
    """A line that exceeds the maximum line length."""

    where: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class InputPart:
    """Consecutive lines of one input file."""

    file: int  # Index of the file
    number: int  # Index of the part in the file
    source: SourcePiece  # Where a worker reads the lines
    plain: bool  # Whether a line is text, not JSON
    begin: int  # Number of stored bytes of all files before the part
    end: int  # Number of stored bytes of all files up to the end of the part
    blocks: tuple[LineBlock, ...] = ()  # The lines of the part, if the file is packed
    lines_before: int | None = None  # Number of lines of the file before `blocks`

    @property
    def name(self) -> str:
        """Name of the part, and first part of the names of its output files.

        >>> lines = SourcePiece(Path("a"), "lines", 0, 9, 0)
        >>> InputPart(file=2, number=5, source=lines, plain=False, begin=0, end=9).name
        '00002-000005'
        """
        return f"{self.file:05}-{self.number:06}"

    @property
    def size(self) -> int:
        """Number of bytes that the part holds in memory."""
        return sum(block.size for block in self.blocks)

    def documents(self, key: str) -> Iterator[CorpusDocument | UnreadLine]:
        """Yield the lines that are not blank, in order. Errors: ValueError if the file cannot be read."""
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
        """Like `locate`, but without reading the file: the line number is counted from the part's first byte."""
        first = self.source.first if self.source.kind == "lines" else 0
        return f"{self.source.path} (from byte {first}):{number}" if first else self.locate(number)

    def locate(self, number: int) -> str:
        """The location "file:number" of line `number` of the part, counting from 1."""
        if self.source.kind in ("parquet", "arrow"):
            return f"{self.source.path}: row {number} of row group {self.source.first}"
        if is_dump(self.source.path):
            return f"{self.source.path}: page {(self.lines_before or 0) + number}"
        before = self.lines_before
        if before is None:  # a line that begins before the part belongs to the previous part
            before = _line_ends(self.source.path, self.source.first - 1) + 1 if self.source.first else 0
        return f"{self.source.path}:{before + number}"


def _line_ends(path: Path, end: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (data := file.read(min(BLOCK_BYTES, end))):
            count, end = count + data.count(b"\n"), end - len(data)
    return count


def parts(paths: Sequence[Path], shard: tuple[int, int] = (0, 1), part_bytes: int = PART_BYTES) -> Iterator[InputPart]:
    """The parts of all files that shard i of n processes, with i in 0 .. n - 1.

    The stored bytes of all files are divided equally among the shards. A part belongs to the shard in whose share the
    part begins. A packed file is not divided.
    """
    index, count = shard
    sizes = [0 if path == STDIN else path.stat().st_size for path in paths]
    low, high = (sum(sizes) * i // count for i in (index, index + 1))
    high += index == count - 1  # include an empty last file, which begins at the very end
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
    """Whether the lines of a file are text, not JSON."""
    return kind_of(path) == "text"


def is_dump(path: Path) -> bool:
    """Whether a file is a Wikipedia dump, whose pages are its documents."""
    return path.name.lower().removesuffix(path.suffix.lower() if _packed(path) else "").endswith(".xml")


def _pages(read: Iterator[LineBlock]) -> Iterator[LineBlock]:
    """Blocks of whole pages, one page per line. Line ends inside a page become character references."""
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
    """The pages that begin in a text. A page without an end becomes a separate line.

    >>> _begun(b" <page>a <page>b</page>")
    [b'<page>a ', b'<page>b</page>']
    """
    return [b"<page>" + page for page in text.split(b"<page>")[1:]]


def _packed(path: Path) -> bool:
    return path == STDIN or path.suffix.lower() in (".gz", ".zst", ".xz", ".bz2")


def _direct_parts(
    file: int, piece: SourcePiece, plain: bool, before: int, size: int, part_bytes: int
) -> Iterator[InputPart]:
    """Parts that can be read independently: row groups, and lines of files that are not packed."""
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
    """Parts of a file that must be read from its beginning."""
    kind: Kind = "arrow" if piece.kind == "arrow" else "packed lines"
    source = SourcePiece(piece.path, kind, piece.first, piece.last, before)
    number, lines, begin = 0, 0, before
    part_blocks: list[LineBlock] = []  # sent to the worker, which cannot start reading in the middle of a packed file

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
