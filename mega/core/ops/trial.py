"""Whether a kernel computes on this device what the plain form does: tried in a small case before it is relied on.

One that a device compiles wrongly, or not at all, would speak in the place of the model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import torch

ROUNDINGS = 8
"""Roundings of its dtype by which a result may be off."""

log = logging.getLogger(__name__)


def passes(off: Callable[[], float], dtype: torch.dtype, instead: str) -> bool:
    """Whether there is no `problem_of` these; else a line says what is done, and why."""
    problem = problem_of(off, dtype)
    if problem is not None:
        log.warning("%s fail on this device (%s)", instead, problem)
    return problem is None


def problem_of(off: Callable[[], float], dtype: torch.dtype) -> str | None:
    """What is wrong, in a line; None where the error that `off` finds is one of rounding to `dtype`."""
    try:
        found = off()
    except Exception as error:
        return first_line(error)
    return None if found <= ROUNDINGS * torch.finfo(dtype).eps else f"off by {found:.2g}"


def error_of(found: Iterable[torch.Tensor], plain: Iterable[torch.Tensor]) -> float:
    """The largest relative error of a tensor.

    >>> round(error_of([torch.tensor([3.0, 4.5])], [torch.tensor([3.0, 4.0])]), 3)
    0.1
    """
    offs = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, plain, strict=True)]
    return max(offs) if all(map(math.isfinite, offs)) else math.inf


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
