"""Triton as the kernels here use it, and how they are launched.

On the meta device a launch does nothing: shapes and memory are those of the device, and Triton may be absent.
"""

from __future__ import annotations

from typing import Any

import torch

from mega.core.device import overlaps_kernels
from mega.core.ops import observe

try:
    import triton.language as tl
    from triton import jit
except ImportError:
    tl = None

    def jit(function: Any = None, **options: Any) -> Any:
        return jit if function is None else function


def launch(kernel: Any, grid: tuple[int, ...], x: torch.Tensor, *args: object, **options: object) -> None:
    """kernel[grid](x, *args, **options).

    Triton looks at each argument, at its settings and at globals before every launch, which takes the host up to
    twice as long as to find what it compiled for arguments of the same kinds.
    """
    if x.is_meta:
        observe.kernel(getattr(kernel, "__name__", "kernel"), (x, *args))
        return
    kinds = _kinds(x, *args)
    if kinds is None:
        kernel[grid](x, *args, **options)
        return
    key = id(kernel), x.get_device(), *kinds, *options.items()
    found = _compiled.get(key)
    if found is not None:
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](x, *args, *constants)
        return
    compiled = kernel[grid](x, *args, **options)
    names = getattr(kernel, "arg_names", ["unknown"])[1 + len(args) :]
    if hasattr(compiled, "packed_metadata") and all(name in options for name in names):  # not by the interpreter
        _compiled[key] = compiled, tuple(options[name] for name in names)


_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
"""What Triton compiled for kinds of arguments, which keeps the kernel alive and its id its own, and the constants among
these, which come last."""


def _kinds(*args: object) -> list[torch.dtype | str | None] | None:
    """What Triton compiles a kernel once for each of, on CUDA; None where it is left to Triton to say.

    >>> _kinds(torch.empty(4), None, 0.5, 1, 2, 32), _kinds(-1), _kinds((1, 2))
    ([torch.float32, None, 'float', '1', 'int', '16'], None, None)
    """
    kinds: list[torch.dtype | str | None] = []
    for one in args:
        if isinstance(one, torch.Tensor):
            kinds.append(one.dtype)
            if one.data_ptr() & 15:
                kinds.append("odd")
        elif one is None:
            kinds.append(None)
        elif type(one) is float:
            kinds.append("float")
        elif type(one) is int and 0 <= one < 1 << 31:
            kinds.append("1" if one == 1 else "int" if one & 15 else "16")
        else:
            return None
    return kinds


try:
    from triton.language.extra.cuda import gdc_launch_dependents as before_next
    from triton.language.extra.cuda import gdc_wait as after_kernel
except ImportError:  # an older Triton
    before_next = after_kernel = None

OVERLAP = True
"""Whether kernels of a step begin while the one before them ends, as far as they need nothing of it (programmatic
dependent launch): they call `before_next`, then `after_kernel` before they read what was computed or write anything."""


def overlapping(device: torch.device) -> dict[str, bool]:
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
