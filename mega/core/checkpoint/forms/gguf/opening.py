"""Read a .gguf file in place: its metadata, its tensors, and its tokenizer as files."""

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

from mega.core.checkpoint.forms.form import FormOptions, OpenedForm
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
"""Quantized types with one scale per block. They are read as fp32."""
WRITTEN = ("Q8_0",)
"""The quantized types that can also be written."""


def recognise(path: Path) -> bool:
    return path.suffix == ".gguf" if path.is_file() else _inside(path) is not None


def _inside(folder: Path) -> Path | None:
    """Return the single .gguf file in a folder that contains no other model."""
    if not folder.is_dir() or any((folder / name).exists() for name in ("config.json", "params.json", "latest")):
        return None
    files = sorted(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def _file(path: Path) -> Path:
    return path if path.is_file() else _inside(path) or path


def tokenizer(files: object) -> str | None:
    """Return None, because the tokenizer is stored as a tokenizer.json, which the module for Hugging Face's folders
    recognises."""
    return None


@cache
def _reader(path: Path, changed: int) -> GGUFReader:
    """Return a cached reader for a file. changed: modification time of the file; a different time causes the file to be
    read again."""
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
    except Exception as error:  # the `gguf` library may raise any error for a malformed file
        raise CheckpointError(f"{path}: not a GGUF file that is read: {' '.join(str(error).split())[:200]}") from None


def opened_file(path: Path) -> tuple[Path, GGUFReader, dict[str, Json]]:
    """Return (path of the file, reader, metadata). Errors: CheckpointError if the file is malformed, or is one of
    several parts of a model."""
    file = _file(path)
    reader = _reader(file, file.stat().st_mtime_ns)
    metadata: dict[str, Json] = {name: field.contents() for name, field in reader.fields.items()}
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file}: is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge"
        )
    return file, reader, metadata


class GgufSource:
    """A source of tensors from a memory-mapped file. Quantized tensors are read in whole rows. If any tensor is
    quantized, all tensors are read as fp32."""

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
        data = np.array(tensor.data[rows])  # copied, because the file is mapped read-only
        kind = tensor.tensor_type.name
        if kind in PLAIN and kind != "BF16":
            values = torch.from_numpy(data)
        elif kind == "BF16":
            values = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        else:
            from gguf.quants import dequantize

            values = torch.from_numpy(np.ascontiguousarray(dequantize(data, tensor.tensor_type)))
        return values[(slice(None), *columns)].to(self.tensors[name][1])

    def rounded(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Round whole rows to the precision with which the file stores the tensor `name`, if that precision is
        lower."""
        kind = self._tensors[name].tensor_type
        if kind.name in PLAIN:
            return values.to(PLAIN[kind.name]).to(self.tensors[name][1])
        if kind.name not in WRITTEN:
            return values
        from gguf.quants import dequantize, quantize

        stored = quantize(values.float().contiguous().numpy(), kind)
        return torch.from_numpy(np.ascontiguousarray(dequantize(stored, kind)))


def shape_of(sizes: Iterable[SupportsInt]) -> tuple[int, ...]:
    """Return the shape of a tensor, slowest dim first, from the sizes listed in the file."""
    return tuple(map(int, sizes))[::-1]


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    file, reader, metadata = opened_file(path)
    source = GgufSource(file, reader)
    shapes = {name: shape for name, (shape, _) in source.tensors.items()}
    family, model, _ = model_of_metadata(metadata, shapes, _factors(source), str(file))
    check_size(model, source.tensors, str(file))
    notes = () if not source.in_blocks else (f"{file}: blocks of {', '.join(source.in_blocks)} are read as fp32",)
    return OpenedForm(source, model, table(family, model, shapes), notes=notes, rounded=source.rounded)


def _factors(source: GgufSource) -> list[float] | None:
    """Return the values of the tensor `ROPE_FACTORS`, if the file has it."""
    if ROPE_FACTORS not in source.tensors:
        return None
    factors: list[float] = source.read(ROPE_FACTORS, whole_box(source.tensors[ROPE_FACTORS][0])).flatten().tolist()
    return factors


@cache
def _folder() -> Path:
    """Return a temporary folder for files that belong to open weights. The folder is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="mega-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def attached(path: Path) -> dict[str, Path]:
    """Write tokenizer.json, tokenizer_config.json and config.json, generated from the metadata, to a temporary folder,
    and return their paths. Errors: CheckpointError if the file is malformed or has an unsupported setting."""
    file, reader, metadata = opened_file(path)
    source = GgufSource(file, reader)
    shapes = {name: shape for name, (shape, _) in source.tensors.items()}
    _, _, config = model_of_metadata(metadata, shapes, _factors(source), str(file))
    ends = [metadata.get(f"{PREFIX}{name}_token_id") for name in ENDS]
    end_ids: list[Json] = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    if end_ids:
        config["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
    if isinstance(bos := metadata.get(f"{PREFIX}bos_token_id"), int):
        config["bos_token_id"] = bos
    files = {**tokenizer_files(metadata, str(file)), "config.json": config}
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return {name: folder / name for name in files}
