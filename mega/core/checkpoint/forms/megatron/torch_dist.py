"""Read checkpoints in torch's distributed format, as written by Megatron-core (`torch_dist`).

The index of a checkpoint, `.metadata`, is a pickle. This module interprets the pickle with only the dozen instructions
that an index needs. The interpreter builds plain records of names and values, and cannot import or call anything.
"""

from __future__ import annotations

import io
import pickletools
import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from mega.core.checkpoint.forms.foreign import first_storage_at, inside, read_json, unpickled
from mega.core.checkpoint.forms.form import FormOptions, OpenedForm
from mega.core.checkpoint.forms.mapping import joined
from mega.core.checkpoint.forms.megatron.arguments import tokenizer_of
from mega.core.checkpoint.forms.megatron.state import check_counts, plain_state, state_note, values_of
from mega.core.checkpoint.forms.megatron.torch_dist_state import state_of
from mega.core.checkpoint.forms.megatron.trees import common_name, iteration_of, model_of_tree, table_of
from mega.core.checkpoint.forms.pickles import read_pickled, stand_in
from mega.core.checkpoint.own.disk import open_file, read_file, read_into
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors, naming, tiling_fault

INDEX_LIMIT = 256 << 20
DIMS = 16
"""Maximum number of dims of a tensor."""
LAYERS, EXPERTS = "decoder.layers.", ".experts.experts."


@dataclass
class Record:
    """An object in the pickle, given by the name of a class or function, the arguments, and the state."""

    name: str
    arguments: tuple[object, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def read_records(data: bytes, path: Path) -> object:
    """Return the object that a pickle describes, composed of dicts, lists, tuples, numbers, strings and `Record`s.

    Errors: CheckpointError naming an instruction that is not supported.
    """
    stack: list[Any] = []
    memo: dict[int, object] = {}
    budget = len(data)  # maximum number of copied elements; valid files need fewer

    def since_mark() -> list[object]:
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        items = stack[mark + 1 :]
        del stack[mark:]
        return items

    def charged(args: Any) -> Any:
        nonlocal budget
        budget -= len(args) if isinstance(args, dict | list | tuple) else 0
        if budget < 0:
            raise ValueError("it repeats itself")
        return args

    try:
        for operation, argument, _ in pickletools.genops(data):
            name = operation.name
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                return stack.pop()
            if name in ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "BINFLOAT"):
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument or 0)])
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            elif name == "TUPLE":
                stack.append(tuple(since_mark()))
            elif name == "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                if not isinstance(attribute, str) or not isinstance(module, str):
                    raise ValueError("a name is not text")  # formatting nested tuples may take exponential time
                stack.append(Record(f"{module}.{attribute}"))
            elif name in ("REDUCE", "NEWOBJ"):
                args, function = stack.pop(), stack.pop()
                stack.append(Record(function.name, tuple(charged(args))))
            elif name == "BUILD":
                state = charged(stack.pop())
                stack[-1].state.update(state if isinstance(state, dict) else {"": state})
            elif name in ("APPEND", "APPENDS"):
                items = [stack.pop()] if name == "APPEND" else since_mark()
                stack[-1].extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
                if not all(isinstance(key, str | Record) for key in items[::2]):
                    raise ValueError("a key is neither text nor record")  # hashing tuples may take exponential time
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            else:
                raise CheckpointError(f"{path}: the pickle holds the instruction {name}")
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not the index of a distributed checkpoint ({error})") from None
    raise CheckpointError(f"{path}: the pickle does not end")


@dataclass(frozen=True)
class StoredChunk:
    """The location of a stored rectangle."""

    box: Box  # the rectangle, in coordinates of the stored tensor
    file: str  # name of the file that contains the rectangle
    offset: int  # position of the rectangle's first byte in the file
    length: int  # number of bytes of the rectangle


