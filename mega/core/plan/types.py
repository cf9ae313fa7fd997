"""The types of a pipeline plan: one action of a rank (`Act`), and the actions of all ranks (`Plan`).

A model is cut into `stages * chunks` consecutive pieces, the **global stages** g = 0, 1, 2, ...
They are assigned to the ranks of the pipeline round-robin, so that rank r holds g = chunk * stages + r:

    stages 2, chunks 1        stages 2, chunks 2
    rank 0   g0               rank 0   g0  g2
    rank 1   g1               rank 1   g1  g3

A microbatch passes through g0, g1, g2, ... in its forward pass (the cargo is an activation) and back in
its backward pass (the cargo is the gradient of that activation). With several chunks the last rank sends its
cargo for the next chunk to rank 0. If one rank holds both global stages (a single stage with several
chunks), the cargo stays there, and no `Transfer` exists for it.

This module does not depend on schedules, tensors or process groups. A plan is a value that is made once, is equal on
all ranks, and is executed by `core.parallel.pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Compute:
    """One microbatch through one chunk of this rank.

    kind: "F" runs the forward pass. "B" runs the backward pass: in a plan without "W" acts it computes the
        gradients of the weights and of the input; in a plan with "W" acts it computes only the gradient of the input,
        and a later "W" computes the gradient of the weights.
    microbatch: 0 .. microbatches - 1.
    chunk: index of the chunk on this rank, 0 .. chunks - 1.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of one piece of cargo from one rank to another, as seen by one of the two ranks.

    Between any two ranks the cargoes of one kind are sent and received in the same order, so no tag is needed.
    """

    kind: Literal["F", "B"]
    """F: an activation for the next global stage. B: the gradient of an activation for the previous stage."""
    microbatch: int
    chunk: int
    """The chunk **of the rank that holds this act**: in a send the chunk that produced the cargo, in a receive the
    chunk that will consume it. (The two chunks differ in a transfer between the last rank and rank 0.)"""
    peer: int
    """The other rank, 0 .. stages - 1."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sends and receives that start together; the exchange ends when all of them have ended."""

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()


Act: TypeAlias = Compute | Exchange


@dataclass(frozen=True, slots=True)
class Plan:
    """The acts of every rank of the pipeline, in order: rank r plays `acts[r]` from first to last."""

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
    """A plan that cannot be played correctly. The cause is always the code that made the plan, never the user."""
