"""A .gguf file as weights that are read in place: metadata, tensors, and the files of its tokenizer."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

import numpy as np
import torch

from mega.core.checkpoint.forms.form import Given, Opened
from mega.core.checkpoint.forms.gguf.families import ROPE_FACTORS, model_of_metadata, table
from mega.core.checkpoint.forms.gguf.header import check_header
from mega.core.checkpoint.forms.gguf.vocabulary import ENDS, PREFIX, tokenizer_files
from mega.core.checkpoint.own.model import check_size
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors, whole_box
from mega.core.untrusted import Json

if TYPE_CHECKING:
    from gguf import GGUFReader

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Numbers of few bits with scales of blocks, which become fp32."""
WRITTEN = ("Q8_0",)
"""Those that are written too."""


def recognise(path: Path) -> bool:
    return path.suffix == ".gguf" if path.is_file() else _inside(path) is not None


def _inside(folder: Path) -> Path | None:
    """The one .gguf of a folder that has nothing else of a model in it."""
    if not folder.is_dir() or any((folder / name).exists() for name in ("config.json", "params.json", "latest")):
        return None
    found = sorted(folder.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def _file(path: Path) -> Path:
    return path if path.is_file() else _inside(path) or path


def tokenizer(files: object) -> str | None:
    """Its tokenizer is a tokenizer.json, which the form of Hugging Face's folders knows."""
    return None


@cache
def _reader(path: Path, changed: int) -> GGUFReader:
    """changed: when the file was last written, of what is kept."""
    check_header(path)
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(f"{path}: needs gguf; pip install '.[gguf]' in a clone") from None
    try:
        reader = GGUFReader(path)
        for field in reader.fields.values():
            field.contents()
        return reader
    except Exception as error:  # of whatever a file of others makes it do
        raise CheckpointError(f"{path}: not a GGUF file that is read: {' '.join(str(error).split())[:200]}") from None


def opened_file(path: Path) -> tuple[Path, GGUFReader, dict[str, Json]]:
    """The file, its reader and its metadata. Errors: CheckpointError."""
    file = _file(path)
    reader = _reader(file, file.stat().st_mtime_ns)
    metadata: dict[str, Json] = {name: field.contents() for name, field in reader.fields.items()}
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file}: is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge"
        )
    return file, reader, metadata


class GgufSource:
    """The tensors of a file, mapped; those in blocks are read by whole rows. If any is, all of the file are fp32."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        for tensor in reader.tensors:
            if (kind := tensor.tensor_type.name) not in (*PLAIN, *BLOCKS):
                raise CheckpointError(f"{path}: {tensor.name}: is {kind} (valid: {', '.join((*PLAIN, *BLOCKS))})")
        self.in_blocks = sorted({t.tensor_type.name for t in reader.tensors} - PLAIN.keys())
        self.tensors: Tensors = {
            name: (shape_of(tensor.shape), torch.float32 if self.in_blocks else PLAIN[tensor.tensor_type.name])
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        tensor = self._tensors[name]
        rows, *columns = box.index
        data = np.array(tensor.data[rows])  # the file is mapped, and what torch is given may be written to
        kind = tensor.tensor_type.name
        if kind in PLAIN and kind != "BF16":
            found = torch.from_numpy(data)
        elif kind == "BF16":
            found = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        else:
            from gguf.quants import dequantize

            found = torch.from_numpy(np.ascontiguousarray(dequantize(data, tensor.tensor_type)))
        return found[(slice(None), *columns)].to(self.tensors[name][1])

    def rounded(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Whole blocks of rows of a tensor of ours as the file holds them, where it holds them less exactly."""
        kind = self._tensors[name].tensor_type
        if kind.name in PLAIN:
            return values.to(PLAIN[kind.name]).to(self.tensors[name][1])
        if kind.name not in WRITTEN:
            return values
        from gguf.quants import dequantize, quantize

        stored = quantize(values.float().contiguous().numpy(), kind)
        return torch.from_numpy(np.ascontiguousarray(dequantize(stored, kind)))


def shape_of(sizes: Iterable[SupportsInt]) -> tuple[int, ...]:
    """The shape of a tensor whose sizes the file lists, the slowest dimension first."""
    return tuple(map(int, sizes))[::-1]


def open_form(path: Path, given: Given) -> Opened:
    file, reader, metadata = opened_file(path)
    source = GgufSource(file, reader)
    shapes = {name: shape for name, (shape, _) in source.tensors.items()}
    family, model, _ = model_of_metadata(metadata, shapes, _factors(source), str(file))
    check_size(model, source.tensors, str(file))
    notes = () if not source.in_blocks else (f"{file}: blocks of {', '.join(source.in_blocks)} are read as fp32",)
    return Opened(source, model, table(family, model, shapes), notes=notes, rounded=source.rounded)


def _factors(source: GgufSource) -> list[float] | None:
    """What `ROPE_FACTORS` holds, all of it in one row."""
    if ROPE_FACTORS not in source.tensors:
        return None
    found: list[float] = source.read(ROPE_FACTORS, whole_box(source.tensors[ROPE_FACTORS][0])).flatten().tolist()
    return found


@cache
def _folder() -> Path:
    """Of files that belong to open weights, for as long as the process runs."""
    made = Path(tempfile.mkdtemp(prefix="mega-gguf-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def attached(path: Path) -> dict[str, Path]:
    """tokenizer.json, tokenizer_config.json and config.json, made of the metadata. Errors: CheckpointError."""
    file, reader, metadata = opened_file(path)
    source = GgufSource(file, reader)
    shapes = {name: shape for name, (shape, _) in source.tensors.items()}
    _, _, config = model_of_metadata(metadata, shapes, _factors(source), str(file))
    ends = [metadata.get(f"{PREFIX}{name}_token_id") for name in ENDS]
    every: list[Json] = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    if every:
        config["eos_token_id"] = every[0] if len(every) == 1 else every
    if isinstance(bos := metadata.get(f"{PREFIX}bos_token_id"), int):
        config["bos_token_id"] = bos
    files = {**tokenizer_files(metadata, str(file)), "config.json": config}
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return {name: folder / name for name in files}