@dataclass(frozen=True)
class CheckedChunk:
    """The checked elements of a stored rectangle, memory-mapped from the file if possible.

    data: uint8 [*size, bytes per element], not necessarily aligned.
    """

    data: torch.Tensor
    dtype: torch.dtype

    def part(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a copy of the elements at `index`."""
        return self.data[index].clone(memory_format=torch.contiguous_format).view(self.dtype)[..., 0]


@dataclass(frozen=True)
class View:
    """A view of a stored tensor: the whole tensor, the tensor at `index` of a stack (of layers, of experts, or of
    both), or a vector's elements starting at `begin`."""

    stored: str
    index: tuple[int, ...] = ()
    begin: int | None = None


class DistributedSource:
    """A source of the tensors in a `torch_dist` folder, under common names with the prefix of a single rank:
    `0.0.0/encoder.layers.N...`.

    The files stack uniform layers, [layers, ...], and experts, [layers, experts, ...] or [experts, ...]. The source
    presents each layer and each expert as a separate tensor. `state` lists the stored tensors of the optimizer, which
    can be read only after `show` or `show_flat` is called (torch_dist_state.py).

        stored [layers, experts, *shape]      View(stored, (layer, expert)) is one tensor of `shape`
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        parsed = _index(read_records(read_file(folder / ".metadata", INDEX_LIMIT), folder / ".metadata"), folder)
        self._shapes, self._chunks, self._objects = parsed
        self._checked: dict[StoredChunk, CheckedChunk] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        self._locks: defaultdict[StoredChunk, threading.Lock] = defaultdict(threading.Lock)
        self._dtypes: dict[str, torch.dtype] = {}
        self._views: dict[str, View] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.state = {name: shape for name, shape in self._shapes.items() if name.startswith("optimizer.")}
        if unsupported := next((name for name in self._shapes if name.startswith("encoder.")), None):
            raise CheckpointError(f"{folder}: {unsupported}: BERT and T5 are read from trees (mp_rank_NN) only")
        for name in self._shapes:
            if name not in self.state:
                self.show(name, name)

    def show(self, stored: str, weight: str, kind: str = "") -> None:
        """Make a stored tensor readable under the common names of the weight stored as `weight`. kind: the kind of
        state in the tensor; empty for a weight."""
        shape, dtype = self._shapes[stored], self._dtype(stored)
        stacked = weight.startswith(LAYERS) and not re.match(r"\d+\.", weight.removeprefix(LAYERS))
        depth = stacked + (EXPERTS in weight)
        for index in product(*map(range, shape[:depth])):
            each = f"{LAYERS}{index[0]}.{weight.removeprefix(LAYERS)}" if stacked else weight
            each = each.replace(EXPERTS, f".experts.local_experts.{index[-1]}." if depth > stacked else "")
            common = f"{kind}/0.0.0/{common_name(each)}".removeprefix("/")
            if common in self._views:
                raise CheckpointError(f"{self._folder}: {stored}: is there as {self._views[common].stored} too")
            self._views[common] = View(stored, index)
            self.tensors[common] = (shape[depth:], dtype)

    def show_flat(self, stored: str, begin: int, name: str, shape: tuple[int, ...]) -> None:
        """Make the elements of a stored vector, starting at index `begin`, readable as the tensor `name`."""
        self._views[name] = View(stored, begin=begin)
        self.tensors[name] = (shape, self._dtype(stored))

    def hide(self, kind: str) -> None:
        """Revert `show` and `show_flat` for one kind of state."""
        self.tensors = {name: value for name, value in self.tensors.items() if not name.startswith(f"{kind}/")}

    def object(self, name: str) -> object:
        """Return a stored object that is not a tensor; None if the name is unknown. Errors: CheckpointError if the
        object's pickle is refused."""
        place = self._objects.get(f"{name}/shard_0_1")
        if place is None:
            return None
        content = unpickled(io.BytesIO(self._bytes(name, *place)), self._folder / place[0], stand_in)
        return content[0] if isinstance(content, list | tuple) and len(content) == 1 else content

    def read(self, name: str, box: Box) -> torch.Tensor:
        view = self._views[name]
        if depth := len(view.index):
            return self._read(view.stored, Box((*view.index, *box.start), (1,) * depth + box.size))[(0,) * depth]
        if view.begin is None:
            return self._read(view.stored, box)
        rows = Box((box.start[0], *[0] * (len(box.start) - 1)), (box.size[0], *self.tensors[name][0][1:]))
        width = prod(rows.size[1:])
        values = self._read(view.stored, Box((view.begin + rows.start[0] * width,), (rows.elements,)))
        return values.view(rows.size)[box.inside(rows)]

    def _read(self, stored: str, box: Box) -> torch.Tensor:
        """Return the rectangle `box` of a stored tensor, assembled from the stored rectangles that overlap it."""
        tensor = torch.empty(box.size, dtype=self._dtype(stored))
        filled = 0
        for chunk in self._chunks[stored]:
            if shared := chunk.box.intersection(box):
                loaded = self._load(stored, chunk)  # cached, because several tensors are slices of one buffer
                if loaded.dtype != tensor.dtype:
                    raise CheckpointError(
                        f"{self._folder / chunk.file}: {stored}: is {loaded.dtype} at {chunk.box.start}, elsewhere "
                        f"{tensor.dtype}"
                    )
                tensor[shared.inside(box)] = loaded.part(shared.inside(chunk.box))
                filled += shared.elements
        if filled != box.elements:
            raise CheckpointError(f"{self._folder}: {stored}: {filled} of {box.elements} elements are in the files")
        return tensor

    def _dtype(self, name: str) -> torch.dtype:
        if name not in self._dtypes:
            self._dtypes[name] = self._load(name, self._chunks[name][0]).dtype
        return self._dtypes[name]

    def _load(self, name: str, chunk: StoredChunk) -> CheckedChunk:
        """Return one stored rectangle, which is read and checked only once. Each rectangle is embedded in a file as a
        small torch file."""
        with self._locks[chunk]:
            if chunk not in self._checked:
                self._checked[chunk] = self._check(name, chunk)
            return self._checked[chunk]

    def _check(self, name: str, chunk: StoredChunk) -> CheckedChunk:
        path, stream = self._folder / chunk.file, io.BytesIO(self._bytes(name, chunk.file, chunk.offset, chunk.length))
        tensor = unpickled(stream, path)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.box.size:
            raise CheckpointError(f"{path}: {name}: not the tensor of shape {chunk.box.size} that the index promises")
        data = tensor.detach().reshape(-1).view(torch.uint8).view(*tensor.shape, tensor.dtype.itemsize)
        if (begin := first_storage_at(stream)) is not None and data.numel():
            if chunk.file not in self._mapped:
                size = path.stat().st_size
                self._mapped[chunk.file] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            mapped = self._mapped[chunk.file][chunk.offset + begin :][: data.numel()]
            if torch.equal(mapped, data.flatten()):  # False if a slice of a larger tensor was stored
                data = mapped.view(data.shape)
        return CheckedChunk(data, tensor.dtype)

    def _bytes(self, name: str, file: str, offset: int, length: int) -> bytearray:
        path = inside(self._folder, file, hidden="__")
        with open_file(path) as (descriptor, size):
            if offset + length > size:
                raise CheckpointError(f"{path}: {name} should end at byte {offset + length} of {size}")
            buffer = bytearray(length)
            read_into(descriptor, memoryview(buffer), offset, path)
        return buffer


Place = tuple[str, int, int]
"""The location of stored bytes: (file, offset, length)."""


def _index(
    index: Any, folder: Path
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[StoredChunk]], dict[str, Place]]:
    """Parse the index, and return (shapes of the tensors, stored rectangles of the tensors, locations of objects that
    are not tensors)."""
    path = folder / ".metadata"
    try:
        stored: dict[tuple[str, tuple[int, ...]], Place] = {}
        objects: dict[str, Place] = {}
        for key, value in index.state["storage_data"].items():
            place = value.state["relative_path"], *_numbers((value.state["offset"], value.state["length"]))
            name = _text(key.state["fqn"])
            if key.state.get("offset") is None:  # opaque bytes
                objects[name] = place
            else:
                stored[name, _numbers(key.state["offset"])] = place
        shapes: dict[str, tuple[int, ...]] = {}
        chunks: dict[str, list[StoredChunk]] = {}
        for name, record in index.state["state_dict_metadata"].items():
            if not record.name.endswith(".TensorStorageMetadata"):
                continue  # opaque bytes (extra states, random states)
            shapes[_text(name)] = _numbers(record.state["size"])
            for chunk in record.state["chunks"]:
                start, size = _numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"])
                if (name, start) not in stored:
                    raise CheckpointError(f"{path}: {name}: no place for its rectangle at {start}, or two for one")
                chunks.setdefault(name, []).append(StoredChunk(Box(start, size), *stored.pop((name, start))))
            if fault := tiling_fault(shapes[name], [chunk.box for chunk in chunks.get(name, ())]):
                raise CheckpointError(f"{path}: {name}: {fault}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not the index of a distributed checkpoint ({error!r})") from None
    return shapes, chunks, objects


