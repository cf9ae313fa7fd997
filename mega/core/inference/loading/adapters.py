"""Load low-rank adapters (LoRA) of a served model. Each token uses one of the adapters, or only the base model.

    1 open_adapters     names and paths -> checked adapters of the model, without their weights
    2 load_adapters     load this rank's shard of all adapters next to the linears of its stage
    3 AdapterChoice     the adapter of each token in the next step

The matrices A of all adapters are stacked into one matrix, and the matrices B into another. A step thus costs two
additional matrix products per linear, for any number of adapters. Between the two products, all columns except those of
the token's adapter are set to zero, so that requests do not affect each other:

    h = x A^T     [tokens, rank of adapter 1 | rank of adapter 2 | ...]     zero except in the token's columns
    y += h B^T

This module depends on neither requests nor prompts. Source: Hu et al. 2021, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mega.core.architecture import architecture, inventory
from mega.core.architecture.adapters import AdapterSpec, adapter_specs, with_adapters
from mega.core.checkpoint.forms import peft
from mega.core.checkpoint.forms.companions import companions_of
from mega.core.checkpoint.forms.direct import ForeignWeights
from mega.core.checkpoint.forms.form import OWN
from mega.core.checkpoint.forms.open import comparable_digest, digest_difference
from mega.core.checkpoint.forms.recognise import form_at
from mega.core.checkpoint.own.base import check_adapters, named_base
from mega.core.checkpoint.own.model import model_of
from mega.core.checkpoint.own.pieces import CheckpointError, Piece
from mega.core.checkpoint.own.source import Readable, StoredWeights
from mega.core.checkpoint.own.store import locate
from mega.core.config.sections import ModelConfig
from mega.core.device import sent
from mega.core.inference.loading.load import OpenedModel
from mega.core.ops.dropout import Dropout
from mega.core.ops.paged_attention import Integers
from mega.core.parallel.adapter import AdaptedGemms, LowRank
from mega.core.parallel.linear import ColumnLinear, RowLinear
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import Segment
from mega.core.shard import on_tensor_rank, shard

MOST_NAME = 64
"""Maximum number of characters in an adapter's name."""


