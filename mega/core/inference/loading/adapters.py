"""Low-rank adapters of one model that is served: many are loaded, and each token goes by one of them, or by none.

    1 open_adapters     names and places -> adapters of the model, checked; nothing is loaded
    2 load_adapters     this rank's part of all of them, next to the linears of its stage
    3 AdapterChoice     which one each token of the next step goes by

The matrices A of all adapters are one, and so are their B, so that a step costs two more products of a linear whatever
requests it holds. Between the two only the columns of a token's own adapter are kept: nothing of one request reaches
another's. It knows neither requests nor prompts. Source: Hu et al. 2021, section 4.
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
"""Characters of an adapter's name."""


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter of a model. flag: as it was asked for, for messages. specs: name of a linear's weight -> what is added
    to it. weights: what fills them. source: the run, or the folder with the tokenizer and chat template that came with
    it. notes: lines for the user."""

    name: str
    flag: str
    rank: int
    scale: float
    specs: Mapping[str, AdapterSpec]
    weights: Readable
    source: StoredWeights | OpenedModel
    notes: tuple[str, ...] = ()


def adapter_paths(given: Sequence[str]) -> dict[str, Path]:
    """NAME=DIR, several times -> where each adapter lies. Errors: ValueError naming the flag.

    >>> adapter_paths(["poet=runs/poet"])
    {'poet': PosixPath('runs/poet')}
    """
    found: dict[str, Path] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not (name and equals and path) or len(name) > MOST_NAME or not name.isprintable():
            raise ValueError(f"--adapter {each}: must be NAME=DIR, with a name of at most {MOST_NAME} characters")
        if name in found:
            raise ValueError(f"--adapter {each}: {name} is {found[name]} already; give each adapter a name of its own")
        found[name] = Path(path)
    return found


def open_adapters(paths: Mapping[str, Path], opened: OpenedModel) -> tuple[OpenedAdapter, ...]:
    """Adapters of a model by name: runs of ours with --lora-rank, or directories of peft.

    Errors: CheckpointError naming the flag, and what is not of the model.
    """
    return tuple(_open(name, path, opened) for name, path in paths.items())


def _open(name: str, path: Path, opened: OpenedModel) -> OpenedAdapter:
    flag, named = f"--adapter {name}={path}", str(opened.path)
    if opened.architecture.adapters is not None:
        raise CheckpointError(f"{flag}: {named} holds adapters itself; serve the model that they were trained on")
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
    of = model_of(checkpoint.meta, str(checkpoint.path))
    base = named_base(checkpoint)
    if base is None or architecture(of).adapters is None:
        raise CheckpointError(f"{path}: is a whole model; valid: a run with --lora-rank, or peft's directory")
    # Adapters of a checkpoint of ours go by its manifest, which others' files have not: there the shapes have to do.
    here = comparable_digest(base["digest"], opened.weights)
    if here not in ("", base["digest"]):
        how = digest_difference(base["digest"], here)
        raise CheckpointError(f"{path}: holds adapters of {base['path']}, {opened.path} is another model ({how})")
    model = with_adapters(opened.model, of)
    shapes = {key: shape for key, (shape, _) in checkpoint.tensors.items() if key.startswith("weights/")}
    check_adapters(model, shapes, str(checkpoint.path), str(opened.path))
    return checkpoint, model


def _peft(path: Path, opened: OpenedModel, files: Mapping[str, Path]) -> tuple[OpenedModel, ModelConfig]:
    found = peft.open_adapter(path, opened.model, opened.path, str(opened.path))
    return OpenedModel(ForeignWeights(path, found), found.model, files, {}, "", found.notes), found.model


class AdapterChoice:
    """Which of some adapters each token of a step goes by, for all linears of a stage.

    kept: bool [tokens, columns], which columns of A x count for a token, and scales: fp32, what they are multiplied by;
    both None where no token of the step goes by an adapter. always: never None, so that a token is computed alike
    whatever is next to it.
    """

    def __init__(self, adapters: Sequence[OpenedAdapter], device: torch.device, *, always: bool) -> None:
        self.names = tuple(each.name for each in adapters)
        self.columns = list(_columns(adapters))
        width = self.columns[-1].stop
        table = torch.zeros(len(adapters) + 1, width)
        for number, (each, columns) in enumerate(zip(adapters, self.columns, strict=True), start=1):
            table[number, columns] = each.scale
        kept = torch.zeros(table.shape, dtype=torch.bool)
        for number, columns in enumerate(self.columns, start=1):
            kept[number, columns] = True
        self._kept, self._scales, self._always = kept.to(device), table.to(device), always
        self.kept: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None

    def begin(self, adapters: Integers) -> None:
        """int64 [tokens]: number of each token's adapter, from 1 on in the order of `names`; 0 is none."""
        self.kept = self.scales = None
        if self._always or adapters.any():
            which = sent(np.ascontiguousarray(adapters), self._kept.device)
            self.kept, self.scales = self._kept[which], self._scales[which]


