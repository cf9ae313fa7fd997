"""A family whose layers have losses of their own: every kind of total that a mixer may compute.

    activation   mean square of the wide activations, [tokens, columns of this tensor rank]; mean over tokens
    z_loss       squared logsumexp of a router's logits, of this rank's tokens; mean over tokens
    balance      how often the router prefers its first expert, of the same; mean over sequences
    share        the same, mean over microbatches: it depends on the micro batch, so a family of its own has it

Odd layers have them, even ones do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from mega.core import architecture, family
from mega.core.architecture import Architecture, Init, Tensor
from mega.core.architecture.families.decoder import decoder
from mega.core.architecture.layer import AuxiliaryLoss, Dense, Layer
from mega.core.config.presets import FAMILY_DEFAULTS
from mega.core.config.sections import ModelConfig
from mega.core.model.forward import ForwardContext
from mega.core.model.layer import MODULES
from mega.core.model.mixers import FeedForward, LayerPlace
from mega.core.model.residual import Tensors
from mega.core.parallel.weight import ParameterFactory

NAME, BY_MICROBATCH = "toy-losses", "toy-losses-by-microbatch"
ROUTES = 4
ACTIVATION = AuxiliaryLoss(name="activation", coefficient=0.3, mean_over="tokens")
Z_LOSS = AuxiliaryLoss(name="z_loss", coefficient=0.2, mean_over="tokens")
BALANCE = AuxiliaryLoss(name="balance", coefficient=0.7, mean_over="sequences")
SHARE = AuxiliaryLoss(name="share", coefficient=0.05, mean_over="microbatches")


@dataclass(frozen=True, kw_only=True)
class RegularisedDense(Dense):
    """A feed-forward network whose activations, and the logits of a router that routes nothing, have losses."""

    losses: tuple[AuxiliaryLoss, ...]

    @property
    def auxiliary_losses(self) -> tuple[AuxiliaryLoss, ...]:
        return self.losses


class RegularisedFeedForward(FeedForward):
    value: RegularisedDense

    def __init__(self, factory: ParameterFactory, value: RegularisedDense, tensors: Tensors, place: LayerPlace):
        super().__init__(factory, value, tensors, place)
        self.router = factory(tensors[f"{value.name}.router.weight"])

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        for loss in self.value.losses[1:]:
            x = self._of_input(loss, x, context)
        active = super().forward(x, context)
        return context.auxiliary_loss(
            self.value.losses[0], active, lambda: wide(active).square().sum() / self.value.width, split=True
        )

    def _of_input(self, loss: AuxiliaryLoss, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        def total() -> torch.Tensor:
            logits = wide(F.linear(x, self.router))
            if loss.name == Z_LOSS.name:
                return logits.logsumexp(1).square().sum()
            return (logits[:, 0] - logits.logsumexp(1)).exp().sum()

        return context.auxiliary_loss(loss, x, total, split=context.sequence)


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def build(options: ModelConfig) -> Architecture:
    plain = decoder(options)
    (stack,) = plain.stacks
    losses = (ACTIVATION, Z_LOSS, SHARE if options.family == BY_MICROBATCH else BALANCE)
    layers = tuple(with_losses(layer, losses if number % 2 else ()) for number, layer in enumerate(stack.layers))
    routers = tuple(_routers(layers, plain.hidden))
    return replace(plain, stacks=(replace(stack, layers=layers),), extra=routers)


def with_losses(layer: Layer, losses: tuple[AuxiliaryLoss, ...]) -> Layer:
    if not losses:
        return layer
    attention, branch = layer.branches
    dense = branch.mixer
    assert isinstance(dense, Dense)
    values = {name: getattr(dense, name) for name in ("name", "site", "width", "activation", "gated", "bias")}
    return replace(layer, branches=(attention, replace(branch, mixer=RegularisedDense(**values, losses=losses))))


def _routers(layers: tuple[Layer, ...], hidden: int) -> Iterator[Tensor]:
    for number, layer in enumerate(layers):
        if layer.auxiliary_losses:
            name = f"model.layers.{number}.mlp.router.weight"
            yield Tensor(name, (ROUTES, hidden), (number,), Init(std=0.5), partial=("sequence",))


def register() -> None:
    """Make the families known to this process."""
    MODULES[RegularisedDense] = RegularisedFeedForward
    for name in (NAME, BY_MICROBATCH):
        family.register(name, family.FAMILIES["gpt"], build, {})


def unregister() -> None:
    MODULES.pop(RegularisedDense, None)
    for known in (family.FAMILIES, architecture.FAMILIES, FAMILY_DEFAULTS):
        for name in (NAME, BY_MICROBATCH):
            known.pop(name, None)
    architecture.architecture.cache_clear()