@dataclass(frozen=True)
class OpenedAdapter:
    """A checked adapter of a model."""

    name: str
    flag: str
    """The option by which the adapter was specified, for use in messages."""
    rank: int
    scale: float
    specs: Mapping[str, AdapterSpec]
    """Name of a linear's weight -> the two adapter matrices for this weight."""
    weights: Readable
    """Source from which the stored matrices are read."""
    source: StoredWeights | OpenedModel
    """The mega run, or the folder with the tokenizer and the chat template that came with the adapter."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""


def adapter_paths(given: Sequence[str]) -> dict[str, Path]:
    """Parse repeated NAME=DIR options into a map name -> path. Errors: ValueError naming the flag.

    >>> adapter_paths(["poet=runs/poet"])
    {'poet': PosixPath('runs/poet')}
    """
    paths: dict[str, Path] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not (name and equals and path) or len(name) > MOST_NAME or not name.isprintable():
            raise ValueError(f"--adapter {each}: must be NAME=DIR, with a name of at most {MOST_NAME} characters")
        if name in paths:
            raise ValueError(f"--adapter {each}: {name} is {paths[name]} already; give each adapter a name of its own")
        paths[name] = Path(path)
    return paths


def open_adapters(paths: Mapping[str, Path], opened: OpenedModel) -> tuple[OpenedAdapter, ...]:
    """Open the named adapters of a model. Each adapter is a mega run with --lora-rank, or a directory written by peft.

    Errors: CheckpointError naming the flag, and the tensor or setting that does not fit the model.
    """
    return tuple(_open(name, path, opened) for name, path in paths.items())


def _open(name: str, path: Path, opened: OpenedModel) -> OpenedAdapter:
    flag, model_path = f"--adapter {name}={path}", str(opened.path)
    if opened.architecture.adapters is not None:
        raise CheckpointError(f"{flag}: {model_path} holds adapters itself; serve the model that they were trained on")
    try:
        form = form_at(path)
        if form is not OWN and form.name != "peft":
            raise CheckpointError(f"{path}: is a whole model; valid: a run with --lora-rank, or peft's directory")
        source, model = _own(path, opened) if form is OWN else _peft(path, opened, companions_of(form, path))
    except CheckpointError as error:
        raise CheckpointError(f"{flag}: {error}") from None
    adapters = architecture(model).adapters
    assert adapters is not None
    specs = adapter_specs(adapters, inventory(model))
    if expert := next((spec.down.name for spec in specs.values() if spec.down.member is not None), None):
        rule = "is of an expert; serve the run itself (--load), or an export of the merged weights (--to hf)"
        raise CheckpointError(f"{flag}: {expert}: {rule}")
    weights, notes = (source.weights, source.notes) if isinstance(source, OpenedModel) else (source, ())
    return OpenedAdapter(name, flag, adapters.rank, adapters.scale, specs, weights, source, notes)


def _own(path: Path, opened: OpenedModel) -> tuple[StoredWeights, ModelConfig]:
    checkpoint = locate(path)
    adapter_config = model_of(checkpoint.meta, str(checkpoint.path))
    base = named_base(checkpoint)
    if base is None or architecture(adapter_config).adapters is None:
        raise CheckpointError(f"{path}: is a whole model; valid: a run with --lora-rank, or peft's directory")
    # The manifest of a mega run identifies the base model of its adapters. For adapters in other formats, only the
    # shapes can be checked.
    base_digest = comparable_digest(base["digest"], opened.weights)
    if base_digest not in ("", base["digest"]):
        difference = digest_difference(base["digest"], base_digest)
        raise CheckpointError(
            f"{path}: holds adapters of {base['path']}, {opened.path} is another model ({difference})"
        )
    model = with_adapters(opened.model, adapter_config)
    shapes = {key: shape for key, (shape, _) in checkpoint.tensors.items() if key.startswith("weights/")}
    check_adapters(model, shapes, str(checkpoint.path), str(opened.path))
    return checkpoint, model


def _peft(path: Path, opened: OpenedModel, files: Mapping[str, Path]) -> tuple[OpenedModel, ModelConfig]:
    weights = peft.open_adapter(path, opened.model, opened.path, str(opened.path))
    return OpenedModel(ForeignWeights(path, weights), weights.model, files, {}, "", weights.notes), weights.model


class AdapterChoice:
    """The adapter of each token in a step, for all linears of a stage.

    kept: bool [tokens, columns], whether a column of A x belongs to the token's adapter. scales: fp32 [tokens,
    columns], the scaling factor of each column. Both are None in a step whose tokens use no adapter. always: whether to
    set both fields in every step, so that the computation for a token does not depend on other tokens.
    """

    def __init__(self, adapters: Sequence[OpenedAdapter], device: torch.device, *, always: bool) -> None:
        self.names = tuple(each.name for each in adapters)
        self.columns = list(_columns(adapters))
        width = self.columns[-1].stop
        table = torch.zeros(len(adapters) + 1, width)
        for number, (each, columns) in enumerate(zip(adapters, self.columns, strict=True), start=1):
            table[number, columns] = each.scale
        mask = torch.zeros(table.shape, dtype=torch.bool)
        for number, columns in enumerate(self.columns, start=1):
            mask[number, columns] = True
        self._kept, self._scales, self._always = mask.to(device), table.to(device), always
        self.kept: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None

    def begin(self, adapters: Integers) -> None:
        """Set each token's adapter. adapters: int64 [tokens], 1 + the adapter's index in `names`; 0 for no adapter."""
        self.kept = self.scales = None
        if self._always or adapters.any():
            numbers = sent(np.ascontiguousarray(adapters), self._kept.device)
            self.kept, self.scales = self._kept[numbers], self._scales[numbers]


def _columns(adapters: Sequence[OpenedAdapter]) -> Iterator[slice]:
    start = 0
    for each in adapters:
        yield slice(start, start + each.rank)
        start += each.rank


class StackedAdapters(LowRank):
    """All adapters of the linears that are computed in one GEMM; each of these linears is a part of the GEMM. Replaces
    `parallel.adapter.Adapter`, without a backward pass.

    down: the matrices A of all parts, [parts x columns, in]. up: the matrices B of each part, [out, columns]. parts:
    the slice of the output y that belongs to each part.
    """

    def __init__(
        self, choice: AdapterChoice, down: torch.Tensor, up: Sequence[torch.Tensor], parts: Sequence[slice]
    ) -> None:
        super().__init__()
        self._choice, self._down, self._up, self._parts = choice, down, list(up), list(parts)

    def add(self, x: torch.Tensor, y: torch.Tensor, drop: Dropout | None = None) -> None:
        """Multiply each row of x [n, in] by its token's adapter, and add the product to y [n, out]."""
        mask, scales = self._choice.kept, self._choice.scales
        if mask is None or scales is None:
            return
        h = (x @ self._down.t()).view(len(x), len(self._parts), -1)
        # Columns of other adapters may be infinite, so they are replaced with 0 instead of multiplied by 0.
        h = torch.where(mask[:, None], h * scales[:, None], 0.0).to(x.dtype)
        for number, columns in enumerate(self._parts):
            y[:, columns].addmm_(h[:, number], self._up[number].t())


