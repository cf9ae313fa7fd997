"""Read rows of parquet and arrow files as JSON lines, in a child process. `untrusted.Confined` starts the child with a
memory limit, because an untrusted file can make the library crash or allocate any amount of memory. Requests:

    {"path", "kind"}               returns the number of row groups of a parquet file; 1 for an arrow stream
    {"reader", "path", "kind", "keys", "first", "last", "done"}
                                   opens reader number `reader` for these columns (all if `keys` is empty) and row
                                   groups first .. last - 1, skipping the first `done` rows; returns null
    {"reader"}                     returns the next {RAW: lines, "rows", "read"} of that reader; null at the end.
                                   read: number of bytes of the file up to the end of the rows
    {"reader", "close"}            closes the reader; returns null
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
"""Pairs (record batch, number of bytes of the file up to the end of the batch)."""


def _columns(names: Sequence[str], keys: Sequence[str]) -> list[str]:
    missing = [key for key in keys if key not in names]
    if missing:
        raise ValueError(f'no column "{missing[0]}"; there are {", ".join(names)}')
    return list(keys or names)


def _parquet_rows(path: Path, keys: Sequence[str], first: int, last: int, rows_done: int) -> Rows:
    import pyarrow.parquet

    file, size = pyarrow.parquet.ParquetFile(path), path.stat().st_size
    columns, groups = _columns(file.schema_arrow.names, keys), file.num_row_groups
    for group in range(first, last):
        rows = file.metadata.row_group(group).num_rows
        if rows_done >= rows:
            rows_done -= rows
            continue
        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
            skip = min(rows_done, batch.num_rows)
            rows_done -= skip
            yield from _in_blocks(batch.slice(skip), size * (group + 1) // groups)


def _arrow_rows(path: Path, keys: Sequence[str], first: int, last: int, rows_done: int) -> Rows:
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as stored:
        stream = pyarrow.ipc.open_stream(stored)
        columns = _columns(stream.schema.names, keys)
        for batch in stream:
            batch.validate(full=True)  # with invalid offsets, reads would be out of bounds
            selected = batch.select(columns)
            for begin in range(0, selected.num_rows, _ROWS):
                part = selected.slice(begin, _ROWS)
                skip = min(rows_done, part.num_rows)
                rows_done -= skip
                yield from _in_blocks(part.slice(skip), stored.tell())


def _in_blocks(batch: Any, read: int) -> Rows:
    """Split a batch into parts of limited text size, with at least one row each."""
    rows = max(1, batch.num_rows * _BLOCK_BYTES // max(batch.nbytes, _BLOCK_BYTES))
    for begin in range(0, batch.num_rows, rows):
        yield batch.slice(begin, rows), read


_readers: dict[Any, Rows] = {}
"""Reader number -> remaining rows of the reader."""


def answer(question: dict[str, Any]) -> Any:
    """Answer one request. See the module's docstring for the requests."""
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

    row_batch = next(rows, None)
    if row_batch is None:
        return None
    # Bytes and decimals, which JSON cannot represent, are written as null; the caller then rejects the row.
    lines = b"".join(orjson.dumps(row, default=lambda value: None) + b"\n" for row in row_batch[0].to_pylist())
    return {RAW: lines, "rows": row_batch[0].num_rows, "read": row_batch[1]}


if __name__ == "__main__":
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # other memory pools allocate in advance
    serve(answer)
