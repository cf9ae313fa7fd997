"""Is every number that a checkpoint would keep finite? Asked of all ranks before anything of it is written, and where a
loss is not finite.

A loss that is NaN ends a run one step after the update that broke the weights, which is late where that update is
followed by a save. Weights, masters, moments and factors are looked at in one pass each, without memory of their own
(the least and the greatest of a flat tensor are NaN where any element is); the host waits once a save.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mega.core.parallel.bucket_sums import tied_buckets
from mega.core.parallel.collectives import all_reduce
from mega.core.training.guards.audit import odd_ranks
from mega.core.training.state import TrainState

DIVERGED = "training has diverged. Resume from an earlier checkpoint with a lower --lr, a longer warm-up or --clip-grad"


def check_finite(state: TrainState) -> None:
    """See that the state may be saved; every rank takes part.

    Errors: FloatingPointError on every rank, naming step, tensor and rank.
    """
    kept = [all_finite(flat).to(state.device.torch) for flat in _flats(state)]
    finite = torch.stack(kept).all().float()
    all_reduce(finite, state.mesh.everyone, "min")
    if bool(finite):
        return
    found = broken_tensors(state)
    if found is not None:  # else it is in padding, which is not kept
        raise FloatingPointError(f"step {state.progress.step} is not saved: {found}: {DIVERGED}")


def broken_tensors(state: TrainState) -> str | None:
    """Whose numbers are not finite, tensor and rank, the same text on all ranks; None where all are. A moment is named
    before weights, which its update has broken. Every rank takes part, and waits for its device."""
    found = state.exchange(_broken(state))
    named = [(name.startswith("weights/"), rank, name) for rank, names in enumerate(found) for name in names]
    if not named:
        return None
    _, rank, name = min(named)
    more = f" and {len(found[rank]) - 1} more tensors hold" if len(found[rank]) > 1 else " holds"
    return f"{name} (rank {rank}){more} numbers that are not finite"


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


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether every element of a tensor that has any is finite; a device value.

    >>> bool(all_finite(torch.ones(3))), bool(all_finite(torch.tensor([1.0, torch.nan, 2.0])))
    (True, False)
    """
    least, greatest = torch.aminmax(tensor.detach())
    return torch.isfinite(least) & torch.isfinite(greatest)


def _flats(state: TrainState) -> Iterator[torch.Tensor]:
    """All that this rank holds, flat; what several hold is looked at on each of them."""
    for bucket in state.grads.buckets:
        yield bucket.own_weights if state.grads.zero else bucket.weights
    for owned in state.optimizer.shards:
        yield from (tensor for tensor in owned.tensors() if tensor.numel())


def _broken(state: TrainState) -> list[str]:
    """The tensors of this rank that hold a number that is not finite."""
    pieces = (*state.weight_pieces(mine=False), *state.optimizer_pieces(mine=False))
    return sorted({piece.key for piece in pieces if piece.tensor.numel() and not bool(all_finite(piece.tensor))})
