"""Read Llama in the formats of llama2.c: one flat file of fp32 numbers (versions 0 and 1), or the `.pt` file of
llama2.c's training script.

Tensors have the same order of rows as in Meta's format, so this module assigns Meta's names and meta.py converts the
tensors. The quantised version 2 is refused, because the project has no equivalent of its int8 groups.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from mega.core.checkpoint.forms import meta
from mega.core.checkpoint.forms.foreign import EntrySource, TorchSource, named_tensors, torch_file
from mega.core.checkpoint.forms.form import FormOptions, OpenedForm
from mega.core.checkpoint.forms.mapping import Source
from mega.core.checkpoint.own.container import Entry
from mega.core.checkpoint.own.disk import open_file, read_into
from mega.core.checkpoint.own.pieces import CheckpointError, whole_box
from mega.core.untrusted import Json

MAGIC = 0x616B3432
"""First number in files of versions 1 and 2. Files of version 0 begin with the hidden width."""

HEADER = 256
"""Size of the header in version 1, in bytes. The header of version 0 has 28 bytes."""

SIZES = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
"""Names of the numbers in the header, in order."""

BLOCKS = (
    ("attention_norm", "dim"),
    ("attention.wq", "dim", "dim"),
    ("attention.wk", "kv", "dim"),
    ("attention.wv", "kv", "dim"),
    ("attention.wo", "dim", "dim"),
    ("ffn_norm", "dim"),
    ("feed_forward.w1", "hidden_dim", "dim"),
    ("feed_forward.w2", "dim", "hidden_dim"),
    ("feed_forward.w3", "hidden_dim", "dim"),
)
"""Names of a block's tensors. A file of version 0 contains the first of these tensors for all blocks, then the second
for all blocks, and so on."""


def recognise(path: Path) -> bool:
    return path.suffix in (".bin", ".pt") and not path.is_dir()


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    """Open a file of llama2.c. Tensor names have the format `0/...`, as in a Meta folder with one file."""
    source, params = _open_torch(path) if path.suffix == ".pt" else _open_flat(path)
    return meta.opened(source, params, 1, str(path))


def _open_torch(path: Path) -> tuple[Source, Mapping[str, Json]]:
    content = torch_file(path)
    parts = [content.get(key) if isinstance(content, dict) else None for key in ("model", "model_args")]
    state, params = parts
    if not isinstance(state, dict) or not isinstance(params, dict):
        raise CheckpointError(f"{path}: holds no dict of model and model_args, as llama2.c's training script writes")
    state_tensors = named_tensors(state, f"{path}: model")
    tensors = {f"0/{name.removeprefix('_orig_mod.')}": tensor for name, tensor in state_tensors.items()}
    return TorchSource(tensors), params


def _open_flat(path: Path) -> tuple[Source, Mapping[str, Json]]:
    with open_file(path) as (descriptor, size):
        head = bytearray(min(size, HEADER))
        read_into(descriptor, memoryview(head), 0, path)
    if len(head) < 28:
        raise CheckpointError(f"{path}: {size} bytes are no llama2.c file")
    version, begin = 0, 28
    numbers = struct.unpack_from("<7i", head)
    if struct.unpack_from("<I", head) == (MAGIC,) and len(head) == HEADER:
        version, begin = struct.unpack_from("<i", head, 4)[0], HEADER
        numbers = struct.unpack_from("<7i", head, 8)
        if version != 1:
            raise CheckpointError(f"{path}: version {version} of llama2.c's format (valid: 0, 1; 2 is quantised)")
    tied = numbers[5] > 0 if version == 0 else head[36] == 1  # in version 0, a negative size means untied
    params: dict[str, int] = dict(zip(SIZES, (*numbers[:5], abs(numbers[5]), numbers[6]), strict=True))
    for key, value in params.items():
        if not 0 < value < 1 << 30:
            raise CheckpointError(f"{path}: {key} {value}: must be a positive number, or this is no llama2.c file")
    if params["dim"] % params["n_heads"] or params["n_heads"] % params["n_kv_heads"]:
        raise CheckpointError(f"{path}: n_heads {params['n_heads']}: does not divide into the other sizes")
    # The size is checked before entries are listed, because a damaged header may specify a billion layers.
    if params["n_layers"] * params["dim"] > size:
        raise CheckpointError(f"{path}: {params['n_layers']} layers in a file of {size} bytes")
    entries: dict[str, tuple[Path, Entry]] = {}
    for name, shape in (_order0 if version == 0 else _order1)(params, tied):
        if name:
            entries[f"0/{name}.weight"] = (path, Entry(name, "F32", shape, whole_box(shape), begin, ""))
        begin += 4 * prod(shape)
    if begin != size:
        raise CheckpointError(f"{path}: {size} bytes, its sizes {params} make {begin}")
    return EntrySource(entries), params


TensorRuns = Iterator[tuple[str, tuple[int, ...]]]
"""Iterator over (name, shape) of every array in a file. An empty name marks tables that are computed, not read."""


def _order0(params: Mapping[str, int], tied: bool) -> TensorRuns:
    width = params["dim"] // params["n_heads"]
    yield "tok_embeddings", (params["vocab_size"], params["dim"])
    for row in BLOCKS:
        yield from _block_tensors(params, *row)
    yield "norm", (params["dim"],)
    yield "", (params["max_seq_len"], width // 2)  # cosines
    yield "", (params["max_seq_len"], width // 2)  # sines
    if not tied:
        yield "output", (params["vocab_size"], params["dim"])


def _order1(params: Mapping[str, int], tied: bool) -> TensorRuns:
    """Yield (name, shape) of every array in version 1, in which the norms come first."""
    rows = sorted(BLOCKS, key=lambda row: not row[0].endswith("norm"))
    norms, matrices = rows[:2], rows[2:]
    for row in norms:
        yield from _block_tensors(params, *row)
    yield "norm", (params["dim"],)
    yield "tok_embeddings", (params["vocab_size"], params["dim"])
    for row in matrices:
        yield from _block_tensors(params, *row)
    if not tied:
        yield "output", (params["vocab_size"], params["dim"])


def _block_tensors(params: Mapping[str, int], name: str, *sizes: str) -> TensorRuns:
    kv = params["dim"] // params["n_heads"] * params["n_kv_heads"]
    shape = tuple({**params, "kv": kv}[size] for size in sizes)
    for layer in range(params["n_layers"]):
        yield f"layers.{layer}.{name}", shape
