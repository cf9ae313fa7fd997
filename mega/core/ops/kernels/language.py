"""Provides the names from Triton that kernels use, and a fast way to launch kernels.

On the meta device, a launch is only reported to observers, and Triton need not be installed.
"""

from __future__ import annotations

from typing import Any

import torch

from mega.core.device import overlaps_kernels
from mega.core.ops import observe

try:
    import triton.language as tl
    from triton import jit, knobs

    COMPILED = tl.constexpr(not knobs.runtime.interpret)
    """Whether kernels are compiled for a device. Triton's interpreter does not run inline assembly."""
except ImportError:
    tl = COMPILED = None

    def jit(function: Any = None, **options: Any) -> Any:
        return jit if function is None else function


def launch(kernel: Any, grid: tuple[int, ...], x: torch.Tensor, *args: object, **options: object) -> None:
    """Launch `kernel[grid](x, *args, **options)`.

    Before every launch, Triton inspects each argument, its own settings, and global variables. This function instead
    looks up the compiled kernel by the kinds of the arguments, which can halve the time of a launch.
    """
    if x.is_meta:
        observe.kernel(getattr(kernel, "__name__", "kernel"), (x, *args))
        return
    kinds = _kinds(x, *args)
    if kinds is None:
        kernel[grid](x, *args, **options)
        return
    key = id(kernel), x.get_device(), *kinds, *options.items()
    entry = _compiled.get(key)
    if entry is not None:
        compiled, constants = entry
        compiled[(*grid, 1, 1)[:3]](x, *args, *constants)
        return
    compiled = kernel[grid](x, *args, **options)
    names = getattr(kernel, "arg_names", ["unknown"])[1 + len(args) :]
    if hasattr(compiled, "packed_metadata") and all(
        name in options for name in names
    ):  # Triton's interpreter does not compile kernels
        _compiled[key] = compiled, tuple(options[name] for name in names)


_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
"""Kinds of arguments -> (compiled kernel, values of its constants, which are the last arguments). An entry keeps the
kernel alive, so the kernel's id stays unique."""


def _kinds(*args: object) -> list[torch.dtype | str | None] | None:
    """Return the properties by which Triton specialises kernels on CUDA for these arguments, or None if only Triton can
    determine these properties.

    >>> _kinds(torch.empty(4), None, 0.5, 1, 2, 32), _kinds(-1), _kinds((1, 2))
    ([torch.float32, None, 'float', '1', 'int', '16'], None, None)
    """
    kinds: list[torch.dtype | str | None] = []
    for argument in args:
        if isinstance(argument, torch.Tensor):
            kinds.append(argument.dtype)
            if argument.data_ptr() & 15:
                kinds.append("odd")
        elif argument is None:
            kinds.append(None)
        elif type(argument) is float:
            kinds.append("float")
        elif type(argument) is int and 0 <= argument < 1 << 31:
            kinds.append("1" if argument == 1 else "int" if argument & 15 else "16")
        else:
            return None
    return kinds


try:
    from triton.language.extra.cuda import gdc_launch_dependents as before_next
    from triton.language.extra.cuda import gdc_wait as after_kernel
except ImportError:  # older versions of Triton
    before_next = after_kernel = None

OVERLAP = True
"""Whether kernels of a decoding step start while the previous kernel ends (programmatic dependent launch). These
kernels must call `before_next` first, and `after_kernel` before they write to memory or read results of the previous
kernel."""


def overlapping(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that may overlap with the previous kernel."""
    able = OVERLAP and before_next is not None and overlaps_kernels(device)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


@jit
def in_turn(OVERLAP: tl.constexpr):
    """Wait for the previous kernel. A kernel that cannot do any work before the previous kernel ends must call this
    function first."""
    if OVERLAP:
        before_next()
        after_kernel()


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up.

    >>> cdiv(5, 4)
    2
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n.

    >>> [next_power_of_2(n) for n in (1, 3, 4)]
    [1, 4, 4]
    """
    return 1 << (n - 1).bit_length()


__all__ = [
    "COMPILED",
    "after_kernel",
    "before_next",
    "cdiv",
    "in_turn",
    "jit",
    "launch",
    "next_power_of_2",
    "overlapping",
    "tl",
]
