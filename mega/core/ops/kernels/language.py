"""Triton as the kernels here use it, and how they are launched.

On the meta device a launch does nothing: shapes and memory are those of the device, and Triton may be absent.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton.language as tl
    from triton import jit
    from triton.language.extra.cuda import gdc_launch_dependents as before_next
    from triton.language.extra.cuda import gdc_wait as after_kernel
except ImportError:
    tl = before_next = after_kernel = None

    def jit(function: Any = None, **options: Any) -> Any:
        return jit if function is None else function


def launch(kernel: Any, grid: tuple[int, ...], x: torch.Tensor, *args: Any, **options: Any) -> None:
    """kernel[grid](x, *args, **options)."""
    if not x.is_meta:
        kernel[grid](x, *args, **options)


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


__all__ = ["after_kernel", "before_next", "cdiv", "jit", "launch", "next_power_of_2", "tl"]