def _numbers(value: object) -> tuple[int, ...]:
    """Return the sizes in a tuple or in a recorded torch.Size."""
    while isinstance(value, Record):
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or len(value) > DIMS:
        raise ValueError("no numbers where some should be")
    numbers = tuple(value)
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("numbers that are not counts")
    return numbers


def _text(value: object) -> str:
    """Check that a name is a string, because hashing other objects may take exponential time."""
    if not isinstance(value, str):
        raise ValueError("a name is not text")
    return value


def recognise(path: Path) -> bool:
    folder = iteration_of(path)
    return (folder / ".metadata").is_file() and (folder / "metadata.json").is_file()


def open_form(path: Path, options: FormOptions) -> OpenedForm:
    folder = iteration_of(path)
    if (kind := read_json(folder / "metadata.json").get("sharded_backend")) != "torch_dist":
        raise CheckpointError(f"{folder / 'metadata.json'}: sharded_backend {kind!r:.40} (valid: 'torch_dist')")
    source = DistributedSource(folder)
    content = _common(folder)
    values = arguments(content, folder, source.tensors, options.heads)
    model, notes = model_of_tree(values, source.tensors, 1, options.vocab, path, folder, core=True)
    with naming(folder):
        weights = table_of(model, source.tensors, tp=1, pp=1, chunks=1, version=3)
    states, scalars = state_of(source, content, values, model, weights, folder) if options.optimizer else ([], None)
    name = re.fullmatch(r"iter_(\d+)", folder.name)
    counts = (
        content.get("iteration", int(name[1]) if name else 0),
        values.get("consumed_train_samples", 0),
        values.get("consumed_valid_samples", 0),
    )
    iteration, consumed, validated = (n if type(n) is int and n >= 0 else 0 for n in counts)
    tokenizer, tokenizer_notes = tokenizer_of(values)
    notes += (*tokenizer_notes, state_note(scalars, options.optimizer, "taken"))
    check_counts(scalars, counts[0], folder)
    plain_fields = plain_state(scalars, iteration, consumed, validated)
    table = joined([weights, *states])
    return OpenedForm(source, model, table, iteration, consumed, plain_fields | tokenizer, notes)


