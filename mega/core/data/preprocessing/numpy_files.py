"""Convert token ids in .npy files, as written by Megatron-LM in 2019 and by other programs, to token files.

An array of integers is read directly. An array of arrays is stored as a pickle, which is not loaded. Instead, the
standard library's disassembler reads the pickle's opcodes without executing them, and only descriptions of integer
arrays are accepted.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mega.core.data.indexed import token_dtype
from mega.core.data.preprocessing.preprocess import Report
from mega.core.data.preprocessing.provenance import existing_pairs, work_of
from mega.core.data.preprocessing.writer import IndexedWriter
from mega.core.data.sources import find
from mega.core.files import check_folder

LARGEST = 2**31 - 1
"""The largest id that token files can store."""


def convert(inputs: Sequence[str | Path], output_prefix: str, eod: int | None, *, overwrite: bool = False) -> Report:
    """Write the documents of all files as one pair of token files.

    overwrite: whether to replace a pair made from other inputs. A pair made from the same inputs is always kept.
    Raises ValueError naming a file that contains data other than ids.
    """
    check_folder("--output-prefix", output_prefix, Path(output_prefix).parent)
    paths = [path for path in find(inputs) if path.suffix == ".npy"]
    if not paths:
        raise ValueError(f"--input {' '.join(map(str, inputs))}: holds no .npy file")
    work = work_of(["numpy", eod], paths)
    if kept_output := existing_pairs(output_prefix, [output_prefix], work, overwrite):
        pair = kept_output[0]
        return Report(documents=pair.documents, tokens=len(pair.tokens), outputs=[output_prefix], kept=True)
    all_small = all(document.dtype.itemsize < 3 for path in paths for document in documents(path, eod))
    with IndexedWriter(output_prefix, token_dtype(0 if all_small else 1 << 17), noted={"work": work}) as writer:
        for path in paths:
            for document in documents(path, eod):
                writer.extend(document, np.array([len(document)]), np.array([1]))
    return Report(documents=writer.documents, tokens=writer.tokens, outputs=[output_prefix])


def documents(path: Path, eod: int | None) -> Iterator[NDArray[np.integer]]:
    """Yield the documents of a file: the items of an array of arrays, the rows of a two-dimensional array, or all ids
    of any other array.

    eod: if given, this id ends a document within an array of ids. Example: 7 8 0 9 0 with eod 0 -> 7 8 0 | 9 0.
    """
    try:
        array = _array(path)
    except Exception as error:  # numpy can raise any exception for a damaged header
        raise ValueError(f"{path}: not an array of token ids ({error})") from None
    for row in array if array.dtype.hasobject or array.ndim == 2 else [array]:
        ids = np.asarray(row)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{path}: holds {ids.dtype} of {ids.ndim} dimensions; must be runs of whole numbers")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= LARGEST:
            raise ValueError(f"{path}: holds {ids.min()} to {ids.max()}; ids must be 0 to {LARGEST}")
        is_one_document = eod is None or array.dtype.hasobject
        yield from (
            part for part in ([ids] if is_one_document else np.split(ids, np.flatnonzero(ids == eod) + 1)) if len(part)
        )


def _array(path: Path) -> NDArray[np.integer]:
    with open(path, "rb") as file:
        major, _ = npy.read_magic(file)
        header = npy.read_array_header_1_0(file) if major == 1 else npy.read_array_header_2_0(file)
        shape, _, dtype = header
        if dtype.hasobject:
            rows = _rows(_described(file))
            if len(rows) != np.prod(shape, dtype=int):
                raise ValueError(f"{len(rows)} arrays, {shape} announced")
            row_array = np.empty(len(rows), object)
            row_array[:] = rows
            return row_array
    mapped: NDArray[np.integer] = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


# --- arrays of arrays -----------------------------------------------------------------------------------------------


class _Object:
    """Represents an object in a pickle by its name, arguments and state, without behavior."""

    def __init__(self, name: str, arguments: tuple[object, ...] = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: object = None


def _rows(whole: object) -> list[NDArray[np.integer]]:
    """Return the arrays that are the elements of an array of objects. The last element of numpy's state for this array
    lists them."""
    rows = whole.state[-1] if isinstance(whole, _Object) and isinstance(whole.state, tuple) else None
    if not isinstance(rows, list):
        raise ValueError("a pickle of something else than an array")
    return [_integers(row) for row in rows]


def _integers(row: Any) -> NDArray[np.integer]:
    """Return an array from a list of numbers, or from numpy's description: state = (version, shape, dtype, order,
    bytes)."""
    if isinstance(row, list) and all(type(token) is int for token in row):
        return np.array(row, np.int64)
    try:
        _, shape, dtype, _, data = row.state
        kind, order = dtype.arguments[0], dtype.state[1]
        array = np.frombuffer(data, np.dtype(kind).newbyteorder(order))
        if dtype.name != "numpy dtype" or np.dtype(kind).kind not in "iu" or array.shape != shape:
            raise TypeError
    except (AttributeError, TypeError, IndexError, ValueError):
        raise ValueError("an array that holds something else than arrays of whole numbers") from None
    return array


_LITERALS = frozenset(
    "BININT BININT1 BININT2 LONG1 INT BINUNICODE SHORT_BINUNICODE BINUNICODE8 UNICODE "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BINSTRING SHORT_BINSTRING STRING".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_MARK = object()


def _described(file: BinaryIO) -> object:
    """Return the object that a pickle describes. No class is instantiated; each object is represented by an `_Object`.

    Raises ValueError for an opcode that does not occur in pickles of arrays.
    """
    stack: list[Any] = []
    memo: dict[int, object] = {}

    def since_mark() -> list[object]:
        mark = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[mark + 1 :]
        del stack[mark:]
        return items

    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack[-1]
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "GLOBAL":
            stack.append(_Object(str(argument)))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [_Object(f"{stack[-2]} {stack[-1]}")]
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST"):
            stack.append(() if name == "EMPTY_TUPLE" else [])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name == "APPEND":
            stack[-2].append(stack.pop())
        elif name == "APPENDS":
            items = since_mark()
            stack[-1].extend(items)
        elif name == "REDUCE":
            arguments = stack.pop()
            stack[-1] = _made(stack[-1].name, arguments)  # record the call without executing it
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[int(str(argument))] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(str(argument))])
        else:
            raise ValueError(f"a pickle with {name}, which arrays of numbers do not need")
    raise ValueError("a pickle without an end")


def _made(name: str, arguments: tuple[object, ...]) -> object:
    """Return the result of a call. Calls with which old pickles encode bytes as text return bytes; any other call
    returns an `_Object`."""
    if name == "_codecs encode":
        text, encoding = arguments
        return str(text).encode("latin1" if encoding == "latin1" else "utf-8")
    return _Object(name, arguments)
