"""Read Adam's state from Megatron-core's distributed checkpoints: the tensors per parameter, and the scalars.

Two formats are read. In the named format, each moment and each master is a separate tensor, stacked like the weights.
Non-distributed optimizers, and the distributed optimizer in its "fully reshardable" mode, write this format. The flat
format ("dp reshardable" mode) consists of the distributed optimizer's buffers for each tensor and pipeline rank, in
which a parameter has only a position (core.py). Any other format is refused. Masters must round to the weights, which
verifies the positions. This module does not open files; torch_dist.py reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from mega.core.architecture import architecture
from mega.core.checkpoint.forms.mapping import Source, Table, assemble, inverted, joined, prove, whole_box
from mega.core.checkpoint.forms.megatron.core import (
    KINDS,
    FlatName,
    bucket_limit,
    buckets_of,
    flat_name,
    named_state,
    own_buckets,
    state_name,
)
from mega.core.checkpoint.forms.megatron.eras import LEAVE, WORDS, Era, parameter_place
from mega.core.checkpoint.forms.megatron.families import stages_of
from mega.core.checkpoint.forms.megatron.state import (
    OptimizerScalars,
    check_groups,
    check_optimizer,
    groups_of,
    in_order_of,
    optimizer_parts,
    scalars_in,
    state_table,
)
from mega.core.checkpoint.forms.megatron.trees import table
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.pieces import CheckpointError, naming
from mega.core.config.sections import ModelConfig
from mega.core.plan.layers import stage_layers


class Stored(Source, Protocol):
    """A source of a folder's tensors. Call `show` or `show_flat` to make tensors of the optimizer's state readable."""

    @property
    def state(self) -> Mapping[str, tuple[int, ...]]:
        """Stored name -> shape, for the tensors of the optimizer's state."""

    def show(self, stored: str, weight: str, kind: str) -> None:
        """Make a stored tensor readable as state of the given kind for the weight stored as `weight`."""

    def show_flat(self, stored: str, begin: int, name: str, shape: tuple[int, ...]) -> None:
        """Make the elements of a stored vector, starting at index `begin`, readable as the tensor `name`."""

    def hide(self, kind: str) -> None:
        """Revert `show` and `show_flat` for one kind of state."""

    def object(self, name: str) -> object:
        """Return a stored object that is not a tensor; None if the name is unknown."""


def state_of(
    source: Stored,
    content: Mapping[str, object],
    values: Mapping[str, object],
    model: ModelConfig,
    weights: Table,
    where: Path,
) -> tuple[list[Table], OptimizerScalars | None]:
    """Return (tables for the kinds of state, scalars), and make the state's tensors readable in `source`. Return ([],
    None) if there is no state.

    content: the content of the folder's common.pt. values: Megatron's arguments. weights: the table of the weights.
    Errors: CheckpointError naming the tensor or key that is inconsistent.
    """
    if not source.state:
        return [], None
    check_optimizer(values, where)
    named_tensors = {name: parsed for name in source.state if (parsed := named_state(name)) is not None}
    flat = {name: buffer for name in source.state if (buffer := flat_name(name)) is not None and buffer.key in KEYS}
    if unknown := next((name for name in source.state if name not in (named_tensors or flat)), None):
        raise CheckpointError(f"{where}: {unknown}: the form of this state is not known; {LEAVE}")
    saved = weights
    if named_tensors:
        for name, (kind, weight) in named_tensors.items():
            source.show(name, weight, kind)
        rank_scalars = [_common_scalars(content, model_dims(weights), where)]
    else:
        saved, labels = _saved(model, values, flat.values(), source, where)
        _show_flat(source, {buffer: name for name, buffer in flat.items()}, saved, labels, values, where)
        rank_scalars = [_rank_scalars(source, content, model_dims(weights), rank, where) for rank in range(len(labels))]
    if any(each != rank_scalars[0] for each in rank_scalars):
        raise CheckpointError(f"{where}: its optimizers are not at one step, scale and schedule; {LEAVE}")
    kinds = [kind for kind in KINDS if any(name.startswith(f"{kind}/") for name in source.tensors)]
    full = any(name.startswith(state_name("master", "", distributed=True)) for name in named_tensors)
    kinds_read = checked(source, weights, saved, kinds, where, FULL if full else "")
    return [state_table(saved, kind) for kind in kinds_read], rank_scalars[0]


