"""Read tensors from files of other programs: safetensors files, with or without an index, and torch's `.bin`, `.pth`
and `.pt` files.

No code in a file is executed. This module parses safetensors headers, reads torch files only with `weights_only=True`,
and refuses any other object in a torch file with an error that names the object. This module does not depend on a
model.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol
from zlib import crc32

import torch

from mega.core.checkpoint.forms.pickle_scan import BYTES, Scan
from mega.core.checkpoint.own.container import Entry, read_box
from mega.core.checkpoint.own.disk import open_file, parse_json, read_file, read_into
from mega.core.checkpoint.own.pieces import FOREIGN_DTYPES, Box, CheckpointError, Tensors, whole_box
from mega.core.untrusted import Json

HEADER_LIMIT = 64 << 20
JSON_LIMIT = 64 << 20
LEGACY_PICKLES = 5
"""Number of pickles at the start of a torch file that is not a zip archive: magic number, version, machine, content,
storage names."""

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class EntrySource:
    """A source of tensors stored as plain bytes in files. Only the requested rectangles are read, so the memory used
    does not depend on the size of the files."""

    def __init__(self, entries: Mapping[str, tuple[Path, Entry]]) -> None:
        self.entries = entries
        self.tensors: Tensors = {
            name: (entry.whole, FOREIGN_DTYPES[entry.dtype]) for name, (_, entry) in entries.items()
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        path, entry = self.entries[name]
        tensor = torch.empty(box.size, dtype=FOREIGN_DTYPES[entry.dtype])
        with open_file(path) as (descriptor, _):
            read_box(path, descriptor, entry, box, tensor)
        return tensor


def safetensors_source(paths: list[Path]) -> EntrySource:
    """Open the tensors of one or several safetensors files."""
    entries: dict[str, tuple[Path, Entry]] = {}
    for path in paths:
        for entry in read_header(path):
            if entry.key in entries:
                raise CheckpointError(f"{path}: {entry.key} is in {entries[entry.key][0].name} too")
            entries[entry.key] = (path, entry)
    return EntrySource(entries)


def read_header(path: Path) -> list[Entry]:
    """The entries of a safetensors file. Errors: CheckpointError for a file that does not conform to the format."""
    with open_file(path) as (descriptor, size):
        length = bytearray(8)
        if size < 8:
            raise CheckpointError(f"{path}: {size} bytes are no safetensors file")
        read_into(descriptor, memoryview(length), 0, path)
        count = int.from_bytes(length, "little")
        if count > min(size - 8, HEADER_LIMIT):
            raise CheckpointError(f"{path}: a header of {count} bytes in a file of {size}")
        text = bytearray(count)
        read_into(descriptor, memoryview(text), 8, path)
    header = parse_json(bytes(text), path)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not an object")
    header.pop("__metadata__", None)
    entries = sorted(
        (_entry(path, name, value, 8 + count) for name, value in header.items()),
        key=lambda entry: entry.offset,
    )
    # The format allows no gaps between tensors, so a gap indicates damage or hidden content.
    end = 8 + count
    for entry in entries:
        if entry.offset != end:
            raise CheckpointError(f"{path}: {entry.key} begins at byte {entry.offset}, not {end}")
        end += entry.bytes
    if end != size:
        raise CheckpointError(f"{path}: {size} bytes, its tensors end at {end}")
    return entries


def _entry(path: Path, name: str, value: object, base: int) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if dtype not in FOREIGN_DTYPES:
        raise CheckpointError(f"{path}: {name}: dtype {dtype!r} (valid: {', '.join(FOREIGN_DTYPES)})")
    for numbers, most in ((shape, 8), (offsets, 2)):
        if (
            not isinstance(numbers, list)
            or len(numbers) > most
            or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers)
        ):
            raise CheckpointError(f"{path}: {name}: shape or offsets are not counts")
    assert isinstance(shape, list) and isinstance(offsets, list)
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * FOREIGN_DTYPES[dtype].itemsize:
        raise CheckpointError(f"{path}: {name}: offsets {offsets} do not hold {dtype} {shape}")
    return Entry(name, dtype, tuple(shape), whole_box(shape), base + offsets[0], "")


class TorchSource:
    """A source of tensors from torch files. Names have the format `label/name` if several files contain the same names.

    Errors: CheckpointError naming a tensor that is not dense, or that has more elements than its storage.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
                raise CheckpointError(f"{name}: is not a plain tensor in memory")
            if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise CheckpointError(f"{name}: has {tensor.numel()} elements, fewer are stored")
        self._tensors = tensors
        self.tensors: Tensors = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._tensors[name][box.index]


