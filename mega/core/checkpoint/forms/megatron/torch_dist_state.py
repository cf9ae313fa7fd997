"""Adam's state in Megatron-core's distributed checkpoints: the tensors that become ours, and what is said besides them.

Two forms. Named: each moment and master is a tensor of its own, stacked as the weights are (the plain optimizers; the
distributed one, "fully reshardable"). Flat: the distributed optimizer's buffers of each tensor and pipeline rank ("dp
reshardable"), in which a parameter has but its place (core.py). Any other is refused; masters, rounded, must
be the weights, which proves the places. Knows no files: torch_dist.py reads them.
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
    Facts,
    alike,
    check_groups,
    check_optimizer,
    groups_of,
    in_order_of,
    optimizer_parts,
    scalars_in,
)
from mega.core.checkpoint.forms.megatron.trees import table
from mega.core.checkpoint.own.container import blocks
from mega.core.checkpoint.own.pieces import CheckpointError, naming
from mega.core.config.sections import ModelConfig
from mega.core.plan.layers import stage_layers


class Stored(Source, Protocol):
    """A folder's tensors, of which those of a state are still to be shown among the others."""

    @property
    def state(self) -> Mapping[str, tuple[int, ...]]:
        """The optimizer's tensors as they are stored: name -> shape."""

    def show(self, stored: str, weight: str, kind: str) -> None:
        """One stored tensor as the state `kind` of a weight that is stored as `weight`."""

    def show_flat(self, stored: str, begin: int, name: str, shape: tuple[int, ...]) -> None:
        """The numbers of a stored vector from `begin` on as the tensor `name`."""

    def hide(self, kind: str) -> None:
        """Take back what was shown of a kind of state."""

    def object(self, name: str) -> object:
        """What is stored under a name besides tensors; None where nothing is."""


def state_of(
    source: Stored,
    content: Mapping[str, object],
    values: Mapping[str, object],
    model: ModelConfig,
    weights: Table,
    where: Path,
) -> tuple[list[Table], Facts | None]:
    """The tables of the state's tensors, which `source` shows from now on, and its facts; neither where there is none.

    content: of the folder's common.pt. values: Megatron's arguments. weights: the table of the weights.
    Errors: CheckpointError naming the tensor or key that does not fit.
    """
    if not source.state:
        return [], None
    check_optimizer(values, where)
    named = {name: found for name in source.state if (found := named_state(name)) is not None}
    flat = {name: at for name in source.state if (at := flat_name(name)) is not None and at.key in KEYS}
    if odd := next((name for name in source.state if name not in (named or flat)), None):
        raise CheckpointError(f"{where}: {odd}: the form of this state is not known; {LEAVE}")
    saved = weights
    if named:
        for name, (kind, weight) in named.items():
            source.show(name, weight, kind)
        held = [_common_scalars(content, model_dims(weights), where)]
    else:
        saved, labels = _saved(model, values, flat.values(), source, where)
        _show_flat(source, {at: name for name, at in flat.items()}, saved, labels, values, where)
        held = [_rank_scalars(source, content, model_dims(weights), rank, where) for rank in range(len(labels))]
    if any(each != held[0] for each in held):
        raise CheckpointError(f"{where}: its optimizers are not at one step, scale and schedule; {LEAVE}")
    kinds = [kind for kind in KINDS if any(name.startswith(f"{kind}/") for name in source.tensors)]
    full = any(name.startswith(state_name("master", "", distributed=True)) for name in named)
    taken = checked(source, weights, saved, kinds, where, FULL if full else "")
    return [alike(saved, kind) for kind in taken], held[0]


FULL = ", as core 0.18 saves this form of several buckets with padding: its own resume has other losses, too"


KEYS = frozenset(KINDS.values())


def model_dims(weights: Table) -> dict[str, int]:
    """The dims of each logical tensor, by which groups of parameters are made."""
    return {target.name: len(target.shape) for target in weights.targets}


# Facts


def _common_scalars(content: Mapping[str, object], dims: Mapping[str, int], where: Path) -> Facts:
    """Of the forms that keep groups of parameters in common.pt."""
    optimizer = content.get("optimizer")
    if not isinstance(optimizer, dict) or 0 not in optimizer:
        return _scalars(content, optimizer, dims, where)
    # Experts that ranks hold apart have an optimizer of their own.
    apart = {name: count for name, count in dims.items() if EXPERT in name}
    others = {name: count for name, count in dims.items() if name not in apart}
    first, *more = (
        _scalars(content, each, apart if number else others, where, experts=number > 0)
        for number, each in optimizer.items()
    )
    if any(each != first for each in more):
        raise CheckpointError(f"{where}: its optimizers are not at one step, scale and schedule; {LEAVE}")
    return first


def _rank_scalars(
    source: Stored, content: Mapping[str, object], dims: Mapping[str, int], rank: int, where: Path
) -> Facts:
    """Of the form in which each rank keeps its own."""
    own = f"optimizer.distributed.dp_group_idx_{rank}."
    optimizer = {"optimizer": source.object(f"{own}optimizer"), "grad_scaler": source.object(f"{own}grad_scaler")}
    return _scalars(content, optimizer, dims, where / own)


