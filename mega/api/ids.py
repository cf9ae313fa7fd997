"""Check token ids passed by the caller, for all functions of the Python interface."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def checked_ids(name: str, given: torch.Tensor | Sequence[int] | Sequence[Sequence[int]], vocab: int) -> torch.Tensor:
    """Check token ids and convert them to int64, on their current device. name: name of the argument, for errors.
    vocab: vocabulary size without padding.

    Errors: ValueError naming the argument, the rule and the first invalid id.
    """
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}: must be token ids, rows of equal length") from None
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ValueError(f"{name}: ids must be whole numbers, not {ids.dtype}")
    ids = ids.to(torch.int64)
    outside = ids[(ids < 0) | (ids >= vocab)]
    if outside.numel():
        raise ValueError(f"{name}: ids must be from 0 to {vocab - 1}, not {int(outside.view(-1)[0])}")
    return ids
