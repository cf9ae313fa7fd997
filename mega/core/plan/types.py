"""The types of a pipeline plan: an action of one rank (`Act`), and the actions of all ranks (`Plan`).

A model is split into `stages * chunks` consecutive **global stages** g = 0, 1, 2, ... Global stages are assigned to the
ranks of the pipeline round-robin, so that rank r holds g = chunk * stages + r:

    stages 2, chunks 1        stages 2, chunks 2
    rank 0   g0               rank 0   g0  g2
    rank 1   g1               rank 1   g1  g3

A microbatch passes through g0, g1, g2, ... in the forward pass and in reverse order in the backward pass. Activations
move between stages in the forward pass, and gradients in the backward pass. With several chunks, the last rank sends
activations for the next chunk to rank 0. If one rank holds both global stages (a pipeline of one rank with several
chunks), the activation or gradient stays on this rank, without a `Transfer`.

This module does not depend on schedules, tensors or process groups. A plan is an immutable value that is identical on
all ranks; `core.parallel.pipeline` executes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Compute:
    """A compute step, which runs one microbatch through one chunk of this rank.

    kind: "F" is the forward pass. "B" is the backward pass. In a plan without "W" steps, "B" computes the gradients of
        weights and input. In a plan with "W" steps, "B" computes only the gradient of the input, and "W" computes the
        gradients of the weights later.
    microbatch: 0 .. microbatches - 1.
    chunk: index of the chunk on this rank, 0 .. chunks - 1.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of one activation or gradient between two ranks, described for one of these ranks.

    Between any two ranks, transfers of one kind are sent and received in the same order, so no tag is needed.
    """

    kind: Literal["F", "B"]
    """F: an activation for the next global stage. B: the gradient of an activation for the previous stage."""
    microbatch: int
    chunk: int
    """Index of the chunk **on the rank of this act** that produced (for a send) or consumes (for a receive) the
    activation or gradient. (The two ranks' chunks differ in a transfer between the last rank and rank 0.)"""
    peer: int
    """Index of the other rank, 0 .. stages - 1."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sends and receives that start together. The exchange ends when all transfers have ended."""

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()


Act: TypeAlias = Compute | Exchange


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of one step, which contains the actions of every rank of the pipeline. Rank r executes `acts[r]` in
    order."""

    kind: str
    """The name of the schedule, one of `SCHEDULES` in kinds.py, or "forward", which has no backward pass."""
    stages: int
    """Number of ranks in the pipeline."""
    chunks: int
    """Number of model chunks on each rank."""
    microbatches: int
    """Number of microbatches in one step."""
    acts: tuple[tuple[Act, ...], ...]


class PlanError(AssertionError):
    """Error in a plan. The cause is always a bug in the code that made the plan, never a user error."""
