"""Handle checkpoints that contain only adapters, together with the base checkpoint on which the adapters were trained.

A checkpoint of adapters records its base in its plain state:

    "base": {"path": the base's step directory, "digest": sha256 of the base's manifest}

If the base is in another program's format, the record contains the path and the `weights_digest` (forms/direct.py) of
the weights. The digest identifies the base even if the base is moved. The base is found by forms/open.py. `Joined`
combines adapters and base into one checkpoint of a whole model. `MergedSource` adds the products of the adapters to the
base's weights, which produces a model without adapters.
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
    """Return the record of a base for a checkpoint of adapters. digest: the digest that identifies the base; by default
    `base.digest`."""
    path = str(base.path)
    return {"path": path if url_of(path) else os.path.abspath(path), "digest": digest or base.digest}


def named_base(checkpoint: StoredWeights) -> Mapping[str, str] | None:
    """Return the record of a checkpoint's base; None if the checkpoint is complete without a base. Errors:
    CheckpointError."""
    record = checkpoint.meta.get("base")
    if record is None:
        return None
    match record:
        case {"path": str(path), "digest": str(digest)}:
            return {"path": path, "digest": digest}
    raise CheckpointError(f"{checkpoint.path}: meta.base must hold a path and a digest")


def check_adapters(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], where: str, named: str) -> None:
    """Check that the tensors stored at `where` are the adapters of `model`. shapes: key -> shape.

    named: the model's name in messages. Errors: CheckpointError.
    """
    try:
        expected_shapes = {f"weights/{tensor.name}": tensor.shape for tensor in inventory(model) if tensor.trainable}
    except ValueError as error:
        raise CheckpointError(f"{where}: is not an adapter of {named}: {error}") from None
    for key in sorted(expected_shapes.keys() ^ shapes.keys()):
        fault = "is missing" if key in expected_shapes else "is not of that model"
        raise CheckpointError(f"{where}: is not an adapter of {named}: {key.removeprefix('weights/')} {fault}")
    for key, shape in expected_shapes.items():
        if shapes[key] != shape:
            mismatch = f"{key.removeprefix('weights/')} has shape {shapes[key]}, that model's is {shape}"
            raise CheckpointError(f"{where}: is not an adapter of {named}: {mismatch}")


class Joined:
    """A checkpoint of adapters combined with its base. Weights are read from both, and everything else from the
    checkpoint of adapters."""

    foreign = False

    def __init__(self, adapters: StoredWeights, base: StoredWeights) -> None:
        self.adapters, self.base = adapters, base
        self.path, self.step, self.world, self.digest = adapters.path, adapters.step, adapters.world, adapters.digest
        self.meta = adapters.meta
        base_weights = {key: value for key, value in base.tensors.items() if key.startswith("weights/")}
        self.tensors: Tensors = {**base_weights, **adapters.tensors}

    @property
    def attachments(self) -> Mapping[str, Path]:
        return self.adapters.attachments

    def read(self, pieces: Iterable[Piece], *, cast: bool = False, verify: bool = True) -> None:
        """Fill the tensors of `pieces`, as `Checkpoint.read` does."""
        requested = list(pieces)
        for source, from_adapters in ((self.adapters, True), (self.base, False)):
            source.read(
                [p for p in requested if (p.key in self.adapters.tensors) == from_adapters], cast=cast, verify=verify
            )


class MergedSource:
    """A source of merged weights: W + scale B A, computed in fp32 or wider and rounded once.

    source: the tensors of a `Joined`. model: the model section, including adapters.
    """

    def __init__(self, source: OwnSource, model: ModelConfig) -> None:
        tensors = {tensor.name: tensor for tensor in inventory(model)}
        self._source, self._specs = source, adapter_specs(architecture(model).adapters, tensors.values())
        base_keys = {f"weights/{name}" for name, tensor in tensors.items() if not tensor.trainable}
        self.tensors: Tensors = {key: value for key, value in source.tensors.items() if key in base_keys}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the rectangle `box` of the merged tensor `name`.

        merged[r, c] = W[r, c] + scale * B[r, :] @ A[:, c]    reads rows r of B [out, rank], columns c of A [rank, in]
        """
        weight = self._source.read(name, box)
        spec = self._specs.get(name.removeprefix("weights/"))
        if spec is None:
            return weight
        (row, column), (rows, columns) = box.start, box.size
        down = self._source.read(f"weights/{spec.down.name}", Box((0, column), (spec.down.shape[0], columns)))
        up = self._source.read(f"weights/{spec.up.name}", Box((row, 0), (rows, spec.up.shape[1])))
        compute_dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.addmm(weight.to(compute_dtype), up.to(compute_dtype), down.to(compute_dtype), alpha=spec.scale).to(
            weight.dtype
        )
