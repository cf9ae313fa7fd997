"""Write a mega checkpoint as a .gguf file: metadata, tokenizer, chat template, tensors.

Vectors are written in fp32, as llama.cpp requires; matrices are written in the type given by --outtype.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mega.core.checkpoint.forms import chat_files
from mega.core.checkpoint.forms.foreign import read_json
from mega.core.checkpoint.forms.form import Export, ExportSource, FormOptions
from mega.core.checkpoint.forms.gguf.families import ROPE_FACTORS, metadata_of_model, rope_factors, table
from mega.core.checkpoint.forms.gguf.vocabulary import PREFIX, TEMPLATE, lost, vocabulary_of
from mega.core.checkpoint.forms.mapping import Source, Table
from mega.core.checkpoint.forms.meta import LastTensor
from mega.core.checkpoint.forms.writing import whole_tensor
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.untrusted import Json

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

FILE = "model.gguf"
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""Value of --outtype -> `general.file_type`."""
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

NO_TOKENIZER: dict[str, Json] = {f"{PREFIX}model": "none"}
"""A required key; llama.cpp does not open a file without it."""

SPLITS = (
    "the file lacks split_special_tokens of tokenizer_config.json: for the tokenizer, names of special tokens are "
    "text; for programs that parse special tokens, they are these tokens"
)

BLOCK = 32
"""Number of values per block of Q8_0."""


def export(own: ExportSource, to: str, options: FormOptions) -> Export:
    """Plan an export to one file, `FILE`, in the folder. Errors: CheckpointError naming a setting that llama.cpp does
    not support."""
    try:
        import gguf  # noqa: F401 - fails before anything is written
    except ImportError:
        raise CheckpointError("--to gguf: needs gguf; pip install '.[gguf]' in a clone") from None
    if options.outtype not in (None, *FILE_TYPES):
        raise ValueError(f"--outtype {options.outtype}: llama.cpp has no such type; valid: {', '.join(FILE_TYPES)}")
    family, metadata = metadata_of_model(own.model)
    dtype = own.source.tensors["weights/model.embed_tokens.weight"][1]
    outtype = options.outtype or DTYPES.get(dtype, "f32")
    if outtype == "q8_0" and (row := next((n for n in _widths(own) if n % BLOCK), None)):
        raise ValueError(
            f"--outtype q8_0: has blocks of {BLOCK} numbers, which do not divide a row of {row}; valid: f32, f16, bf16"
        )
    vocabulary, losses = _vocabulary(own, options)
    losses += chat_files.generation_losses(own.checkpoint)
    metadata |= {"general.name": own.checkpoint.path.name, "general.file_type": FILE_TYPES[outtype], **vocabulary}

    def fill(folder: Path, table: Table, source: Source) -> int:
        return _write(folder / FILE, family.name, metadata, table, LastTensor(source), outtype, rope_factors(own.model))

    return Export(table(family, own.model), fill, losses=losses)


def _widths(own: ExportSource) -> list[int]:
    return [shape[-1] for shape, _ in own.source.tensors.values() if len(shape) > 1]


def _vocabulary(own: ExportSource, options: FormOptions) -> tuple[dict[str, Json], tuple[str, ...]]:
    """Return (metadata for the tokenizer and the chat template, messages about what the file will lack)."""
    try:
        tokens = options.tokens(own.checkpoint)
    except ValueError as error:
        return NO_TOKENIZER, (f"the file has no tokenizer: {error}",)
    tokenizer_json, carried = tokens.single_file(), own.checkpoint.attachments.get("tokenizer.json")
    if tokenizer_json is None:
        tokenizer_json = tokens.files.get("tokenizer.json") if carried is None else read_json(carried)
    if tokenizer_json is None:
        return NO_TOKENIZER, ("the file has no tokenizer: that of the weights has no tokenizer.json",)
    config = own.checkpoint.attachments.get("config.json")
    config_ids = {} if config is None else read_json(config)
    ids: Mapping[str, Json] = {
        **tokens.ids,
        **{key: config_ids[key] for key in tokens.ids if config_ids.get(key) is not None},
    }
    ids = chat_files.with_ends(ids, tokens.ends)
    vocabulary = vocabulary_of(tokenizer_json, ids, own.model.vocab)
    if tokens.template is not None:
        vocabulary[TEMPLATE] = tokens.template
    losses = (tokens.loss, lost(tokenizer_json), SPLITS if tokens.splits_special else None)
    return vocabulary, tuple(loss for loss in losses if loss is not None)


def _write(
    path: Path,
    family: str,
    metadata: Mapping[str, Json],
    table: Table,
    source: Source,
    outtype: str,
    factors: list[float] | None,
) -> int:
    """Write the file, and return the total size of the tensors in bytes."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, family)
    for key, value in metadata.items():
        if key != "general.architecture":
            _put(writer, key, value)
    tensors = {target.name: target for target in table.targets}
    kinds = {name: _kind(target.shape, outtype) for name, target in tensors.items()}
    tensor_bytes = 0
    for name, target in tensors.items():
        size = _bytes(target.shape, kinds[name])
        writer.add_tensor_info(name, _stored(target.shape, kinds[name]), np.dtype(np.uint8), size, kinds[name])
        tensor_bytes += size
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, (len(factors),), np.dtype(np.float32), 4 * len(factors))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, target in tensors.items():
        _append(writer, _encoded(name, whole_tensor(target, source), kinds[name]))
    if factors is not None:
        _append(writer, np.array(factors, np.float32).view(np.uint8))
    for file in writer.fout or ():
        file.flush()
        os.fsync(file.fileno())
    writer.close()
    return tensor_bytes


def _append(writer: GGUFWriter, data: Bytes) -> None:
    """Write a tensor's bytes. `write_tensor_data` is not used, because numpy's `tofile` hides the error of a full
    disk."""
    assert writer.fout is not None, "the header was written"
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    file.write(np.ascontiguousarray(data).data)
    writer.write_padding(file, data.nbytes)


def _put(writer: GGUFWriter, key: str, value: Json) -> None:
    """Write a metadata value, with the GGUF type that corresponds to the Python type."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        writer.add_string(key, str(value))


def _kind(shape: tuple[int, ...], outtype: str) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[outtype.upper() if len(shape) > 1 else "F32"]


def _stored(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[int, ...]:
    """Return the shape of a tensor's array of stored bytes."""
    from gguf.constants import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // block * size)


def _bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    return int(np.prod(_stored(shape, kind)))


def _encoded(name: str, tensor: torch.Tensor, kind: GGMLQuantizationType) -> Bytes:
    """Return the bytes to store for a tensor. Errors: CheckpointError if a number exceeds the range of fp16."""
    from gguf.quants import quantize

    if kind.name == "BF16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    values = tensor.to(torch.float16 if kind.name == "F16" else torch.float32).contiguous().numpy()
    if not np.isfinite(values).all():
        raise CheckpointError(f"--outtype f16: {name}: holds a number beyond fp16's {torch.finfo(torch.float16).max:g}")
    stored: Bytes = (quantize(values, kind) if kind.name == "Q8_0" else values).view(np.uint8)
    return stored
