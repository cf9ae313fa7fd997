"""Write checkpoints in torch's distributed format, as read by Megatron-core 0.18 (`torch_dist`).

A checkpoint consists of one file with all tensors, each stored as a small torch file, and an index of their positions.
The index stacks uniform layers, [layers, ...], but each layer is written separately. The folder can be loaded in any
layout whose vocabulary is padded to the same number of rows. The names are defined in eras.py, and the non-tensor
values in trees_write.py. This module does not depend on ranks.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from mega.core.architecture import Architecture, architecture
from mega.core.checkpoint.forms.form import Export, ExportSource, FormOptions
from mega.core.checkpoint.forms.mapping import Source, Table, joined
from mega.core.checkpoint.forms.megatron.core import state_name
from mega.core.checkpoint.forms.megatron.eras import styled
from mega.core.checkpoint.forms.megatron.families import written_stages
from mega.core.checkpoint.forms.megatron.state import state_table
from mega.core.checkpoint.forms.megatron.state_write import written_groups, written_scaler, written_scheduler
from mega.core.checkpoint.forms.megatron.trees import table
from mega.core.checkpoint.forms.megatron.trees_write import (
    LINEARS,
    TreeMetadata,
    tree_metadata,
    write_tracker,
    written_table,
)
from mega.core.checkpoint.forms.writing import whole_tensor, write_json, write_torch
from mega.core.checkpoint.own.source import OwnSource
from mega.core.files import whole_file
from mega.core.untrusted import Json

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

FILE = "__0_0.distcp"
VERSIONS: Mapping[str, Json] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The content of metadata.json."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")


class DistcpFile:
    """Writes a file of tensors, and records the index of the file. file: the new file, open for writing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._stored: dict[object, object] = {}

    def add(self, name: str, whole: tuple[int, ...], start: tuple[int, ...], tensor: torch.Tensor) -> None:
        """Write a rectangle of the tensor `name`. whole: shape of the tensor. start: index of the rectangle's first
        element."""
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        chunk = ChunkStorageMetadata(torch.Size(start), tensor.shape)
        properties = TensorProperties(dtype=tensor.dtype)
        if name not in self._described:
            self._described[name] = TensorStorageMetadata(properties, torch.Size(whole), [])
        metadata = self._described[name]
        assert isinstance(metadata, TensorStorageMetadata)  # objects written by `opaque` have other names
        metadata.chunks.append(chunk)
        self._store(MetadataIndex(name, torch.Size(start)), tensor)

    def opaque(self, name: str, content: object) -> None:
        """Write an object that is not a tensor."""
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        self._described[name] = BytesStorageMetadata()
        self._store(MetadataIndex(name), [content])

    def _store(self, index: object, content: object) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        buffer, begin = io.BytesIO(), self._file.tell()
        torch.save(content, buffer)
        self._file.write(buffer.getbuffer())
        self._stored[index] = _StorageInfo(FILE, begin, self._file.tell() - begin)

    def index(self) -> bytes:
        """Return the content of `.metadata`."""
        from torch.distributed.checkpoint.metadata import Metadata

        return pickle.dumps(Metadata(self._described, storage_data=self._stored), protocol=4)


def export(own: ExportSource, to: str, options: FormOptions) -> Export:
    """Plan an export to a folder that Megatron-core 0.18 loads. One tensor of one layer is in memory at a time."""
    model, layout = architecture(own.model), options.layout
    metadata = tree_metadata(own, to, "core", options)
    written_table(own.model, layout.tp, layout.pp)  # raises if the model is not divisible into the target layout
    weights = table(own.model, 1, written_stages(model, 1), model.input.rows(layout.tp))

    def fill(folder: Path, table: Table, source: Source) -> int:
        place = folder / f"iter_{metadata.iteration:07d}"
        place.mkdir(parents=True)
        with whole_file(place / FILE) as file:
            distcp = DistcpFile(file)
            for target in table.targets:
                _write(distcp, target.name, whole_tensor(target, source), model, metadata)
            for name in _extra_states(model, stacked=_stacked(metadata)):
                distcp.opaque(name, torch.empty(0, dtype=torch.uint8))
            length = file.tell()
        with whole_file(place / ".metadata") as file:
            file.write(distcp.index())
        write_torch(place / "common.pt", common_of(metadata))
        write_json(place / "metadata.json", VERSIONS)
        write_tracker(folder, metadata.iteration)
        return length

    combined = joined([weights, *(state_table(weights, kind) for kind in metadata.kinds)])
    tensors = OwnSource(own.checkpoint, ("weights", *metadata.kinds)) if metadata.kinds else own.source
    return Export(combined, fill, tensors, notes=metadata.notes)