StandIn = Callable[[str], type | None]
"""A function that maps the name of a class in a file to the inert class to use instead, or to None if the name is not
allowed."""


def check_ranks_differ(tensors: Mapping[str, torch.Tensor], own: str, before: str, where: Path) -> None:
    """Check that the tensors with prefix `own` are not all equal to the tensors with prefix `before`. If all are equal,
    the file of one tensor rank was copied over that of another, and wrong rows would be read. Errors:
    CheckpointError."""
    pairs = ((one, tensors.get(before + name[len(own) :])) for name, one in tensors.items() if name.startswith(own))
    if all(other is not None and other.dtype == one.dtype and torch.equal(one, other) for one, other in pairs):
        raise CheckpointError(f"{where}: holds the same weights as the tensor rank before it, every one of them")


def no_stand_in(name: str) -> None:
    """The `StandIn` for files that contain only tensors. Every class name is refused."""


def torch_file(path: Path, stand_in: StandIn = no_stand_in) -> object:
    """Return the content of a torch file, memory-mapped. Only the classes on torch's allow-list and those from
    `stand_in` are unpickled."""
    with open_file(path):
        return unpickled(path, path, stand_in)


def unpickled(source: Path | BytesIO, path: Path, stand_in: StandIn = no_stand_in) -> object:
    """Return the content of a torch file, as `torch_file` does. source: path of the torch file, or its bytes. path: the
    file to name in errors.

    The file's pickles are scanned before torch reads them, so that a malicious pickle cannot exhaust time or memory.
    """
    with source.open("rb") if isinstance(source, Path) else contextlib.nullcontext(source) as stream:
        zipped = stream.read(4) == b"PK\3\4"  # torch.load applies the same test
        size = stream.seek(0, 2)
        stream.seek(0)
        head = BytesIO(_pickle_of(source, path, size) if zipped else stream.read(BYTES))
        stream.seek(0)
    scan = Scan(path, stand_in)
    for _ in range(1 if zipped else LEGACY_PICKLES):
        scan.check(head)
    # torch's unpickler translates Python 2's name of the module in the same way.
    names = sorted(name.replace("__builtin__.", "builtins.", 1) for name in scan.names)
    inert: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
        (inert_class, name) for name in names if (inert_class := stand_in(name)) is not None
    ]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(inert):
            warnings.simplefilter("ignore")
            use_mmap = zipped and isinstance(source, Path)
            return torch.load(source, map_location="cpu", weights_only=True, mmap=use_mmap)
    except Exception as error:
        raise CheckpointError(f"{path}: torch refuses it with weights_only=True: {_refusal(str(error))}") from None


class Records(Protocol):
    """The methods of torch's file reader. The type stubs of torch lack some of these methods."""

    def has_record(self, name: str) -> bool: ...
    def get_record(self, name: str) -> bytes: ...
    def get_record_offset(self, name: str) -> int: ...


def _records(source: Path | BytesIO) -> Records:
    reader: Any = torch._C.PyTorchFileReader(source if isinstance(source, BytesIO) else str(source))
    return reader  # type: ignore[no-any-return]


def _pickle_of(source: Path | BytesIO, path: Path, size: int) -> bytes:
    """Return the pickle of a zipped torch file, located in the same way as in torch. size: size of the file in
    bytes."""
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
            if archive.fp is not None:
                _check_headers(archive.fp, members, path)
        if (unpacked := sum(item.file_size for item in members)) > size:
            raise CheckpointError(f"{path}: {unpacked} bytes are packed into {size}")
        if any(item.filename.endswith("/data.pkl") and item.file_size > BYTES for item in members):
            raise CheckpointError(f"{path}: its pickle has more than {BYTES} bytes")
        if isinstance(source, BytesIO):
            source.seek(0)
        reader = _records(source)
        pickle = reader.get_record("data.pkl")
        _check_sums(reader, members, path, all_records=isinstance(source, BytesIO))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a torch file ({str(error).partition(chr(10))[0]:.100})") from None
    return pickle


