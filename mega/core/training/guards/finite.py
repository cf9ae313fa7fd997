"""Is every number that a checkpoint would keep finite? Asked of all ranks before anything is written; each step asks
before its update.

Weights, masters, moments and factors are looked at in one pass each, without memory of their own (the least and the
greatest of a flat tensor are NaN where any element is); the host waits once a save. Where numbers are not finite, the
ranks find out together which tensor of which rank was the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mega.core.batch import Batch
from mega.core.checkpoint.own.pieces import Piece
from mega.core.parallel.bucket_sums import tied_buckets
from mega.core.parallel.collectives import all_reduce
from mega.core.training.guards.audit import odd_ranks
from mega.core.training.probes import BrokenTensor, all_finite, broken_fields, first_broken
from mega.core.training.state import TrainState

DIVERGED = "training has diverged. Resume from an earlier checkpoint with a lower --lr, a longer warm-up or --clip-grad"


class NotFiniteError(FloatingPointError):
    """The state may not be kept. words: the tensor and the rank."""

    def __init__(self, step: int, words: str):
        super().__init__(f"step {step} is not saved: {words}: {DIVERGED}")
        self.words = words


def check_finite(state: TrainState) -> None:
    """See that the state may be saved; every rank takes part.

    Errors: NotFiniteError on every rank, naming step, tensor and rank.
    """
    kept = [all_finite(flat).to(state.device.torch) for flat in state.flats()]
    finite = torch.stack(kept).all().float()
    all_reduce(finite, state.mesh.everyone, "min")
    if bool(finite):
        return
    found = broken_tensors(state)
    if found is not None:  # else it is in padding, which is not kept
        raise NotFiniteError(state.progress.step, found.words)


def broken_tensors(
    state: TrainState, batches: Sequence[Batch] = (), sums: Sequence[float] = (), *, gradients: bool = False
) -> BrokenTensor | None:
    """Whose numbers are not finite, tensor and rank, the same text on all ranks; None where all are. A moment is named
    before weights, which its update has broken. Every rank takes part, and waits for its device.

    batches, sums: of the step, the latter as its `Probes` left them. gradients: whether the step's are still there.
    """
    found: dict[str, Sequence[object]] = {
        "state": _broken(state),
        "batch": broken_fields(batches),
        "outputs": [],
        "gradients": [],
        "reduced": [],
    }
    if state.probes is not None and sums:
        found |= state.probes.broken(sums)
    if gradients:
        found["reduced"] = sorted(_not_finite(state.gradient_pieces()))
    return first_broken(state.exchange(found))


def check_tied(state: TrainState, step: int, differs: int, copy_hash: int) -> None:
    """Where a step was skipped, see that it was not for a gradient of which stages hold different copies; every rank
    takes part. differs, copy_hash: of the step's `tied_difference`.

    Errors: FloatingPointError on every rank, naming step, tensor and ranks.
    """
    if state.mesh.pp.size == 1:
        return
    own = (tied_buckets(state.grads)[differs - 1].tied_name(), copy_hash) if differs else ("", 0)
    found = state.exchange(own)
    tensors = sorted({name for name, _ in found if name})
    if tensors:
        hashes = {rank: held for rank, (name, held) in enumerate(found) if name == tensors[0]}
        raise FloatingPointError(
            f"step {step}: copies of the gradient of {tensors[0]} are no longer equal, as they were when they were "
            f"reduced: {odd_ranks(list(hashes.values()), tuple(hashes))}. The step was not applied; resume from an "
            "earlier checkpoint, without the device whose memory was damaged"
        )


def _broken(state: TrainState) -> list[str]:
    """The tensors of this rank that hold a number that is not finite."""
    pieces = (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False), *state.frozen_pieces())
    return sorted(_not_finite(pieces))


def _not_finite(pieces: Iterable[Piece]) -> set[str]:
    return {piece.key for piece in pieces if piece.tensor.numel() and not bool(all_finite(piece.tensor))}