def _columns(adapters: Sequence[OpenedAdapter]) -> Iterator[slice]:
    start = 0
    for each in adapters:
        yield slice(start, start + each.rank)
        start += each.rank


class StackedAdapters(LowRank):
    """All adapters of linears that are one GEMM, in place of `parallel.adapter.Adapter`, without a backward pass.

    down: every A of every part, [parts x columns, in]. up: of each part every B, [out, columns]. parts: each one's
    columns of y.
    """

    def __init__(
        self, choice: AdapterChoice, down: torch.Tensor, up: Sequence[torch.Tensor], parts: Sequence[slice]
    ) -> None:
        super().__init__()
        self._choice, self._down, self._up, self._parts = choice, down, list(up), list(parts)

    def add(self, x: torch.Tensor, y: torch.Tensor, drop: Dropout | None = None) -> None:
        """Add to y [n, out] what each row of x [n, in] makes in its own adapter."""
        kept, scales = self._choice.kept, self._choice.scales
        if kept is None or scales is None:
            return
        h = (x @ self._down.t()).view(len(x), len(self._parts), -1)
        # What is not kept may be infinite: it is replaced, not multiplied by zero.
        h = torch.where(kept[:, None], h * scales[:, None], 0.0).to(x.dtype)
        for number, columns in enumerate(self._parts):
            y[:, columns].addmm_(h[:, number], self._up[number].t())


def load_adapters(
    stage: Any, adapters: Sequence[OpenedAdapter], mesh: Mesh, device: torch.device, *, always: bool
) -> AdapterChoice | None:
    """Put this rank's part of all adapters next to the linears of its stage; None where there are none.

    always: as of `AdapterChoice`. Errors: CheckpointError naming file and tensor.
    """
    if not adapters:
        return None
    choice = AdapterChoice(adapters, device, always=always)
    wanted: list[list[Piece]] = [[] for _ in adapters]
    for module in stage.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            _attach(module, choice, adapters, mesh, wanted)
    for each, pieces in zip(adapters, wanted, strict=True):
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
    """Memory for all adapters of a linear, and, of each adapter, the pieces to be read into it."""
    weight, width = linear.weight, choice.columns[-1].stop
    segments: list[Segment] = [
        each for each in weight.segments if any(each.shard.name in adapter.specs for adapter in adapters)
    ]
    if not segments:
        return
    down = weight.new_zeros(len(segments) * width, weight.shape[1])
    ups = [weight.new_zeros(each.shard.local[0], width) for each in segments]
    for part, segment in enumerate(segments):
        for number, adapter in enumerate(adapters):
            spec, columns = adapter.specs.get(segment.shard.name), choice.columns[number]
            if spec is None:
                continue
            rows = slice(part * width + columns.start, part * width + columns.stop)
            for tensor, memory in ((spec.down, down[rows]), (spec.up, ups[part][:, columns])):
                held = shard(tensor, on_tensor_rank(mesh.tp.index, mesh.tp.size))
                real = Segment(held, 0).real(memory)
                wanted[number].append(Piece(f"weights/{tensor.name}", held.whole, held.start, real))
    parts = [slice(each.offset, each.offset + each.shard.local[0]) for each in segments]
    linear.gemms = AdaptedGemms(linear.gemms, StackedAdapters(choice, down, ups, parts))
