"""The files of a layout's ranks, planned from a model's inventory: which rank writes which rectangles.

The plan is computed from configurations alone. The tensors of the pieces are meta tensors; their elements are supplied
during the save.
"""

from __future__ import annotations

from math import prod

import torch

from mega.core.architecture import inventory, placement
from mega.core.checkpoint.own.options import Layout as Layout  # plans and their layout come from one place
from mega.core.checkpoint.own.pieces import CheckpointError, Piece, Tensors
from mega.core.config.sections import ModelConfig
from mega.core.shard import on_tensor_rank, shard

ONE = Layout()
"""The layout of a single rank."""


def plan_files(tensors: Tensors, model: ModelConfig, layout: Layout) -> list[list[Piece]]:
    """The pieces of `tensors` for each of tp x pp ranks (tp fastest); every element is in exactly one piece.

        tp 2, pp 2      rank 0: tp 0, stage 0    rank 1: tp 1, stage 0    rank 2: tp 0, stage 1    rank 3: tp 1, stage 1

    Keys are `kind/logical name`. Kinds that hold the model's tensors (weights, masters, moments) are cut as the
    inventory specifies, and must hold only the model's tensors; `weights` must hold all of them. Other tensors (rows
    and columns of factored moments, which every rank has in full) are written by rank 0.
    Errors: CheckpointError naming a tensor that is missing, unknown or of another shape; ValueError if the layout does
    not divide the model.
    """
    logical = {}
    for tensor in inventory(model):  # the check also ends the loop early for a malicious config with endless layers
        if f"weights/{tensor.name}" not in tensors:
            if not tensor.trainable:  # a checkpoint of adapters names their base instead
                continue
            raise CheckpointError(f"weights/{tensor.name}: the model has it, the checkpoint does not")
        logical[tensor.name] = tensor
    placed, tp = placement(model, layout.pp, layout.chunks, layout.stage_layers), layout.tp
    for tensor in logical.values():
        if tensor.cut():
            shard(tensor, on_tensor_rank(0, tp))  # raises if the dim does not divide
    kinds = {key.partition("/")[0] for key in tensors if key.partition("/")[2] in logical} | {"weights"}
    files: list[list[Piece]] = [[] for _ in range(tp * layout.pp)]
    for key, (shape, dtype) in tensors.items():
        kind, _, name = key.partition("/")
        if kind not in kinds:
            files[0].append(planned(key, shape, (0,) * len(shape), shape, dtype))
            continue
        if name not in logical:
            raise CheckpointError(f"{key}: the model has no such tensor")
        tensor = logical[name]
        if tensor.shape != shape:
            raise CheckpointError(f"{key}: has shape {shape}, the model's is {tensor.shape}")
        first = placed[tensor.units[0]][0] * tp
        for rank in range(tp if tensor.cut() else 1):
            block = shard(tensor, on_tensor_rank(rank, tp))
            if prod(block.size):
                files[first + rank].append(planned(key, shape, block.start, block.size, dtype))
    return files


def planned(
    key: str, whole: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype
) -> Piece:
    """A piece without memory, whose elements `save_all` requests when it writes them."""
    return Piece(key, whole, start, torch.empty(size, dtype=dtype, device="meta"))
