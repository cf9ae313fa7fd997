"""Check on all ranks that all values in a checkpoint are finite, before anything is written. Each step runs a similar
check before its update.

The check needs one pass over weights, masters, moments and factors and no extra memory, because the minimum and the
maximum of a flat tensor are NaN if any element is NaN. The host waits once per save. If the check fails, all ranks
together find the rank and tensor where a non-finite number appeared first.
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
    """Raised if the state is not finite and must not be saved. words: a message that names the tensor and the rank."""

    def __init__(self, step: int, words: str):
        super().__init__(f"step {step} is not saved: {words}: {DIVERGED}")
        self.words = words


def check_finite(state: TrainState) -> None:
    """Check that the state may be saved. This is a collective that all ranks must call.

    Errors: NotFiniteError on every rank, naming step, tensor and rank.
    """
    flags = [all_finite(flat).to(state.device.torch) for flat in state.flats()]
    finite = torch.stack(flags).all().float()
    all_reduce(finite, state.mesh.everyone, "min")
    if bool(finite):
        return
    broken = broken_tensors(state)
    if broken is not None:  # otherwise the non-finite number is in padding, which is not saved
        raise NotFiniteError(state.progress.step, broken.words)


def broken_tensors(
    state: TrainState, batches: Sequence[Batch] = (), sums: Sequence[float] = (), *, gradients: bool = False
) -> BrokenTensor | None:
    """Return the tensor and rank where non-finite values appeared first, or None. The result is identical on all ranks.

    If non-finite values have spread from a moment to weights, the moment is reported, not the weights. This is a
    collective that all ranks must call; it synchronizes with the device. batches: the microbatches of the step. sums:
    the step's sums of `Probes`. gradients: whether the gradients of the step still exist.
    """
    report: dict[str, Sequence[object]] = {
        "state": _broken(state),
        "batch": broken_fields(batches),
        "outputs": [],
        "gradients": [],
        "reduced": [],
    }
    if state.probes is not None and sums:
        report |= state.probes.broken(sums)
    if gradients:
        report["reduced"] = sorted(_not_finite(state.gradient_pieces()))
    return first_broken(state.exchange(report))


def check_tied(state: TrainState, step: int, differs: int, copy_hash: int) -> None:
    """After a skipped step, check that all stages hold equal gradients of tied tensors. This is a collective that all
    ranks must call. differs, copy_hash: the values that `tied_difference` returned for the step.

    Errors: FloatingPointError on every rank, naming step, tensor and ranks.
    """
    if state.mesh.pp.size == 1:
        return
    named_hash = (tied_buckets(state.grads)[differs - 1].tied_name(), copy_hash) if differs else ("", 0)
    all_hashes = state.exchange(named_hash)
    tensors = sorted({name for name, _ in all_hashes if name})
    if tensors:
        hashes = {rank: value for rank, (name, value) in enumerate(all_hashes) if name == tensors[0]}
        raise FloatingPointError(
            f"step {step}: copies of the gradient of {tensors[0]} are no longer equal, as they were when they were "
            f"reduced: {odd_ranks(list(hashes.values()), tuple(hashes))}. The step was not applied; resume from an "
            "earlier checkpoint, without the device whose memory was damaged"
        )


def _broken(state: TrainState) -> list[str]:
    """Return the names of the tensors of this rank that contain a NaN or an infinity."""
    pieces = (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False), *state.frozen_pieces())
    return sorted(_not_finite(pieces))


def _not_finite(pieces: Iterable[Piece]) -> set[str]:
    return {piece.key for piece in pieces if piece.tensor.numel() and not bool(all_finite(piece.tensor))}
