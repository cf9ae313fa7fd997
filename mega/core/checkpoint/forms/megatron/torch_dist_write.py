"""Checkpoints in torch's distributed format as Megatron-core 0.18 reads them (`torch_dist`), written.

One file of tensors, each a small torch file, and an index of where they are; uniform layers are stacked, [layers, ...],
and lie there one by one. Such a folder fits any layout whose vocabulary is padded to as many rows. The names are those
of eras.py, what is said besides tensors is trees_write.py's. Knows no ranks.
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
from mega.core.checkpoint.forms.form import Export, Given, Own
from mega.core.checkpoint.forms.mapping import Source, Table, joined
from mega.core.checkpoint.forms.megatron.core import state_name
from mega.core.checkpoint.forms.megatron.eras import styled
from mega.core.checkpoint.forms.megatron.families import written_stages
from mega.core.checkpoint.forms.megatron.state import alike
from mega.core.checkpoint.forms.megatron.state_write import written_groups, written_scaler, written_scheduler
from mega.core.checkpoint.forms.megatron.trees import table
from mega.core.checkpoint.forms.megatron.trees_write import LINEARS, Said, said_of, write_tracker, written_table
from mega.core.checkpoint.forms.writing import made, write_json, write_torch
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
"""What metadata.json says."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")


class DistcpFile:
    """A file of tensors and the index of them. file: a new one, to write into."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._stored: dict[object, object] = {}

    def add(self, name: str, whole: tuple[int, ...], start: tuple[int, ...], tensor: torch.Tensor) -> None:
        """The rectangle of the tensor `name`, of shape `whole`, that begins at `start`."""
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
        described = self._described[name]
        assert isinstance(described, TensorStorageMetadata)  # the name is not that of opaque bytes
        described.chunks.append(chunk)
        self._store(MetadataIndex(name, torch.Size(start)), tensor)

    def opaque(self, name: str, content: object) -> None:
        """Something that is no tensor."""
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
        """What `.metadata` holds."""
        from torch.distributed.checkpoint.metadata import Metadata

        return pickle.dumps(Metadata(self._described, storage_data=self._stored), protocol=4)


def export(own: Own, to: str, given: Given) -> Export:
    """A folder that Megatron-core 0.18 loads; one tensor of one layer is in memory at a time."""
    model, layout = architecture(own.model), given.layout
    said = said_of(own, to, "core", given)
    written_table(own.model, layout.tp, layout.pp)  # the layout that the folder is for must be one
    weights = table(own.model, 1, written_stages(model, 1), model.input.rows(layout.tp))

    def fill(folder: Path, table: Table, source: Source) -> int:
        place = folder / f"iter_{said.iteration:07d}"
        place.mkdir(parents=True)
        with whole_file(place / FILE) as file:
            distcp = DistcpFile(file)
            for target in table.targets:
                _write(distcp, target.name, made(target, source), model, said)
            for name in _extra_states(model, stacked=_stacked(said)):
                distcp.opaque(name, torch.empty(0, dtype=torch.uint8))
            length = file.tell()
        with whole_file(place / ".metadata") as file:
            file.write(distcp.index())
        write_torch(place / "common.pt", common_of(said))
        write_json(place / "metadata.json", VERSIONS)
        write_tracker(folder, said.iteration)
        return length

    both = joined([weights, *(alike(weights, kind) for kind in said.kinds)])
    return Export(both, fill, OwnSource(own.checkpoint, ("weights", *said.kinds)), notes=said.notes)


def _stacked(said: Said) -> bool:
    """Whether core has layers one upon the other, for which it takes them where all or none have experts."""
    return said.arguments.get("moe_layer_freq", 1) == 1


def _write(distcp: DistcpFile, name: str, tensor: torch.Tensor, model: Architecture, said: Said) -> None:
    """One tensor of the table, by its name there: `0.0.0/common name`, of state `kind/0.0.0/common name`."""
    kind, _, common = name.rpartition("0.0.0/")
    kind = kind.rstrip("/")
    weight, index, depth = styled(common, "core"), dict[str, int](), dict[str, int]()
    if (match := _LAYER.fullmatch(weight)) and _stacked(said):
        weight, index["layer"], depth["layer"] = f"decoder.layers.{match[2]}", int(match[1]), len(model.layers)
    if expert := _EXPERT.search(weight):
        index["expert"], depth["expert"] = int(expert[1]), _experts(model)
        weight = weight.replace(expert[0], ".experts.experts.")
    start, whole = (*index.values(), *(0,) * tensor.dim()), (*depth.values(), *tensor.shape)
    tensor = tensor[(None,) * len(index)]
    names = [state_name(kind, weight, distributed=said.flat) if kind else weight]
    if not kind and said.flat and "master" not in said.kinds:  # the distributed optimizer keeps fp32 weights twice
        names.append(state_name("master", weight, distributed=True))
    for each in names:
        distcp.add(each, whole, start, tensor)


def _experts(model: Architecture) -> int:
    """Of each mixture."""
    return next((layer.experts.count for layer in model.layers if layer.experts is not None), 0)


def _extra_states(model: Architecture, *, stacked: bool) -> Iterator[str]:
    """Names of the states that modules of core look for besides parameters: of fp8, and empty without."""
    count = len(model.layers)
    for number, layer in enumerate(model.layers):
        normed = layer.attention.q_norm is not None
        modules = [*LINEARS[:2], *(("self_attention.q_layernorm", "self_attention.k_layernorm") if normed else ())]
        prefix, place, of = ("", f"{number}", f"{count}") if stacked else (f"{number}.", "0", "1")
        experts = layer.experts
        networks = ["mlp"] if experts is None else ["mlp.shared_experts"] if experts.shared is not None else []
        modules += [f"{network}.linear_fc{each}" for network in networks for each in (1, 2)]
        yield from (f"decoder.layers.{prefix}{module}._extra_state/shard_{place}_{of}" for module in modules)
        for one in range(0 if experts is None else experts.count):
            at = f"{number}.{one}_{count}.{_experts(model)}" if stacked else f"{one}_{_experts(model)}"
            name = f"decoder.layers.{prefix}mlp.experts.experts.linear_fc"
            yield from (f"{name}{each}._extra_state/shard_{at}" for each in (1, 2))
    for ahead in model.output.ahead:
        modules = ["enorm", "hnorm", "eh_proj", "final_layernorm"]
        networks = ["mlp"] if ahead.layer.experts is None else []
        inner = [*LINEARS[:2], *(f"{network}.linear_fc{each}" for network in networks for each in (1, 2))]
        modules += [f"transformer_layer.{each}" for each in inner]
        yield from (f"{ahead.name}.{module}._extra_state/shard_0_1" for module in modules)
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def common_of(said: Said) -> dict[str, object]:
    """What common.pt holds: all that is no tensor."""
    content = {
        "args": argparse.Namespace(**said.arguments),
        "checkpoint_version": 3.0,
        "iteration": said.iteration,
    }
    described: dict[str, object] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if said.facts is None:
        return {**content, "content_metadata": described}
    groups = {"param_groups": written_groups(said.facts, (True, False), "core")}
    optimizer: dict[str, object] = {**({"optimizer": groups} if said.flat or "master" in said.kinds else groups)}
    if said.flat:
        optimizer["param_state_sharding_type"] = "fully_reshardable"
        described |= {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    scheduler = written_scheduler(said.facts, "core")
    optimizer |= written_scaler(said.facts)
    return {**content, "content_metadata": described, "optimizer": optimizer, **scheduler}
