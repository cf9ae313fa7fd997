"""Rows of parquet and arrow files as JSON lines. It runs as a child of `untrusted.Confined`, which sets limits: a file
of others may ask its library for any memory, or end it. Its questions:

    {"path", "kind"}               how many row groups a parquet file has; 1 of an arrow stream
    {"reader", "path", "kind", "keys", "first", "last", "done"}
                                   begin to read these columns (all, if there are none) of row groups first .. last - 1,
                                   after `done` of their rows, under the number `reader`; null
    {"reader"}                     its next {RAW: lines, "rows", "read"}; null at the end. read: bytes of the file
                                   before the end of the rows
    {"reader", "close"}            drop it; null
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mega.core.untrusted import RAW, Json, serve

_ROWS = 1024
_BLOCK_BYTES = 1 << 22

Rows = Iterator[tuple[Any, int]]
"""A record batch, and the stored bytes of the file before its end."""


def _columns(names: Sequence[str], keys: Sequence[str]) -> list[str]:
    missing = [key for key in keys if key not in names]
    if missing:
        raise ValueError(f'no column "{missing[0]}"; there are {", ".join(names)}')
    return list(keys or names)


def _parquet_rows(path: Path, keys: Sequence[str], first: int, last: int, done: int) -> Rows:
    import pyarrow.parquet

    file, size = pyarrow.parquet.ParquetFile(path), path.stat().st_size
    columns, groups = _columns(file.schema_arrow.names, keys), file.num_row_groups
    for group in range(first, last):
        rows = file.metadata.row_group(group).num_rows
        if done >= rows:
            done -= rows
            continue
        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
            skip = min(done, batch.num_rows)
            done -= skip
            yield from _in_blocks(batch.slice(skip), size * (group + 1) // groups)


def _arrow_rows(path: Path, keys: Sequence[str], first: int, last: int, done: int) -> Rows:
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as stored:
        stream = pyarrow.ipc.open_stream(stored)
        columns = _columns(stream.schema.names, keys)
        for batch in stream:
            batch.validate(full=True)  # offsets beyond what is stored would be followed
            chosen = batch.select(columns)
            for begin in range(0, chosen.num_rows, _ROWS):
                part = chosen.slice(begin, _ROWS)
                skip = min(done, part.num_rows)
                done -= skip
                yield from _in_blocks(part.slice(skip), stored.tell())


def _in_blocks(batch: Any, read: int) -> Rows:
    """A batch in parts that take little memory as text, each of one row at least."""
    rows = max(1, batch.num_rows * _BLOCK_BYTES // max(batch.nbytes, _BLOCK_BYTES))
    for begin in range(0, batch.num_rows, rows):
        yield batch.slice(begin, rows), read


_readers: dict[Any, Rows] = {}
"""By number."""


def answer(question: dict[str, Any]) -> Any:
    """See above."""
    number, path, kind = question.get("reader"), question.get("path"), question.get("kind")
    if "close" in question:
        del _readers[number]
        return None
    if path is None:
        return _next(_readers[number])
    if number is None:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path).num_row_groups if kind == "parquet" else 1
    read = _parquet_rows if kind == "parquet" else _arrow_rows
    _readers[number] = read(Path(path), *(question[name] for name in ("keys", "first", "last", "done")))
    return None


def _next(rows: Rows) -> dict[str, Json] | None:
    import orjson

    found = next(rows, None)
    if found is None:
        return None
    # What JSON cannot represent (bytes, decimals) is not text either: null is refused with its row.
    lines = b"".join(orjson.dumps(row, default=lambda value: None) + b"\n" for row in found[0].to_pylist())
    return {RAW: lines, "rows": found[0].num_rows, "read": found[1]}


if __name__ == "__main__":
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the others reserve what they may never use
    serve(answer)
