"""The nouns of a pipeline plan: what one rank does (`Act`), and what every rank does (`Plan`).

A model is cut into `stages * chunks` consecutive pieces, the **global stages** g = 0, 1, 2, ...
They are assigned to the ranks of the pipeline round-robin, so that rank r holds g = chunk * stages + r:

    stages 2, chunks 1        stages 2, chunks 2
    rank 0   g0               rank 0   g0  g2
    rank 1   g1               rank 1   g1  g3

A microbatch travels g0, g1, g2, ... in its forward pass (the cargo is an activation) and back again in
its backward pass (the cargo is that activation's gradient). With several chunks the last rank hands its
cargo for the next chunk to rank 0. Where both global stages lie on one rank (a single stage with several
chunks) the cargo stays where it is, and no `Transfer` exists for it.

This file knows no schedule, no tensor and no process group: a plan is a value, made once, the same on
every rank, and played by `core.parallel.pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Compute:
    """One microbatch through one chunk of this rank.

    kind: "F" runs the chunk forward. "B" runs it backward: in a plan without "W" acts that gives the
        gradient of the weights and of the input; in a plan with them, of the input alone, and a later
        "W" gives the gradient of the weights.
    microbatch: 0 .. microbatches - 1.
    chunk: which of this rank's chunks, 0 .. chunks - 1.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece of cargo that crosses from one rank to another, as one of the two sees it.

    kind: "F" an activation, on its way to the next global stage; "B" the gradient of an activation, on its
        way to the previous one.
    microbatch: whose cargo it is.
    chunk: the chunk **of the rank that holds this act**: in a send the one that produced the cargo, in a
        receive the one that will consume it. (The two ends differ where the last rank meets rank 0.)
    peer: the rank, 0 .. stages - 1, at the other end.

    Between any two ranks the cargoes of one kind leave and arrive in the same order, so no tag is needed.
    """

    kind: Literal["F", "B"]
    microbatch: int
    chunk: int
    peer: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sends and receives started together; over when every one of them is."""

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()


Act: TypeAlias = Compute | Exchange


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank of the pipeline does, in order: rank r plays `acts[r]` from first to last.

    kind: the schedule's name, one of `SCHEDULES` in kinds.py, or "forward", which has no backward pass.
    stages: ranks of the pipeline. chunks: model chunks on each of them. microbatches: of one step.
    """

    kind: str
    stages: int
    chunks: int
    microbatches: int
    acts: tuple[tuple[Act, ...], ...]


class PlanError(AssertionError):
    """A plan that cannot be played correctly. Always a mistake of the plan's author, never of the user."""