def _check_headers(stream: IO[bytes], members: list[zipfile.ZipInfo], path: Path) -> None:
    """Compare the local header before each record of a torch file with the archive's directory, because torch computes
    a record's position from the lengths in the local header. Errors: CheckpointError naming the record whose header
    differs."""
    for item in members:
        stream.seek(item.header_offset)
        header = stream.read(30)
        name, extra = (int.from_bytes(header[position : position + 2], "little") for position in (26, 28))
        expected_name = item.orig_filename.encode("utf-8" if item.flag_bits & 0x800 else "cp437")
        matches, fields = stream.read(name) == expected_name, stream.read(extra)
        end = 0  # end of the parsed extra fields; a field is a type, a length, and data of this length
        while end + 4 <= len(fields):
            end += 4 + int.from_bytes(fields[end + 2 : end + 4], "little")
        if not matches or end != extra:
            record = item.filename.partition("/")[2]
            raise CheckpointError(f"{path}: it is damaged: the header of {record} is not what the archive's list says")


def first_storage_at(stream: BytesIO) -> int | None:
    """The position of the first storage in a torch file; None if the file has no storage or is not a zip archive."""
    try:
        stream.seek(0)
        return _records(stream).get_record_offset("data/0")
    except RuntimeError:
        return None


def _check_sums(reader: Records, members: list[zipfile.ZipInfo], path: Path, *, all_records: bool) -> None:
    """Verify a torch file's checksums, which torch writes but does not check. all_records: whether to check the
    storages' records too, not only the pickle.

    Some writers store no valid checksums. If the checksum of the record `version` is wrong, no checksum is compared.
    Errors: CheckpointError naming the record whose checksum differs.
    """
    sums = {item.filename.partition("/")[2]: item.CRC for item in members}
    if not reader.has_record("version") or crc32(reader.get_record("version")) != sums.get("version"):
        return
    for name in (*(n for n in sums if all_records and n.startswith("data/")), "data.pkl"):
        if crc32(reader.get_record(name)) != sums.get(name):
            raise CheckpointError(f"{path}: it is damaged: {name} is not what its checksum says")


def _refusal(message: str) -> str:
    """Describe the object or instruction that torch refused, extracted from torch's error message."""
    if match := re.search(r"(?:GLOBAL|class|global)[: ]+(?:GLOBAL )?(\w+(?:\.\w+)+)", message):
        return f"it holds {match[1]}"
    if match := re.search(r"Unsupported \w+ \d+", message):
        return f"not a pickle that torch writes ({match[0]})"
    return "it is damaged or no torch file"


def flat_tensors(path: Path, label: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a torch file that contains one flat dict of tensors. label: prefix to add to the names."""
    content = torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {type(content).__name__}, not a dict of tensors")
    return {label + name: tensor for name, tensor in named_tensors(content, path).items()}


def named_tensors(content: dict[object, object], where: Path | str) -> dict[str, torch.Tensor]:
    """Check that `content` is a flat dict of tensors, and return it. Errors: CheckpointError naming the file `where`
    and the entry that is not a tensor."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{where}: {name!r} is {type(value).__name__}, not a tensor")
        tensors[name] = value
    return tensors


def read_json(path: Path) -> dict[str, Json]:
    """Read a JSON object from another tool's file."""
    content = parse_json(read_file(inside(path.parent, path.name), JSON_LIMIT), path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return content


def inside(folder: Path, name: str, hidden: str = "", part: str = "") -> Path:
    """Return the resolved path of the file `name` in `folder`. The file must be in `folder`, or in the `blobs`
    directory of the hub cache that contains `folder`.

    hidden: a prefix that `name` may have, such as a dot. part: the subfolder that contains the file. Errors:
    CheckpointError if `name` contains a path, or a link points outside these directories.
    """
    if not isinstance(name, str) or not _PLAIN.fullmatch(name.removeprefix(hidden)):
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name")
    root = folder.resolve()
    path = (root / part / name).resolve()
    allowed = [root / part, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    if path.parent not in allowed:
        raise CheckpointError(f"{folder / part / name}: leads to {path}, outside the folder")
    return path