FULL = ", as core 0.18 saves this form of several buckets with padding: its own resume has other losses, too"


KEYS = frozenset(KINDS.values())


def model_dims(weights: Table) -> dict[str, int]:
    """Return a dict: tensor name -> number of dims. A tensor's number of dims determines its parameter group."""
    return {target.name: len(target.shape) for target in weights.targets}


# Scalars


def _common_scalars(content: Mapping[str, object], dims: Mapping[str, int], where: Path) -> OptimizerScalars:
    """Return the scalars from common.pt, where the named format stores the parameter groups."""
    optimizer = content.get("optimizer")
    if not isinstance(optimizer, dict) or 0 not in optimizer:
        return _scalars(content, optimizer, dims, where)
    # Experts that are distributed over ranks have a separate optimizer.
    expert_dims = {name: count for name, count in dims.items() if EXPERT in name}
    other_dims = {name: count for name, count in dims.items() if name not in expert_dims}
    first, *rest = (
        _scalars(content, each, expert_dims if number else other_dims, where, experts=number > 0)
        for number, each in optimizer.items()
    )
    if any(each != first for each in rest):
        raise CheckpointError(f"{where}: its optimizers are not at one step, scale and schedule; {LEAVE}")
    return first


def _rank_scalars(
    source: Stored, content: Mapping[str, object], dims: Mapping[str, int], rank: int, where: Path
) -> OptimizerScalars:
    """Return the scalars of one rank from a checkpoint in the flat format, in which every rank stores its scalars."""
    prefix = f"optimizer.distributed.dp_group_idx_{rank}."
    optimizer = {"optimizer": source.object(f"{prefix}optimizer"), "grad_scaler": source.object(f"{prefix}grad_scaler")}
    return _scalars(content, optimizer, dims, where / prefix)


EXPERT = ".mlp.experts."
"""Substring of the names of expert tensors."""


def _scalars(
    content: Mapping[str, object], optimizer: object, dims: Mapping[str, int], where: Path, *, experts: bool = False
) -> OptimizerScalars:
    optimizer, inner, groups = optimizer_parts(optimizer, where)
    checked_groups = check_groups(groups, in_order_of(groups, groups_of(dims)), where, experts=experts)
    return scalars_in(content, optimizer, inner, checked_groups, where)


# Flat buffers


