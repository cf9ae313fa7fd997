"""Triton as the kernels here use it, and how they are launched.

On the meta device a launch does nothing: shapes and memory are those of the device, and Triton may be absent.
"""

from __future__ import annotations

from typing import Any

import torch

from mega.core.device import overlaps_kernels

try:
    import triton.language as tl
    from triton import jit
except ImportError:
    tl = None

    def jit(function: Any = None, **options: Any) -> Any:
        return jit if function is None else function


def launch(kernel: Any, grid: tuple[int, ...], x: torch.Tensor, *args: Any, **options: Any) -> None:
    """kernel[grid](x, *args, **options)."""
    if not x.is_meta:
        kernel[grid](x, *args, **options)


try:
    from triton.language.extra.cuda import gdc_launch_dependents as before_next
    from triton.language.extra.cuda import gdc_wait as after_kernel
except ImportError:  # an older Triton
    before_next = after_kernel = None

OVERLAP = True
"""Whether kernels of a step begin while the one before them ends, as far as they need nothing of it (programmatic
dependent launch): they call `before_next`, then `after_kernel` before they read what was computed or write anything."""


def overlapping(device: torch.device) -> dict[str, Any]:
    """Options of a launch of such a kernel."""
    able = OVERLAP and before_next is not None and overlaps_kernels(device)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


@jit
def in_turn(OVERLAP: tl.constexpr):
    """The beginning of a kernel that needs all that was computed before it."""
    if OVERLAP:
        before_next()
        after_kernel()


def cdiv(a: int, b: int) -> int:
    """
    >>> cdiv(5, 4)
    2
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """
    >>> [next_power_of_2(n) for n in (1, 3, 4)]
    [1, 4, 4]
    """
    return 1 << (n - 1).bit_length()


__all__ = ["after_kernel", "before_next", "cdiv", "in_turn", "jit", "launch", "next_power_of_2", "overlapping", "tl"]
