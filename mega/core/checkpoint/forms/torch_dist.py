"""Checkpoints in torch's distributed format as Megatron-core writes them (`torch_dist`), read only.

Their index, `.metadata`, is a pickle. It is read by an interpreter of our own for the dozen instructions that
such files need: it builds plain records out of names and values and can neither import nor call anything.
"""

from __future__ import annotations

import io
import pickletools
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mega.core.checkpoint.forms.foreign import inside, unpickled
from mega.core.checkpoint.forms.form import Given, Opened
from mega.core.checkpoint.forms.megatron import common_name, iteration_of, model_of_tree, table_of
from mega.core.checkpoint.forms.megatron_state import LEAVE, state_note
from mega.core.checkpoint.forms.pickles import Arguments, read_pickled
from mega.core.checkpoint.own.disk import opening, read_file, read_into
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors

INDEX_LIMIT = 256 << 20
LAYERS = "decoder.layers."


@dataclass
class Record:
    """An object of the pickle: the name of its class or function, what it was given, its state."""

    name: str
    given: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def read_records(data: bytes, path: Path) -> Any:
    """The object that a pickle describes, made of dicts, lists, tuples, numbers, text and `Record`s.

    Errors: CheckpointError naming the instruction for anything that such an index does not need.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

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
                stack.append(Record(f"{module}.{attribute}"))
            elif name in ("REDUCE", "NEWOBJ"):
                given, called = stack.pop(), stack.pop()
                stack.append(Record(called.name, tuple(given)))
            elif name == "BUILD":
                state = stack.pop()
                stack[-1].state.update(state if isinstance(state, dict) else {"": state})
            elif name in ("APPEND", "APPENDS"):
                items = [stack.pop()] if name == "APPEND" else since_mark()
                stack[-1].extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
                if not all(isinstance(key, str | int | Record) for key in items[::2]):
                    raise ValueError("a key is neither text, number nor record")  # tuples can take for ever to hash
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            else:
                raise CheckpointError(f"{path}: the pickle holds the instruction {name}")
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not the index of a distributed checkpoint ({error})") from None
    raise CheckpointError(f"{path}: the pickle does not end")


@dataclass(frozen=True)
class Chunk:
    """A stored rectangle: which file, which bytes of it."""

    box: Box
    file: str
    offset: int
    length: int


class _Last(threading.local):
    """The stored rectangle that this thread read last."""

    chunk: Chunk | None = None
    tensor: torch.Tensor


class DistributedSource:
    """The model's tensors of a `torch_dist` folder, by common names of one rank: `0.0.0/encoder.layers.N...`.

    Uniform layers are stacked in the files, [layers, ...]; here each layer is a tensor of its own. `state` are the
    names of an optimizer's tensors, which are not read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = read_records(read_file(folder / ".metadata", INDEX_LIMIT), folder / ".metadata")
        shapes, self._chunks, self.state = _index(index, folder / ".metadata")
        self._last = _Last()
        self._dtypes = {name: self._dtype(name) for name in shapes}
        self._where: dict[str, tuple[str, int | None]] = {}
        self.tensors: Tensors = {}
        for name, shape in shapes.items():
            stacked = name.startswith(LAYERS) and not re.match(r"\d+\.", name.removeprefix(LAYERS))
            for layer in range(shape[0]) if stacked else (None,):
                each = name if layer is None else f"{LAYERS}{layer}.{name.removeprefix(LAYERS)}"
                common = f"0.0.0/{common_name(each)}"
                self._where[common] = (name, layer)
                self.tensors[common] = (shape if layer is None else shape[1:], self._dtypes[name])

    def read(self, name: str, box: Box) -> torch.Tensor:
        stored, layer = self._where[name]
        if layer is not None:
            box = Box((layer, *box.start), (1, *box.size))
        made = torch.empty(box.size, dtype=self._dtypes[stored])
        filled = 0
        for chunk in self._chunks[stored]:
            if shared := chunk.box.meet(box):
                made[shared.inside(box)] = self._load(stored, chunk)[shared.inside(chunk.box)]
                filled += shared.elements
        if filled != box.elements:
            raise CheckpointError(f"{self._folder}: {stored}: {filled} of {box.elements} elements are in the files")
        return made if layer is None else made[0]

    def _dtype(self, name: str) -> torch.dtype:
        return self._load(name, self._chunks[name][0]).dtype

    def _load(self, name: str, chunk: Chunk) -> torch.Tensor:
        """One stored rectangle, a small torch file within a file. A thread keeps its last: blocks are asked for."""
        if self._last.chunk is chunk:
            return self._last.tensor
        path = inside(self._folder, chunk.file, hidden="__")
        with opening(path) as (descriptor, size):
            if chunk.offset + chunk.length > size:
                raise CheckpointError(f"{path}: {name} should end at byte {chunk.offset + chunk.length} of {size}")
            buffer = bytearray(chunk.length)
            read_into(descriptor, memoryview(buffer), chunk.offset, path)
        tensor = unpickled(io.BytesIO(buffer), path)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.box.size:
            raise CheckpointError(f"{path}: {name}: not the tensor of shape {chunk.box.size} that the index promises")
        self._last.chunk, self._last.tensor = chunk, tensor.detach()
        return self._last.tensor


