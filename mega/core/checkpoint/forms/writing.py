"""Write JSON and torch files for formats of other programs. The module of each format decides which files a folder
needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from mega.core.checkpoint.forms.mapping import Source, Target, assemble
from mega.core.checkpoint.own.disk import new_file, write_all
from mega.core.checkpoint.own.pieces import whole_box
from mega.core.files import whole_file
from mega.core.untrusted import Json


def write_json(path: Path, content: Mapping[str, Json]) -> None:
    with new_file(path) as descriptor:
        write_all(descriptor, (json.dumps(content, indent=2) + "\n").encode())


def write_files(folder: Path, texts: Mapping[str, dict[str, Json]], extra_files: Mapping[str, bytes]) -> None:
    """Write JSON files and other files. Keys are file names."""
    for name, content in texts.items():
        write_json(folder / name, content)
    for name, data in extra_files.items():
        with new_file(folder / name) as descriptor:
            write_all(descriptor, data)


def write_torch(path: Path, content: object) -> int:
    """Write a torch file, sync the file to disk, and return its size in bytes. Errors: OSError, for example if the disk
    is full."""
    try:
        with whole_file(path) as file:
            torch.save(content, file)
    except RuntimeError as error:  # torch closes the archive and hides the original error
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return path.stat().st_size


def whole_tensor(target: Target, source: Source) -> torch.Tensor:
    """Read all elements of a target into one tensor."""
    return assemble(target, whole_box(target.shape), source)