def _stacked(metadata: TreeMetadata) -> bool:
    """Whether Megatron-core stacks the layers in the checkpoint's index. It does so only if all layers or no layers
    have experts."""
    return metadata.arguments.get("moe_layer_freq", 1) == 1


def _write(distcp: DistcpFile, name: str, tensor: torch.Tensor, model: Architecture, metadata: TreeMetadata) -> None:
    """Write one tensor of the export. name: the tensor's name in the conversion's table, which is `0.0.0/common name`
    for a weight and `kind/0.0.0/common name` for state.

    layer 3's weight [out, in] of 12 layers:  rectangle at (3, 0, 0) of size [1, out, in] in [12, out, in]
    """
    kind, _, common = name.rpartition("0.0.0/")
    kind = kind.rstrip("/")
    weight, index, depth = styled(common, "core"), dict[str, int](), dict[str, int]()
    if (match := _LAYER.fullmatch(weight)) and _stacked(metadata):
        weight, index["layer"], depth["layer"] = f"decoder.layers.{match[2]}", int(match[1]), len(model.layers)
    if expert := _EXPERT.search(weight):
        index["expert"], depth["expert"] = int(expert[1]), _experts(model)
        weight = weight.replace(expert[0], ".experts.experts.")
    start, whole = (*index.values(), *(0,) * tensor.dim()), (*depth.values(), *tensor.shape)
    tensor = tensor[(None,) * len(index)]
    names = [state_name(kind, weight, distributed=metadata.flat) if kind else weight]
    # The distributed optimizer also stores a copy of fp32 weights as masters.
    if not kind and metadata.flat and "master" not in metadata.kinds:
        names.append(state_name("master", weight, distributed=True))
    for each in names:
        distcp.add(each, whole, start, tensor)


def _experts(model: Architecture) -> int:
    """The number of experts in an MoE layer; 0 for a dense model."""
    return next((layer.experts.count for layer in model.layers if layer.experts is not None), 0)


def _extra_states(model: Architecture, *, stacked: bool) -> Iterator[str]:
    """Return the names of the extra states that Megatron-core's modules expect. An extra state is used only for fp8,
    and is otherwise empty."""
    count = len(model.layers)
    for number, layer in enumerate(model.layers):
        normed = layer.attention.q_norm is not None
        modules = [*LINEARS[:2], *(("self_attention.q_layernorm", "self_attention.k_layernorm") if normed else ())]
        prefix, place, total = ("", f"{number}", f"{count}") if stacked else (f"{number}.", "0", "1")
        experts = layer.experts
        networks = ["mlp"] if experts is None else ["mlp.shared_experts"] if experts.shared is not None else []
        modules += [f"{network}.linear_fc{each}" for network in networks for each in (1, 2)]
        yield from (f"decoder.layers.{prefix}{module}._extra_state/shard_{place}_{total}" for module in modules)
        for one in range(0 if experts is None else experts.count):
            position = f"{number}.{one}_{count}.{_experts(model)}" if stacked else f"{one}_{_experts(model)}"
            name = f"decoder.layers.{prefix}mlp.experts.experts.linear_fc"
            yield from (f"{name}{each}._extra_state/shard_{position}" for each in (1, 2))
    for predictor in model.output.ahead:
        modules = ["enorm", "hnorm", "eh_proj", "final_layernorm"]
        networks = ["mlp"] if predictor.layer.experts is None else []
        inner = [*LINEARS[:2], *(f"{network}.linear_fc{each}" for network in networks for each in (1, 2))]
        modules += [f"transformer_layer.{each}" for each in inner]
        yield from (f"{predictor.name}.{module}._extra_state/shard_0_1" for module in modules)
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def common_of(metadata: TreeMetadata) -> dict[str, object]:
    """Return the content of common.pt, which is all non-tensor values."""
    content = {
        "args": argparse.Namespace(**metadata.arguments),
        "checkpoint_version": 3.0,
        "iteration": metadata.iteration,
    }
    content_metadata: dict[str, object] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if metadata.scalars is None:
        return {**content, "content_metadata": content_metadata}
    groups = {"param_groups": written_groups(metadata.scalars, (True, False), "core")}
    optimizer: dict[str, object] = {
        **({"optimizer": groups} if metadata.flat or "master" in metadata.kinds else groups)
    }
    if metadata.flat:
        optimizer["param_state_sharding_type"] = "fully_reshardable"
        content_metadata |= {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    scheduler = written_scheduler(metadata.scalars, "core")
    optimizer |= written_scaler(metadata.scalars)
    return {**content, "content_metadata": content_metadata, "optimizer": optimizer, **scheduler}