def load_adapters(
    stage: Any, adapters: Sequence[OpenedAdapter], mesh: Mesh, device: torch.device, *, always: bool
) -> AdapterChoice | None:
    """Load this rank's shard of all adapters next to the linears of its stage. Return None if `adapters` is empty.

    always: as in `AdapterChoice`. Errors: CheckpointError naming file and tensor.
    """
    if not adapters:
        return None
    choice = AdapterChoice(adapters, device, always=always)
    pieces_of: list[list[Piece]] = [[] for _ in adapters]
    for module in stage.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            _attach(module, choice, adapters, mesh, pieces_of)
    for each, pieces in zip(adapters, pieces_of, strict=True):
        each.weights.read(pieces, cast=True)
        for piece in pieces:
            if not torch.isfinite(piece.tensor).all():
                name = piece.key.removeprefix("weights/")
                raise CheckpointError(f"--adapter {each.name}={each.weights.path}: {name} holds what is not finite")
    return choice


def _attach(
    linear: ColumnLinear | RowLinear,
    choice: AdapterChoice,
    adapters: Sequence[OpenedAdapter],
    mesh: Mesh,
    wanted: Sequence[list[Piece]],
) -> None:
    """Allocate memory for all adapters of a linear, and append to `wanted` the pieces that must be read into this
    memory."""
    weight, width = linear.weight, choice.columns[-1].stop
    segments: list[Segment] = [
        each for each in weight.segments if any(each.shard.name in adapter.specs for adapter in adapters)
    ]
    if not segments:
        return
    # width: total rank of all adapters. columns (a): the slice of the width that belongs to adapter a.
    #     down     [parts x width, in]     rows p * width + columns (a)
    #     ups[p]   [out of p, width]       columns (a)
    down = weight.new_zeros(len(segments) * width, weight.shape[1])
    ups = [weight.new_zeros(each.shard.local[0], width) for each in segments]
    for part, segment in enumerate(segments):
        for number, adapter in enumerate(adapters):
            spec, columns = adapter.specs.get(segment.shard.name), choice.columns[number]
            if spec is None:
                continue
            rows = slice(part * width + columns.start, part * width + columns.stop)
            for tensor, memory in ((spec.down, down[rows]), (spec.up, ups[part][:, columns])):
                local = shard(tensor, on_tensor_rank(mesh.tp.index, mesh.tp.size))
                part_memory = Segment(local, 0).real(memory)
                wanted[number].append(Piece(f"weights/{tensor.name}", local.whole, local.start, part_memory))
    parts = [slice(each.offset, each.offset + each.shard.local[0]) for each in segments]
    linear.gemms = AdaptedGemms(linear.gemms, StackedAdapters(choice, down, ups, parts))