def _saved(
    model: ModelConfig, values: Mapping[str, object], buffers: Iterable[FlatName], source: Stored, where: Path
) -> tuple[Table, list[list[str]]]:
    """Return (the table of the weights for the layout in which the checkpoint was saved, labels of each rank's model
    chunks)."""
    ranks, parts = {each.rank for each in buffers}, {each.chunk for each in buffers}
    sizes = [
        size if isinstance(size := values.get(name) or 1, int) else 0
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
        )
    ]
    tp, pp, chunks = sizes
    rows = source.tensors.get(f"0.0.0/{WORDS}", ((0,), torch.float32))[0][0]
    if min(sizes) < 1 or ranks != set(range(tp * pp)) or parts != set(range(chunks)) or rows % tp:
        raise CheckpointError(
            f"{where}: holds the optimizer's buffers of {len(ranks)} ranks with {len(parts)} model chunks and {rows} "
            f"rows of the vocabulary, args say {tp} tensor x {pp} pipeline ranks with {chunks} chunks; {LEAVE}"
        )
    structure = architecture(model)
    stages = stage_layers(len(structure.layers), pp, chunks)
    parts_of = [(f"{p}.{c}", stages[p][c]) for p in range(pp) for c in range(chunks)]
    position_of = {block: (part, number) for part, numbers in parts_of for number, block in enumerate(numbers)}
    # If there are several stages, the last stage stores a second copy of a tied embedding.
    tied = ("output_layer.weight",) if len(parts_of) > 1 and structure.tied else ()
    tree_stages = stages_of(
        structure, [position_of[block] for block in sorted(position_of)], f"{pp - 1}.{chunks - 1}", tied
    )
    saved_table = table(model, tp, tree_stages, rows // tp)
    return saved_table, [[f"{t}.{p}.{c}" for c in range(chunks)] for p in range(pp) for t in range(tp)]


def _show_flat(
    source: Stored,
    stored: Mapping[FlatName, str],
    saved: Table,
    labels: list[list[str]],
    values: Mapping[str, object],
    where: Path,
) -> None:
    """Make the state of each rank's parameters readable as slices of the buffers.

        buffer of rank, chunk, bucket, kind:  | ... padding ... | weight at `begin` | ... |        [bucket.length]

    Errors: CheckpointError if the buffers do not have this layout.
    """
    era: Era = "core-local" if values.get("transformer_impl") == "local" else "core"
    tied = not values.get("untie_embeddings_and_output_weights", False)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    # The inverted table lists the names and shapes of the parameters that each rank stores.
    for target in inverted(saved).targets:
        label, _, name = target.name.partition("/")
        shapes.setdefault(label, {})[name] = target.shape
    remaining = dict(stored)

    def taken(buffer: FlatName, length: int) -> str:
        name = remaining.pop(buffer, "")
        if source.state.get(name) != (length,):
            actual = f"has shape {source.state[name]}" if name else "is missing"
            raise CheckpointError(f"{where}: {name or buffer}: {actual}, expected {length} numbers; {LEAVE}")
        return name

    for rank, label in ((rank, label) for rank, chunks in enumerate(labels) for label in chunks):
        chunk_shapes, (_, stage, chunk) = shapes[label], map(int, label.split("."))
        numbers = {
            name: prod(chunk_shapes[name]) for name in sorted(chunk_shapes, key=lambda name: parameter_place(name, era))
        }
        buckets = buckets_of(numbers, bucket_limit(values, stage, chunk), own_buckets(numbers, tied))
        for number, bucket in enumerate(buckets):
            for kind, key in KINDS.items():
                name = taken(FlatName(rank, chunk, number, key), bucket.length)
                for weight, begin in bucket.begins.items():
                    source.show_flat(name, begin, f"{kind}/{label}/{weight}", chunk_shapes[weight])
    if remaining:
        raise CheckpointError(
            f"{where}: {next(iter(remaining.values()))}: no parameter is stored in this bucket; {LEAVE}"
        )


# Proof


def checked(source: Stored, weights: Table, saved: Table, kinds: list[str], where: Path, explanation: str) -> list[str]:
    """Check the optimizer state, and return the kinds of state to read. Masters are read only for 16-bit weights; fp32
    weights serve as masters themselves.

    Errors: CheckpointError if a kind is missing or not fp32, if a tensor is missing or has a wrong shape, or if a
    master does not round to its weight.
    """
    for name, (_, dtype) in source.tensors.items():
        if name.partition("/")[0] in kinds and dtype != torch.float32:
            raise CheckpointError(f"{where}: {name}: is {dtype}, expected torch.float32; {LEAVE}")
    with naming(where):
        prove(joined([weights, *(state_table(saved, kind) for kind in kinds)]), source.tensors)
    all_fp32 = all(dtype == torch.float32 for _, dtype in weights.tensors(source.tensors).values())
    if missing := {"moment1", "moment2", *(() if all_fp32 else ("master",))} - set(kinds):
        raise CheckpointError(f"{where}: the optimizer's state holds no {KINDS[min(missing)]}; {LEAVE}")
    if "master" in kinds:
        _check_masters(source, weights, state_table(saved, "master"), where, explanation)
    if all_fp32:
        source.hide("master")
    return [kind for kind in kinds if kind != "master" or not all_fp32]


def _check_masters(source: Source, weights: Table, masters: Table, where: Path, explanation: str) -> None:
    by_name = {master.name.partition("/")[2]: master for master in masters.targets}
    for weight in weights.targets:
        if (master := by_name.get(weight.name.partition("/")[2])) is None:
            continue  # a tensor that is not trained has no master
        dtype = source.tensors[weight.fragments[0].source][1]
        for box in blocks(whole_box(weight.shape), dtype.itemsize):
            if not torch.equal(assemble(master, box, source).to(dtype), assemble(weight, box, source)):
                raise CheckpointError(
                    f"{where}: {master.name}: rounded to {dtype}, it is not the weight{explanation}; {LEAVE}"
                )
