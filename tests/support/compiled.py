"""Compiles Triton kernels for a GPU that this machine need not have, and reports the resources that they use.

While `compiling` is active, a launch compiles the kernel for the shapes and dtypes of its arguments, which may be on a
CPU, and runs nothing. Triton's compiler and ptxas need no device. The interpreter must be off, so this module cannot be
used in the process of the test suite: run `python tests/battery/compiled.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

REGISTERS, SHARED = 65_536, 227 * 1024
"""Registers of a multiprocessor, and bytes of shared memory that a program may use (compute capability 9.0)."""
BYTES = 16
"""Bytes of an instruction."""


class Compiled(NamedTuple):
    """What one variant of a kernel uses."""

    kernel: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread that do not fit into its registers
    shared: int  # bytes of shared memory
    warps: int
    loop: int  # instructions of the longest inner loop, 0 without a loop


class _Absent:
    """A driver of a device that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int = 90) -> Iterator[list[Compiled]]:
    """Compile what is launched for a CUDA device of a compute capability, and collect the variants."""
    variants: list[Compiled] = []
    seen: set[int] = set()
    run = JITFunction.run

    def compiled(self: Any, *args: object, grid: object, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in seen:  # Triton keeps what it has compiled
            seen.add(id(kernel))
            variants.append(_resources(kernel))

    driver.set_active(_Absent(GPUTarget("cuda", capability, 32)))
    with (
        patch.object(JITFunction, "run", compiled),
        patch("mega.core.ops.kernels.language._kinds", lambda *args: None),
        patch("mega.core.ops.kernels.language.overlaps_kernels", lambda device: capability >= 90),
    ):
        yield variants


def _resources(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (_dumped(file.name, flag) for flag in ("--dump-resource-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+) ", usage)
    assert found is not None, usage
    meta = kernel.metadata
    return Compiled(meta.name, int(found[1]), int(found[2]), meta.shared, meta.num_warps, _longest_loop(code))


def _dumped(name: str, flag: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.check_output([tool, flag, name], text=True, stderr=subprocess.DEVNULL)


def _longest_loop(code: str) -> int:
    """Count the instructions between a jump backwards and its target, in loops that contain no other loop."""
    jumps = re.findall(r"/\*([0-9a-f]{4,})\*/ .*\bBRA\b.*?(0x[0-9a-f]+)", code)
    loops = [(int(to, 16), int(at, 16)) for at, to in jumps if int(to, 16) < int(at, 16)]
    inner = [(a, b) for a, b in loops if not any(a < c and d < b for c, d in loops)]
    return max(((b - a) // BYTES + 1 for a, b in inner), default=0)
