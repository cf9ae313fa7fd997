"""What a stage of any family is built with, in addition to its model, its units and its region."""

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
"""hook(unit, run, x) -> run(x), with the whole weights of `unit` on this rank meanwhile, forward and backward."""


@dataclass(frozen=True)
class StageOptions:
    """dropout_seed: None switches dropout off. dropout_rule: how it is decided, of ops/counter.py.

    residual: dtype of the residual stream, where it is not the weights'.

    full_recompute: method and number of layers, as of `groups` in parallel/recompute.py, where whole blocks are
    recomputed in the backward pass. distribute_saved: what they keep for that is shared out over the tensor ranks.

    cp: the ranks that share sequences. experts: those that share a mixture's experts. gathers_experts: as of
    `LayerPlace`.

    objective: what a left-to-right model is trained towards; None is the next token.
    """

    dropout_seed: int | None = None
    dropout_rule: int = RULE
    residual: torch.dtype | None = None
    full_recompute: tuple[str | None, int | None] = (None, None)
    distribute_saved: bool = False
    objective: Objective | None = None
    cp: Axis = SINGLE
    experts: ExpertAxes = NO_RANKS
    gathers_experts: bool = False