def _common(folder: Path) -> dict[str, object]:
    """Return the content of common.pt; {} if the file does not exist."""
    content = read_pickled(folder / "common.pt") if (folder / "common.pt").exists() else {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / 'common.pt'}: holds {type(content).__name__}, not a checkpoint")
    return content


def arguments(content: Mapping[str, object], folder: Path, tensors: Tensors, heads: int | None) -> dict[str, object]:
    """Return Megatron's arguments from common.pt or, if it contains none, arguments derived from the tensors and the
    number of heads.

    content: the content of common.pt. Errors: CheckpointError if neither the arguments nor the number of heads are
    known.
    """
    if values := values_of(content):
        stored_heads = values.get("num_attention_heads")
        if heads not in (None, stored_heads):
            raise CheckpointError(f"--num-attention-heads {heads}: {folder / 'common.pt'} says {stored_heads}")
        return values
    if heads is None:
        raise CheckpointError(f"{folder}: carries no arguments; give --num-attention-heads")
    return _implied_by(tensors, heads, folder)


def _implied_by(tensors: Tensors, heads: int, folder: Path) -> dict[str, object]:
    def shape(name: str) -> tuple[int, ...]:
        if f"0.0.0/{name}" not in tensors:
            raise CheckpointError(f"{folder}: {name}: is missing")
        return tensors[f"0.0.0/{name}"][0]

    first = "encoder.layers.0."
    hidden, inner = shape(f"{first}self_attention.dense.weight")
    if inner % heads:
        raise CheckpointError(f"--num-attention-heads {heads}: must divide {inner}")
    width = inner // heads
    # The fused matrix consists of the rows of `heads` queries, `groups` keys and `groups` values.
    groups = (shape(f"{first}self_attention.query_key_value.weight")[0] // width - heads) // 2
    ffn = shape(f"{first}mlp.dense_4h_to_h.weight")[1]
    numbers = (re.match(r"0\.0\.0/encoder\.layers\.(\d+)\.", name) for name in tensors)
    table: Mapping[str, object] = tensors
    has_positions = "0.0.0/embedding.position_embeddings.weight" in table
    return {
        "num_layers": 1 + max(int(number[1]) for number in numbers if number),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": width,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "swiglu": shape(f"{first}mlp.dense_h_to_4h.weight")[0] == 2 * ffn,
        "add_bias_linear": f"0.0.0/{first}mlp.dense_4h_to_h.bias" in table,
        "normalization": "LayerNorm" if "0.0.0/encoder.final_norm.bias" in table else "RMSNorm",
        "position_embedding_type": "learned_absolute" if has_positions else "rope",
        "max_position_embeddings": shape("embedding.position_embeddings.weight")[0] if has_positions else 4096,
        "untie_embeddings_and_output_weights": "0.0.0/output_layer.weight" in table,
    }
