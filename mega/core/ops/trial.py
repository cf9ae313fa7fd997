"""Tests kernels before they are used, by comparing a kernel with its reference for a small case on the device.

A kernel that was compiled incorrectly for the device would otherwise corrupt the results of the model. Ranks that
compute a layer together must make the same decision. With different kernels, ranks might exchange different tensors and
then wait forever, or choose different experts for a token. This module does not depend on ranks; callers pass a
function through which ranks agree.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import torch

ROUNDINGS = 8
"""Maximum accepted relative error, in units of the dtype's eps."""

log = logging.getLogger(__name__)

Agree = Callable[[str | None], str | None]
"""A function that takes this rank's problem, or None if the rank has none. On every rank, the function returns the
first problem in rank order, or None. All ranks must call the function together."""


def alone(problem: str | None) -> str | None:
    """Implement `Agree` for a single rank."""
    return problem


def passes(error: Callable[[], float], dtype: torch.dtype, instead: str, agree: Agree = alone) -> bool:
    """Return whether a kernel passes its trial on all ranks that call `agree`. If the kernel fails on this rank, log a
    warning that begins with `instead` and states the reason."""
    problem = problem_of(error, dtype)
    if problem is not None:
        log.warning("%s fail on this device (%s)", instead, problem)
    return agree(problem) is None


def problem_of(error: Callable[[], float], dtype: torch.dtype) -> str | None:
    """Return a one-line description of the problem, or None if `error()` succeeds and its result is within the rounding
    errors of `dtype`."""
    try:
        error_size = error()
    except Exception as exception:
        return first_line(exception)
    return None if error_size <= ROUNDINGS * torch.finfo(dtype).eps else f"off by {error_size:.2g}"


def error_of(found: Iterable[torch.Tensor], plain: Iterable[torch.Tensor]) -> float:
    """Return the largest relative error of any tensor.

    >>> round(error_of([torch.tensor([3.0, 4.5])], [torch.tensor([3.0, 4.0])]), 3)
    0.1
    """
    offs = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, plain, strict=True)]
    return max(offs) if all(map(math.isfinite, offs)) else math.inf


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