def _index(index: Any, path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, list[Chunk]], list[str]]:
    """Shapes and stored rectangles of the model's tensors, and the names of an optimizer's, as the index has them."""
    try:
        state = index.state
        stored = {
            (key.state["fqn"], _numbers(key.state["offset"])): place.state
            for key, place in state["storage_data"].items()
            if key.state.get("offset") is not None  # else opaque bytes
        }
        shapes: dict[str, tuple[int, ...]] = {}
        chunks: dict[str, list[Chunk]] = {}
        optimizer: list[str] = []
        for name, record in state["state_dict_metadata"].items():
            if not record.name.endswith(".TensorStorageMetadata"):
                continue  # opaque bytes (extra states, random states)
            if name.startswith("optimizer."):
                optimizer.append(name)
                continue
            shapes[name] = _numbers(record.state["size"])
            for chunk in record.state["chunks"]:
                start, size = _numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"])
                place = stored[name, start]
                box = Box(start, size)
                if not box.within(shapes[name]):
                    raise CheckpointError(f"{path}: {name}: a rectangle at {start} leaves the shape")
                one = Chunk(box, place["relative_path"], *_numbers((place["offset"], place["length"])))
                chunks.setdefault(name, []).append(one)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not the index of a distributed checkpoint ({error!r})") from None
    return shapes, chunks, optimizer


def _numbers(value: Any) -> tuple[int, ...]:
    """The numbers of a tuple or of a recorded torch.Size, each a count."""
    while isinstance(value, Record):
        value = value.given[0]
    numbers = tuple(value)
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"{numbers} are not counts")
    return numbers


def recognise(path: Path) -> bool:
    folder = iteration_of(path)
    return (folder / ".metadata").is_file() and (folder / "metadata.json").is_file()


def open_form(path: Path, given: Given) -> Opened:
    folder = iteration_of(path)
    source = DistributedSource(folder)
    if source.state and given.optimizer:
        raise CheckpointError(f"{folder}: {source.state[0]}: the form of this state is not known; {LEAVE}")
    values = arguments(folder, source.tensors, given.heads)
    model, notes = model_of_tree(values, source.tensors, 1, given.vocab, path, folder)
    table = table_of(model, source.tensors, tp=1, pp=1, chunks=1, version=3)
    name = re.fullmatch(r"iter_(\d+)", folder.name)
    notes += (state_note(None, given.optimizer, "taken"),)
    consumed = values.get("consumed_train_samples", 0)
    return Opened(source, model, table, int(name[1]) if name else 0, consumed, notes=notes)


def arguments(folder: Path, tensors: Tensors, heads: int | None) -> dict[str, Any]:
    """Megatron's arguments: those in common.pt, or what follows from the tensors and the number of heads.

    Errors: CheckpointError where both are missing.
    """
    if (folder / "common.pt").exists():
        content = read_pickled(folder / "common.pt")
        found = content.get("args") if isinstance(content, dict) else None
        if isinstance(found, Arguments) and found.values:
            said = found.values.get("num_attention_heads")
            if heads not in (None, said):
                raise CheckpointError(f"--num-attention-heads {heads}: {folder / 'common.pt'} says {said}")
            return found.values
    if heads is None:
        raise CheckpointError(f"{folder}: carries no arguments; give --num-attention-heads")
    return _implied_by(tensors, heads, folder)


def _implied_by(tensors: Tensors, heads: int, folder: Path) -> dict[str, Any]:
    def shape(name: str) -> tuple[int, ...]:
        if f"0.0.0/{name}" not in tensors:
            raise CheckpointError(f"{folder}: {name}: is missing")
        return tensors[f"0.0.0/{name}"][0]

    first = "encoder.layers.0."
    hidden, inner = shape(f"{first}self_attention.dense.weight")
    if inner % heads:
        raise CheckpointError(f"--num-attention-heads {heads}: must divide {inner}")
    width = inner // heads
    groups = (shape(f"{first}self_attention.query_key_value.weight")[0] // width - heads) // 2
    ffn = shape(f"{first}mlp.dense_4h_to_h.weight")[1]
    numbers = (re.match(r"0\.0\.0/encoder\.layers\.(\d+)\.", name) for name in tensors)
    table: Mapping[str, Any] = tensors
    learned = "0.0.0/embedding.position_embeddings.weight" in table
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
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "max_position_embeddings": shape("embedding.position_embeddings.weight")[0] if learned else 4096,
        "untie_embeddings_and_output_weights": "0.0.0/output_layer.weight" in table,
    }
