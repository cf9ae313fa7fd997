"""Checkpoints of adapters alone, and the checkpoint of the weights that they were trained on.

One of adapters says in its plain state what its base is:

    "base": {"path": the step's directory, "digest": sha256 of its manifest}

or, where the base is weights of others, their path and what `weights_digest` (forms/direct.py) makes of their numbers.
So it is known wherever it is now; forms/open.py looks for it. `Joined` is both as one checkpoint of a whole model;
`MergedSource` is that model without adapters, their products added to its weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from mega.core.architecture import architecture, inventory
from mega.core.architecture.adapters import adapter_specs
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Piece, Tensors
from mega.core.checkpoint.own.source import OwnSource, StoredWeights
from mega.core.config.sections import ModelConfig
from mega.core.files import url_of


def describe(base: StoredWeights, digest: str | None = None) -> dict[str, str]:
    """What a checkpoint of adapters says of its base. digest: that it is known by [its own]."""
    path = str(base.path)
    return {"path": path if url_of(path) else os.path.abspath(path), "digest": digest or base.digest}


def named_base(checkpoint: StoredWeights) -> Mapping[str, str] | None:
    """What a checkpoint says of its base; None where it is whole. Errors: StoredWeightsError."""
    named = checkpoint.meta.get("base")
    if named is None:
        return None
    match named:
        case {"path": str(path), "digest": str(digest)}:
            return {"path": path, "digest": digest}
    raise CheckpointError(f"{checkpoint.path}: meta.base must hold a path and a digest")


def check_adapters(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], where: str, named: str) -> None:
    """Errors: StoredWeightsError where `shapes`, key -> shape of what `where` holds, are not the adapters of `model`.

    named: what messages call the model.
    """
    try:
        wanted = {f"weights/{tensor.name}": tensor.shape for tensor in inventory(model) if tensor.trainable}
    except ValueError as error:
        raise CheckpointError(f"{where}: is not an adapter of {named}: {error}") from None
    for key in sorted(wanted.keys() ^ shapes.keys()):
        fault = "is missing" if key in wanted else "is not of that model"
        raise CheckpointError(f"{where}: is not an adapter of {named}: {key.removeprefix('weights/')} {fault}")
    for key, shape in wanted.items():
        if shapes[key] != shape:
            has = f"{key.removeprefix('weights/')} has shape {shapes[key]}, that model's is {shape}"
            raise CheckpointError(f"{where}: is not an adapter of {named}: {has}")


class Joined:
    """A checkpoint of adapters and its base, read as one: weights of both, all else of the adapters' run."""

    foreign = False

    def __init__(self, adapters: StoredWeights, base: StoredWeights) -> None:
        self.adapters, self.base = adapters, base
        self.path, self.step, self.world, self.digest = adapters.path, adapters.step, adapters.world, adapters.digest
        self.meta = adapters.meta
        own = {key: value for key, value in base.tensors.items() if key.startswith("weights/")}
        self.tensors: Tensors = {**own, **adapters.tensors}

    @property
    def attachments(self) -> Mapping[str, Path]:
        return self.adapters.attachments

    def read(self, wanted: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """As of `Checkpoint`."""
        held = list(wanted)
        for source, ours in ((self.adapters, True), (self.base, False)):
            source.read([p for p in held if (p.key in self.adapters.tensors) == ours], cast=cast, verify=verify)


class MergedSource:
    """The weights of a base with its adapters added: W + scale B A, computed in fp32 or wider and rounded once.

    source: of a `Joined`. model: with its adapters.
    """

    def __init__(self, source: OwnSource, model: ModelConfig) -> None:
        tensors = {tensor.name: tensor for tensor in inventory(model)}
        self._source, self._specs = source, adapter_specs(architecture(model).adapters, tensors.values())
        kept = {f"weights/{name}" for name, tensor in tensors.items() if not tensor.trainable}
        self.tensors: Tensors = {key: value for key, value in source.tensors.items() if key in kept}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The rectangle `box` of the merged tensor `name`."""
        held = self._source.read(name, box)
        spec = self._specs.get(name.removeprefix("weights/"))
        if spec is None:
            return held
        (row, column), (rows, columns) = box.start, box.size
        down = self._source.read(f"weights/{spec.down.name}", Box((0, column), (spec.down.shape[0], columns)))
        up = self._source.read(f"weights/{spec.up.name}", Box((row, 0), (rows, spec.up.shape[1])))
        wide = torch.promote_types(held.dtype, torch.float32)
        return torch.addmm(held.to(wide), up.to(wide), down.to(wide), alpha=spec.scale).to(held.dtype)
