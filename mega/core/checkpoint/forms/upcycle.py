"""Initialize a mixture of experts from a dense checkpoint (Komatsuzaki et al. 2022; He et al. 2024, 2410.07524).

With granularity g, an expert has 1 / g of the width of the dense feed-forward network. Expert j is initialized from
part j mod g of the dense network, so any g consecutive parts form a copy of the dense network. The router's rows are
identical for the g experts of one copy.

    dense network, width w      | part 0 | part 1 |          g = 2
    experts 0, 1, 2, 3, ...       part 0, part 1, part 0, part 1, ...

If a token chooses the g experts of one copy, each with probability 1 / g, the sum of the experts' outputs is the dense
network's output divided by a constant factor. The matrices are scaled to compensate for this factor. With g = 1, the
output of the MoE model equals that of the dense model for any choice of experts. This module does not depend on files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mega.core.architecture import Tensor, architecture, inventory
from mega.core.checkpoint.forms.form import ExportSource, OpenedForm
from mega.core.checkpoint.forms.mapping import Fragment, Source, Span, Table, Target, whole
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors
from mega.core.config.resolve import divisors
from mega.core.config.sections import ModelConfig

SCALED = "scaled/"
"""Prefix of the name of a scaled dense matrix."""


@dataclass(frozen=True)
class Upcycling:
    """The settings for making an MoE model from a dense model."""

    experts: int
    """Number of experts in each MoE layer."""
    chosen: int
    """Number of experts chosen for each token."""
    granularity: int = 1
    """Number of experts into which one dense network is split."""
    seed: int = 1234
    """Seed of the router's initial values."""


def upcycled(own: ExportSource, upcycling: Upcycling) -> OpenedForm:
    """Return the MoE model that is initialized from a dense checkpoint. Its table uses every weight of the dense model.

    Errors: ValueError naming the flag with an invalid number.
    """
    model = own.model
    _check(model, upcycling)
    mixture = replace(
        model, experts=upcycling.experts, experts_chosen=upcycling.chosen, expert_ffn=model.ffn // upcycling.granularity
    )
    source = UpcycledSource(own.source, model, upcycling)
    targets = tuple(_target(tensor, upcycling.granularity, source.tensors) for tensor in inventory(mixture))
    return OpenedForm(source, mixture, Table(targets), known={"upcycled": {"granularity": upcycling.granularity}})


def _check(model: ModelConfig, upcycling: Upcycling) -> None:
    structure = architecture(model)
    if structure.mixtures:
        raise ValueError(f"--upcycle {upcycling.experts}: the model has experts already; must be dense")
    if structure.output.ahead:
        rule = "must not predict tokens after the next one, by layers that would be mixtures too"
        raise ValueError(f"--upcycle {upcycling.experts}: mtp_layers {model.mtp_layers}: {rule}")
    if structure.adapters is not None or len(structure.stacks) > 1 or not structure.block.attention.causal:
        raise ValueError(f"--upcycle {upcycling.experts}: must be a whole GPT or Llama")
    if upcycling.experts < 2:
        raise ValueError(f"--upcycle {upcycling.experts}: must be at least 2")
    for subject, number in (
        (f"the model's ffn {model.ffn}", model.ffn),
        (f"--upcycle {upcycling.experts}", upcycling.experts),
    ):
        if upcycling.granularity < 1 or number % upcycling.granularity:
            valid = ", ".join(map(str, divisors(number)[:12]))
            raise ValueError(f"--upcycle-granularity {upcycling.granularity}: must divide {subject}; valid: {valid}")
    if not 2 <= upcycling.chosen <= upcycling.experts:
        raise ValueError(f"--upcycle-chosen {upcycling.chosen}: must be from 2 to --upcycle {upcycling.experts}")
    if upcycling.chosen % upcycling.granularity:
        raise ValueError(
            f"--upcycle-chosen {upcycling.chosen}: must be a multiple of --upcycle-granularity "
            f"{upcycling.granularity}: all pieces of a copy are chosen together"
        )


def _target(tensor: Tensor, granularity: int, sources: Tensors) -> Target:
    """Return the target for one tensor of the MoE model. The target is a copy of the dense model's tensor or, for an
    expert, of a part of that tensor."""
    name = f"weights/{tensor.name}"
    if tensor.member is None:
        return Target(name, tensor.shape, (whole(tensor.shape, name),))
    number = tensor.member.index
    dense = SCALED + tensor.name.replace(f".experts.{number}.", ".")
    span, piece = Span(*map(range, tensor.shape)), number % granularity
    source_ranges = [
        range(piece * size, (piece + 1) * size) if size < dense_size else range(size)
        for size, dense_size in zip(tensor.shape, sources[dense][0], strict=True)
    ]
    return Target(name, tensor.shape, (Fragment(dense, span, Span(*source_ranges)),))


class UpcycledSource:
    """A source of the dense model's tensors, in which feed-forward matrices are scaled, and of initial values for the
    routers."""

    def __init__(self, dense: Source, model: ModelConfig, upcycling: Upcycling) -> None:
        self._dense, self._model, self._upcycling = dense, model, upcycling
        self._factor = float(upcycling.granularity) ** _exponent(model)
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in dense.tensors.items():
            if not name.startswith("weights/"):
                continue  # optimizer state applies only to the dense model
            if ".mlp." in name:
                tensors[name.replace("weights/", SCALED, 1)] = (shape, dtype)
            else:
                tensors[name] = (shape, dtype)
        dtype = next(iter(tensors.values()))[1]
        for layer in range(model.layers):
            tensors[f"weights/model.layers.{layer}.mlp.gate.weight"] = ((upcycling.experts, model.hidden), dtype)
        self.tensors: Tensors = tensors

    def read(self, name: str, box: Box) -> torch.Tensor:
        if name.startswith(SCALED):
            part = self._dense.read(name.replace(SCALED, "weights/", 1), box)
            unscaled = self._factor == 1 or name.endswith("down_proj.bias")
            return (
                part
                if unscaled
                else (part.to(torch.promote_types(part.dtype, torch.float32)) * self._factor).to(part.dtype)
            )
        if name.endswith(".mlp.gate.weight"):
            return self._router(name)[box.index].to(self.tensors[name][1])
        return self._dense.read(name, box)

    def _router(self, name: str) -> torch.Tensor:
        upcycling, layer = self._upcycling, int(name.split(".")[2])
        generator = torch.Generator().manual_seed(upcycling.seed + layer)
        rows = torch.randn(upcycling.experts // upcycling.granularity, self._model.hidden, generator=generator)
        return (rows * self._model.init_std).repeat_interleave(upcycling.granularity, 0)


def _exponent(model: ModelConfig) -> float:
    """Return the exponent that converts a factor for the output of a feed-forward network to a factor for each matrix:
    1/3 for a network with a gate or a squared activation, otherwise 1/2."""
    network = architecture(model).block.feed_forward
    return 1 / 3 if network.gated or network.activation == "relu2" else 1 / 2


def check_one_dtype(own: ExportSource, load: object) -> None:
    """Check that all weights have one dtype. Errors: CheckpointError if they do not."""
    dtypes = {dtype for name, (_, dtype) in own.source.tensors.items() if name.startswith("weights/")}
    if len(dtypes) > 1:
        raise CheckpointError(f"{load}: holds weights of several dtypes; a mixture is made of one")
