"""A model with two data axes: a dense layer, and experts that are cut over ranks that see other tokens.

    token i  ->  expert i mod EXPERTS, which rank (i mod EXPERTS) // (EXPERTS / ep) of the expert axis holds

The tensors of the dense layer are copied on every data rank, those of an expert on the ranks of "edp" alone, so their
gradients are summed over these. Tokens reach their expert and return by an all-to-all over the expert axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

from mega.core.architecture import Cut, Init, Tensor
from mega.core.batch import Term
from mega.core.config.run import Options
from mega.core.device import Device
from mega.core.optim.optimizer import Optimizer
from mega.core.optim.rule import Rule
from mega.core.parallel.collectives import all_to_all
from mega.core.parallel.gradients import GradBuffer
from mega.core.parallel.mesh import Axis, Mesh
from mega.core.parallel.pipeline import Pipeline, StageOutput
from mega.core.parallel.weight import ParameterFactory, initialise
from mega.core.training.state import StepOptions, TrainState
from tests.support.ranks import CPU

EXPERTS, HIDDEN = 4, 24
SOME = Init(std=0.3)
DENSE = Tensor("dense.weight", (HIDDEN, HIDDEN), ("dense",), SOME)
SCALE = Tensor("dense.scale", (HIDDEN,), ("dense",), Init(constant=1.0))
EXPERT = Tensor("experts.weight", (EXPERTS * HIDDEN, HIDDEN), (0,), SOME, (Cut(0, "ep", EXPERTS),), data="edp")
BIAS = Tensor("experts.bias", (EXPERTS * HIDDEN,), (0,), SOME, (Cut(0, "ep", EXPERTS),), data="edp")


@dataclass(frozen=True)
class ToyBatch:
    """x, target: [n, h]. loss_weights: [n]. n is a multiple of cp x EXPERTS."""

    x: torch.Tensor
    target: torch.Tensor
    loss_weights: torch.Tensor

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"square": self.loss_weights}

    def split(self, index: int, size: int) -> Self:
        return type(self)(*(one.chunk(size)[index] for one in (self.x, self.target, self.loss_weights)))


def batch(number: int, tokens: int) -> ToyBatch:
    """Microbatch `number`, a function of that alone."""
    draw = torch.Generator().manual_seed(number)
    x, target = (torch.randn(tokens, HIDDEN, generator=draw, dtype=torch.float64) for _ in range(2))
    return ToyBatch(x, target, torch.rand(tokens, generator=draw, dtype=torch.float64))


class Dense(nn.Module):
    def __init__(self, factory: ParameterFactory):
        super().__init__()
        self.weight, self.scale = factory(DENSE), factory(SCALE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight).tanh() * self.scale


class Experts(nn.Module):
    def __init__(self, factory: ParameterFactory, axis: Axis):
        super().__init__()
        self.weight, self.bias, self.axis = factory(EXPERT), factory(BIAS), axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here, tokens = EXPERTS // self.axis.size, len(x) // EXPERTS
        # 1 tokens by expert, to the rank that holds it: [ranks that they come from, experts here, tokens, h]
        sent = x.view(tokens, EXPERTS, HIDDEN).transpose(0, 1).contiguous()
        came = all_to_all(sent, self.axis).view(self.axis.size, here, tokens, HIDDEN)
        # 2 each through its expert
        weight, bias = self.weight.view(here, HIDDEN, HIDDEN), self.bias.view(here, 1, HIDDEN)
        made = came @ weight.transpose(1, 2) + bias
        # 3 back, in the order in which they stood
        back = all_to_all(made.reshape(EXPERTS, tokens, HIDDEN), self.axis)
        return back.transpose(0, 1).reshape(x.shape)


class ToyStage(nn.Module):
    metrics: tuple[str, ...] = ()

    def __init__(self, factory: ParameterFactory, axis: Axis):
        super().__init__()
        self.dense, self.experts = Dense(factory), Experts(factory, axis)
        self.with_full_params: Callable[..., torch.Tensor] | None = None

    @property
    def terms(self) -> Mapping[str, float]:
        return {"square": 1.0}

    def weights(self, batch: Any) -> Mapping[str, torch.Tensor]:
        found: Mapping[str, torch.Tensor] = batch.weights
        return found

    def forward(self, batch: Any, *cargo: torch.Tensor, outputs: bool = False, scales: Any = None) -> StageOutput:
        x = batch.x
        for unit in (self.dense, self.experts):
            x = unit(x) if self.with_full_params is None else self.with_full_params(unit, unit, x)
        losses = (x - batch.target).square().sum(1)
        total = (losses * batch.loss_weights).sum()
        return StageOutput((), {"square": Term(total, batch.loss_weights.sum())})


def toy_state(mesh: Mesh, rule: Rule, *, zero: int = 0, clip: float = 0.0, bucket_size: int = 700) -> TrainState:
    """The toy on one rank, in float64, with its initial values."""
    coordinates = {"tp": (mesh.tp.index, mesh.tp.size), "ep": (mesh.ep.index, mesh.ep.size)}
    stage = ToyStage(ParameterFactory(coordinates, torch.float64, CPU), mesh.ep)
    initialise(stage, seed=5)
    grads = GradBuffer([stage], mesh, dtype=torch.float64, zero=zero, bucket_size=bucket_size)
    if zero >= 3:
        stage.with_full_params = grads.with_full_params
    optimizer, pipeline = Optimizer(grads, rule, clip), Pipeline([stage], mesh, CPU)
    options = StepOptions("1f1b", params_norm=True, zeros=True)
    device = Device.choose("cpu")
    return TrainState(Options(), mesh, device, [stage], grads, optimizer, pipeline, None, options)