EXPERT = ".mlp.experts."
"""In the names of what experts have."""


def _scalars(
    content: Mapping[str, object], optimizer: object, dims: Mapping[str, int], where: Path, *, experts: bool = False
) -> Facts:
    optimizer, inner, groups = optimizer_parts(optimizer, where)
    checked_groups = check_groups(groups, in_order_of(groups, groups_of(dims)), where, experts=experts)
    return scalars_in(content, optimizer, inner, checked_groups, where)


# Flat buffers


def _saved(
    model: ModelConfig, values: Mapping[str, object], found: Iterable[FlatName], source: Stored, where: Path
) -> tuple[Table, list[list[str]]]:
    """The table of the weights as the ranks that saved had them, and of each rank the labels of its model chunks."""
    ranks, parts = {each.rank for each in found}, {each.chunk for each in found}
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
    described = architecture(model)
    stages = stage_layers(len(described.layers), pp, chunks)
    parts_of = [(f"{p}.{c}", stages[p][c]) for p in range(pp) for c in range(chunks)]
    at = {block: (part, number) for part, held in parts_of for number, block in enumerate(held)}
    tied = ("output_layer.weight",) if len(parts_of) > 1 and described.tied else ()
    held_by = stages_of(described, [at[block] for block in sorted(at)], f"{pp - 1}.{chunks - 1}", tied)
    made = table(model, tp, held_by, rows // tp)
    return made, [[f"{t}.{p}.{c}" for c in range(chunks)] for p in range(pp) for t in range(tp)]


def _show_flat(
    source: Stored,
    stored: Mapping[FlatName, str],
    saved: Table,
    labels: list[list[str]],
    values: Mapping[str, object],
    where: Path,
) -> None:
    """Cut the buffers into the state of each rank's parameters.

    Errors: CheckpointError where they are laid out otherwise.
    """
    era: Era = "core-local" if values.get("transformer_impl") == "local" else "core"
    tied = not values.get("untie_embeddings_and_output_weights", False)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for target in inverted(saved).targets:
        label, _, name = target.name.partition("/")
        shapes.setdefault(label, {})[name] = target.shape
    left = dict(stored)

    def taken(at: FlatName, length: int) -> str:
        name = left.pop(at, "")
        if source.state.get(name) != (length,):
            has = f"has shape {source.state[name]}" if name else "is missing"
            raise CheckpointError(f"{where}: {name or at}: {has}, {length} numbers are wanted; {LEAVE}")
        return name

    for rank, label in ((rank, label) for rank, chunks in enumerate(labels) for label in chunks):
        held, (_, stage, chunk) = shapes[label], map(int, label.split("."))
        numbers = {name: prod(held[name]) for name in sorted(held, key=lambda name: parameter_place(name, era))}
        made = buckets_of(numbers, bucket_limit(values, stage, chunk), own_buckets(numbers, tied))
        for number, bucket in enumerate(made):
            for kind, key in KINDS.items():
                name = taken(FlatName(rank, chunk, number, key), bucket.length)
                for weight, begin in bucket.begins.items():
                    source.show_flat(name, begin, f"{kind}/{label}/{weight}", held[weight])
    if left:
        raise CheckpointError(f"{where}: {next(iter(left.values()))}: no parameter lies in this bucket; {LEAVE}")


# Proof


def checked(source: Stored, weights: Table, saved: Table, kinds: list[str], where: Path, why: str) -> list[str]:
    """The kinds of state to take: masters only of weights in 16 bits, else the weights are the masters.

    Errors: CheckpointError where a kind is missing or not fp32, a tensor is not there or of another shape, or a master,
    rounded, is not its weight.
    """
    for name, (_, dtype) in source.tensors.items():
        if name.partition("/")[0] in kinds and dtype != torch.float32:
            raise CheckpointError(f"{where}: {name}: is {dtype}, torch.float32 is wanted; {LEAVE}")
    with naming(where):
        prove(joined([weights, *(alike(saved, kind) for kind in kinds)]), source.tensors)
    wide = all(dtype == torch.float32 for _, dtype in weights.tensors(source.tensors).values())
    if lacking := {"moment1", "moment2", *(() if wide else ("master",))} - set(kinds):
        raise CheckpointError(f"{where}: the optimizer's state holds no {KINDS[min(lacking)]}; {LEAVE}")
    if "master" in kinds:
        _check_masters(source, weights, alike(saved, "master"), where, why)
    if wide:
        source.hide("master")
    return [kind for kind in kinds if kind != "master" or not wide]


def _check_masters(source: Source, weights: Table, masters: Table, where: Path, why: str) -> None:
    by_name = {master.name.partition("/")[2]: master for master in masters.targets}
    for weight in weights.targets:
        if (master := by_name.get(weight.name.partition("/")[2])) is None:
            continue  # what is not learned
        dtype = source.tensors[weight.fragments[0].source][1]
        for box in blocks(whole_box(weight.shape), dtype.itemsize):
            if not torch.equal(assemble(master, box, source).to(dtype), assemble(weight, box, source)):
                raise CheckpointError(f"{where}: {master.name}: rounded to {dtype}, it is not the weight{why}; {LEAVE}")
