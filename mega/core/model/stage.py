"""Options of a pipeline stage, for any model family. A stage receives its model, its units and its tensor-parallel
region (parallel/region.py) separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mega.core.model.objective import Objective
from mega.core.ops.counter import RULE
from mega.core.parallel.experts import NO_RANKS, ExpertAxes
from mega.core.parallel.mesh import SINGLE, Axis

UnshardHook = Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]
"""A hook that is called as hook(unit, run, x) and returns run(x). The weights of `unit` are unsharded in the forward
and the backward pass."""


@dataclass(frozen=True)
class StageOptions:
    """Options of a pipeline stage."""

    dropout_seed: int | None = None
    """The seed of dropout; None disables dropout."""
    dropout_rule: int = RULE
    """The version of the dropout rule (ops/counter.py)."""
    residual: torch.dtype | None = None
    """The dtype of the residual stream; None for the weights' dtype."""
    full_recompute: tuple[str | None, int | None] = (None, None)
    """Recomputation of whole layers: method and number of layers, as in `parallel.recompute.groups`."""
    distribute_saved: bool = False
    """Whether the saved inputs of recomputed layers are distributed over the tensor ranks."""
    objective: Objective | None = None
    """The training objective of a left-to-right model; None for next-token prediction."""
    cp: Axis = SINGLE
    """The ranks that share the same sequences."""
    experts: ExpertAxes = NO_RANKS
    """The ranks that share the experts of an MoE layer."""
    gathers_experts: bool = False
    """Whether tokens are gathered over ranks with different experts, as in `LayerPlace`."""
