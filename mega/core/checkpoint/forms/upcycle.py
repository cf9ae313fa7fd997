"""A dense checkpoint as the beginning of a mixture of experts (Komatsuzaki et al. 2022; He et al. 2024, 2410.07524).

With granularity g an expert has 1 / g of the dense network's width: expert j holds piece j mod g of it, and the pieces
repeat. Rows of the router are equal for the g experts that make up one copy. Where a token chooses the g experts of one
copy, each with probability 1 / g, their sum is the dense network's output but for the scale, by which the matrices are
multiplied; with g = 1 the mixture computes what the dense model does, whichever experts are chosen. Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mega.core.architecture import Tensor, architecture, inventory
from mega.core.checkpoint.forms.form import Opened, Own
from mega.core.checkpoint.forms.mapping import Fragment, Source, Span, Table, Target, whole
from mega.core.checkpoint.own.pieces import Box, CheckpointError, Tensors
from mega.core.config.resolve import divisors
from mega.core.config.sections import ModelConfig

SCALED = "scaled/"
"""In front of the name of a dense matrix that is multiplied."""


@dataclass(frozen=True)
class Upcycling:
    """experts: of each layer. chosen: that each token passes. granularity: experts that make up one dense network."""

    experts: int
    chosen: int
    granularity: int = 1
    seed: int = 1234
    """Of the router's first values."""


def upcycled(own: Own, how: Upcycling) -> Opened:
    """The mixture that a dense checkpoint begins; its table takes each of the source's tensors.

    Errors: ValueError naming the flag whose number does not fit.
    """
    model = own.model
    _check(model, how)
    mixture = replace(model, experts=how.experts, experts_chosen=how.chosen, expert_ffn=model.ffn // how.granularity)
    source = UpcycledSource(own.source, model, how)
    targets = tuple(_target(tensor, how.granularity, source.tensors) for tensor in inventory(mixture))
    return Opened(source, mixture, Table(targets), known={"upcycled": {"granularity": how.granularity}})


def _check(model: ModelConfig, how: Upcycling) -> None:
    described = architecture(model)
    if described.mixtures:
        raise ValueError(f"--upcycle {how.experts}: the model has experts already; must be dense")
    if described.output.ahead:
        rule = "must not predict tokens after the next one, by layers that would be mixtures too"
        raise ValueError(f"--upcycle {how.experts}: mtp_layers {model.mtp_layers}: {rule}")
    if described.adapters is not None or len(described.stacks) > 1 or not described.block.attention.causal:
        raise ValueError(f"--upcycle {how.experts}: must be a whole GPT or Llama")
    if how.experts < 2:
        raise ValueError(f"--upcycle {how.experts}: must be at least 2")
    for of, number in ((f"the model's ffn {model.ffn}", model.ffn), (f"--upcycle {how.experts}", how.experts)):
        if how.granularity < 1 or number % how.granularity:
            valid = ", ".join(map(str, divisors(number)[:12]))
            raise ValueError(f"--upcycle-granularity {how.granularity}: must divide {of}; valid: {valid}")
    if not 2 <= how.chosen <= how.experts:
        raise ValueError(f"--upcycle-chosen {how.chosen}: must be from 2 to --upcycle {how.experts}")
    if how.chosen % how.granularity:
        raise ValueError(
            f"--upcycle-chosen {how.chosen}: must be a multiple of --upcycle-granularity {how.granularity}: all "
            "pieces of a copy are chosen together"
        )


def _target(tensor: Tensor, granularity: int, held: Tensors) -> Target:
    """One tensor of the mixture, made of the dense model's; a piece of it, where it is an expert's."""
    name = f"weights/{tensor.name}"
    if tensor.member is None:
        return Target(name, tensor.shape, (whole(tensor.shape, name),))
    number = tensor.member.index
    dense = SCALED + tensor.name.replace(f".experts.{number}.", ".")
    at, piece = Span(*map(range, tensor.shape)), number % granularity
    taken = [
        range(piece * size, (piece + 1) * size) if size < of else range(size)
        for size, of in zip(tensor.shape, held[dense][0], strict=True)
    ]
    return Target(name, tensor.shape, (Fragment(dense, at, Span(*taken)),))


class UpcycledSource:
    """The dense model's tensors, those of its feed-forward networks multiplied, and first values of the routers."""

    def __init__(self, dense: Source, model: ModelConfig, how: Upcycling) -> None:
        self._dense, self._model, self._how = dense, model, how
        self._factor = float(how.granularity) ** _exponent(model)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in dense.tensors.items():
            if not name.startswith("weights/"):
                continue  # an optimizer's state is of the dense model
            if ".mlp." in name:
                found[name.replace("weights/", SCALED, 1)] = (shape, dtype)
            else:
                found[name] = (shape, dtype)
        dtype = next(iter(found.values()))[1]
        for layer in range(model.layers):
            found[f"weights/model.layers.{layer}.mlp.gate.weight"] = ((how.experts, model.hidden), dtype)
        self.tensors: Tensors = found

    def read(self, name: str, box: Box) -> torch.Tensor:
        if name.startswith(SCALED):
            part = self._dense.read(name.replace(SCALED, "weights/", 1), box)
            plain = self._factor == 1 or name.endswith("down_proj.bias")
            return (
                part
                if plain
                else (part.to(torch.promote_types(part.dtype, torch.float32)) * self._factor).to(part.dtype)
            )
        if name.endswith(".mlp.gate.weight"):
            return self._router(name)[box.index].to(self.tensors[name][1])
        return self._dense.read(name, box)

    def _router(self, name: str) -> torch.Tensor:
        how, layer = self._how, int(name.split(".")[2])
        draw = torch.Generator().manual_seed(how.seed + layer)
        rows = torch.randn(how.experts // how.granularity, self._model.hidden, generator=draw)
        return (rows * self._model.init_std).repeat_interleave(how.granularity, 0)


def _exponent(model: ModelConfig) -> float:
    """By which a factor of the output becomes one of each matrix: three of them where there is a gate or a square."""
    network = architecture(model).block.feed_forward
    return 1 / 3 if network.gated or network.activation == "relu2" else 1 / 2


def check_one_dtype(own: Own, load: object) -> None:
    """Errors: CheckpointError where the weights are not of one dtype."""
    dtypes = {dtype for name, (_, dtype) in own.source.tensors.items() if name.startswith("weights/")}
    if len(dtypes) > 1:
        raise CheckpointError(f"{load}: holds weights of several dtypes; a mixture is made of one")
