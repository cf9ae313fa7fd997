"""Plan the files of a layout, that is, the rectangles of a model's tensors that each rank writes.

The plan depends only on configurations. The tensors of the pieces are meta tensors; the elements are supplied during
the save.
"""

from __future__ import annotations

from math import prod

import torch

from mega.core.architecture import inventory, placement
from mega.core.checkpoint.own.options import Layout as Layout  # re-exported for the callers of `plan_files`
from mega.core.checkpoint.own.pieces import CheckpointError, Piece, Tensors
from mega.core.config.sections import ModelConfig
from mega.core.shard import on_tensor_rank, shard

ONE = Layout()
"""The layout of a single rank."""


def plan_files(tensors: Tensors, model: ModelConfig, layout: Layout) -> list[list[Piece]]:
    """Return the pieces of `tensors` for each of the tp x pp ranks, with tp varying fastest. Every element is in
    exactly one piece.

        tp 2, pp 2      rank 0: tp 0, stage 0    rank 1: tp 1, stage 0    rank 2: tp 0, stage 1    rank 3: tp 1, stage 1

    Keys are `kind/logical name`. Kinds that contain the model's tensors (weights, masters, moments) are split as the
    model's tensor inventory specifies, and must contain only the model's tensors; `weights` must contain all of the
    model's tensors. Rank 0 writes all other tensors, such as rows and columns of factored moments, which every rank has
    in full.
    Errors: CheckpointError naming a tensor that is missing, unknown or of the wrong shape; ValueError if the model is
    not divisible into the layout.
    """
    logical = {}
    for tensor in inventory(model):  # stops early if a malicious config has too many layers
        if f"weights/{tensor.name}" not in tensors:
            if not tensor.trainable:  # a checkpoint of adapters lacks this tensor
                continue
            raise CheckpointError(f"weights/{tensor.name}: the model has it, the checkpoint does not")
        logical[tensor.name] = tensor
    placed, tp = placement(model, layout.pp, layout.chunks, layout.stage_layers), layout.tp
    for tensor in logical.values():
        if tensor.cut():
            shard(tensor, on_tensor_rank(0, tp))  # raises if the dim is not divisible by tp
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
    """Return a piece whose tensor is a meta tensor. `save_all` requests the elements when it writes the piece."""
    return Piece(key, whole, start, torch.empty(size, dtype=dtype, device="meta"))
