"""The manifest of a published checkpoint: sizes and hashes of all files, the rectangles of all tensors, and plain
state.

The manifest is a JSON file that is written last. The hash of the manifest is stored in `manifest.json.sha256`, the
seal, in the format of `sha256sum -c`. The manifest is not trusted: reading it checks each field's type and range,
refuses file names outside the directory, and requires that rectangles tile their tensors and their files
exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mega.core.checkpoint.own.container import Container, Entry
from mega.core.checkpoint.own.disk import new_file, parse_json, read_file, write_all
from mega.core.checkpoint.own.pieces import DTYPES, Box, CheckpointError, tiling_fault
from mega.core.checkpoint.own.plain_state import check_plain_state
from mega.core.files import SEAL, sync_directory
from mega.core.untrusted import Json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
WEIGHTS_ONLY = "weights-only"
"""Name of a copy of the seal. If this file exists, the checkpoint's optimizer state was removed intentionally."""
STATE_FILE = re.compile(r"rank-\d{5}\.state\.safetensors")
LIMIT = 256 << 20
"""Maximum size of a manifest or sidecar in bytes. A trillion-parameter run on 1024 ranks needs about a tenth of this
limit."""

_ATTACHMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_RANK_FILE = re.compile(r"rank-\d{5}(\.state)?\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 62


@dataclass(frozen=True)
class Attached:
    """The size and sha256 of a small file stored with the tensors (tokenizer, configuration)."""

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    """The step that was saved."""
    world: int
    """Number of ranks that saved the step."""
    containers: Mapping[str, Container]
    """Rank file name -> the file's contents."""
    attachments: Mapping[str, Attached]
    """File name -> size and hash, for small files stored with the tensors."""
    meta: Mapping[str, Json]
    """The plain state of the run."""
    leaving: frozenset[str] = frozenset()
    """Names of optimizer state files that were intentionally removed, or are being removed. Verification ignores these
    files."""
    digest: str = ""
    """The sha256 of the manifest file, which covers all other fields; empty before the manifest is written."""

    @property
    def names(self) -> set[str]:
        """The names of all files that must exist. The files in `leaving` may also exist, but no others."""
        return {MANIFEST, SEAL, *self.containers, *self.attachments, *([WEIGHTS_ONLY] if self.leaving else [])}


def rank_file(rank: int) -> str:
    """Name of the file with a rank's weights, and with tensors that are not optimizer state."""
    return f"rank-{rank:05d}.safetensors"


def state_file(rank: int) -> str:
    """Name of the file with a rank's optimizer state, if the rank has any."""
    return f"rank-{rank:05d}.state.safetensors"


def is_state(key: str) -> bool:
    """Whether a tensor belongs in the `state_file`.

    >>> is_state("moment1/model.norm.weight"), is_state("weights/model.norm.weight"), is_state("scale")
    (True, False, False)
    """
    return "/" in key and not key.startswith("weights/")


def check_attachment_name(name: str) -> None:
    """Check the name of an attachment. Errors: CheckpointError if `name` is not a plain file name, or is reserved by
    the checkpoint format."""
    if not _ATTACHMENT.fullmatch(name) or name.startswith(("rank-", MANIFEST, WEIGHTS_ONLY)):
        raise CheckpointError(
            f"attachment {name!r}: letters, digits, '.', '_' and '-' only, and neither rank-*, {MANIFEST}* "
            f"nor {WEIGHTS_ONLY}"
        )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest and its seal into a checkpoint that is not yet published."""
    text = _encode(
        {
            "format": "mega checkpoint",
            "format_version": FORMAT_VERSION,
            "step": manifest.step,
            "world": manifest.world,
            "files": {name: container_fields(container) for name, container in manifest.containers.items()},
            "attachments": {
                name: {"size": file.size, "sha256": file.digest} for name, file in manifest.attachments.items()
            },
            "meta": manifest.meta,
        }
    )
    for name, data in ((MANIFEST, text), (SEAL, f"{_sha256(text)}  {MANIFEST}\n".encode())):
        with new_file(directory / name) as descriptor:
            write_all(descriptor, data)


def mark_weights_only(directory: Path) -> None:
    """Mark a published checkpoint as weights only, so that its optimizer state files may be deleted."""
    mark = directory.parent / f"{WEIGHTS_ONLY}.tmp"
    mark.unlink(missing_ok=True)
    with new_file(mark) as descriptor:
        write_all(descriptor, read_file(directory / SEAL, 200))
    os.rename(mark, directory / WEIGHTS_ONLY)
    sync_directory(directory)


def write_sidecar(path: Path, containers: Mapping[str, Container]) -> None:
    """Write a rank's sidecar, which is the rank's contribution to the manifest. Rank 0 merges all sidecars."""
    with new_file(path) as descriptor:
        write_all(descriptor, _encode({name: container_fields(container) for name, container in containers.items()}))


def read_sidecar(path: Path, rank: int) -> dict[str, Container]:
    """Read a sidecar, and return a dict: file name -> container, for the files that `rank` wrote."""
    containers = _containers(parse_json(read_file(path, LIMIT), path), path)
    assert containers.keys() <= {rank_file(rank), state_file(rank)}, containers.keys()
    return containers


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a published checkpoint. Check its hash against the seal, and every field's type and
    range."""
    path = directory / MANIFEST
    seal = read_file(directory / SEAL, 200)
    text = read_file(path, LIMIT)
    digest = _sha256(text)
    if seal != f"{digest}  {MANIFEST}\n".encode():
        raise CheckpointError(f"{path}: does not match {SEAL}")
    fields = _record(parse_json(text, path), path, "the manifest")
    if fields.get("format") != "mega checkpoint":
        raise CheckpointError(f"{path}: not the manifest of a mega checkpoint")
    if fields.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version {fields.get('format_version')!r}, this version reads {FORMAT_VERSION}"
        )
    containers = _containers(fields.get("files"), path)
    attachments = {}
    for name, value in _record(fields.get("attachments"), path, "attachments").items():
        check_attachment_name(name)
        record = _record(value, path, name)
        attachments[name] = Attached(_count(record.get("size"), path, name), _digest(record.get("sha256"), path, name))
    world = _count(fields.get("world"), path, "world")
    least = {rank_file(rank) for rank in range(min(world, len(containers) + 1))}  # a malicious `world` may be huge
    most = least | {state_file(rank) for rank in range(len(least))}
    if not least <= containers.keys() <= most:
        raise CheckpointError(f"{path}: holds the files {', '.join(sorted(containers))}, but world is {world}")
    removed: frozenset[str] = frozenset()
    if os.path.lexists(directory / WEIGHTS_ONLY):
        if read_file(directory / WEIGHTS_ONLY, 200) != seal:
            raise CheckpointError(f"{directory / WEIGHTS_ONLY}: is not that of this checkpoint")
        removed = frozenset(name for name in containers if STATE_FILE.fullmatch(name))
    meta = _record(fields.get("meta"), path, "meta")
    check_plain_state(meta, str(path))
    manifest = Manifest(
        _count(fields.get("step"), path, "step"),
        world,
        {name: container for name, container in containers.items() if name not in removed},
        attachments,
        meta,
        removed,
        digest,
    )
    check_tiling(manifest, path)
    return manifest


def check_tiling(manifest: Manifest, path: Path) -> None:
    """Check that rectangles tile every tensor. Errors: CheckpointError naming a tensor with gaps, overlaps, or several
    shapes or dtypes."""
    boxes: dict[str, list[Box]] = {}
    first: dict[str, Entry] = {}
    for container in manifest.containers.values():
        for entry in container.entries:
            reference = first.setdefault(entry.key, entry)
            if (entry.whole, entry.dtype) != (reference.whole, reference.dtype):
                raise CheckpointError(
                    f"{path}: {entry.key} is both {reference.dtype} {reference.whole} and {entry.dtype} {entry.whole}"
                )
            boxes.setdefault(entry.key, []).append(entry.box)
    for key, entry in first.items():
        fault = tiling_fault(entry.whole, boxes[key])
        if fault:
            raise CheckpointError(f"{path}: {key} {entry.whole}: {fault}")


def container_fields(container: Container) -> dict[str, Json]:
    """Return a container as JSON. Entries are lists without keys, because a large run has hundreds of thousands of
    entries."""
    rows: list[Json] = [
        [entry.key, entry.dtype, entry.whole, entry.box.start, entry.box.size, entry.offset, entry.digest]
        for entry in container.entries
    ]
    return {
        "size": container.size,
        "header": container.header,
        "header_sha256": container.digest,
        "columns": ["key", "dtype", "shape", "start", "size", "offset", "sha256"],
        "entries": rows,
    }


def _containers(value: object, path: Path) -> dict[str, Container]:
    records = _record(value, path, "files")
    for name in records:
        if not _RANK_FILE.fullmatch(name):
            raise CheckpointError(f"{path}: file name {name!r} (valid: rank-NNNNN[.state].safetensors)")
    return {name: _container(record, path, name) for name, record in records.items()}


def _container(value: object, path: Path, name: str) -> Container:
    fields = _record(value, path, name)
    size = _count(fields.get("size"), path, name)
    header = _count(fields.get("header"), path, name)
    rows = fields.get("entries")
    if not isinstance(rows, list):
        raise CheckpointError(f"{path}: {name}: entries must be a list")
    entries = tuple(_entry(row, path, name) for row in rows)
    end = header
    for entry in entries:
        if entry.offset != end:
            raise CheckpointError(f"{path}: {name}: {entry.key} begins at byte {entry.offset}, not {end}")
        end += entry.bytes
    if end != size or header < 8:
        raise CheckpointError(f"{path}: {name}: header and entries make {end} bytes, its size is {size}")
    return Container(size, header, _digest(fields.get("header_sha256"), path, name), entries)


def _entry(row: object, path: Path, name: str) -> Entry:
    if not isinstance(row, list) or len(row) != 7:
        raise CheckpointError(f"{path}: {name}: an entry must be a row of 7 values")
    key, dtype, whole, start, size, offset, digest = row
    if not isinstance(key, str) or not key:
        raise CheckpointError(f"{path}: {name}: an entry's key must be text")
    label = f"{name}: {key}"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: {label}: dtype {dtype!r} (valid: {', '.join(DTYPES)})")
    box = Box(_counts(start, path, label), _counts(size, path, label))
    whole = _counts(whole, path, label)
    if not box.elements or not box.within(whole):
        raise CheckpointError(f"{path}: {label}: a rectangle at {box.start} of size {box.size} in {whole}")
    return Entry(key, dtype, whole, box, _count(offset, path, label), _digest(digest, path, label))


def _record(value: object, path: Path, what: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what} must be an object")
    return value


def _count(value: object, path: Path, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise CheckpointError(f"{path}: {what}: {value!r} is not a count")
    return value


def _counts(value: object, path: Path, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 8:
        raise CheckpointError(f"{path}: {what}: {value!r} is not a shape")
    return tuple(_count(number, path, what) for number in value)


def _digest(value: object, path: Path, what: str) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise CheckpointError(f"{path}: {what}: {value!r} is not a sha256")
    return value


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
