"""Compiles CUDA C++ while a program runs, and launches it.

The compiler is NVRTC, a library that torch's CUDA wheels bring along, so neither nvcc nor a toolkit is needed. It
includes no files. Compiling takes one to two seconds, once per process and set of macros. Memory is allocated only by
torch, and launches go to the current stream, so they can be recorded in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from mega.core.device import current_stream

SWIZZLE = 128
"""Bytes of a row in shared memory, within which the tensor cores expect 16-byte chunks to be permuted."""

# Constants of cuda.h.
_SHARED_BYTES = 8  # attribute of a function: maximum of dynamic shared memory
_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128, _PROMOTION_128 = 3, 2
_MAP_BYTES, _MAP_ALIGNED = 128, 64


class CudaError(RuntimeError):
    """A call of the driver or the compiler failed."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel of the current device."""

    function: ctypes.c_void_p
    shared: int
    """Bytes of dynamic shared memory."""


@cache
def kernel(source: Path, macros: tuple[str, ...], name: str, device: torch.device) -> Kernel:
    """Compile `source` for a device, which must be the current device, and return its kernel `name`.

    A file states the shared memory of its kernel `x` in a constant `x_bytes` of type unsigned int. Errors: OSError if
    NVRTC is not installed, CudaError with the first message of the compiler.
    """
    module, function, size = _module(source, macros, device), ctypes.c_void_p(), ctypes.c_uint32()
    driver = _driver()
    _check(driver.cuModuleGetFunction(byref(function), module, name.encode()))
    address, length = ctypes.c_void_p(), ctypes.c_size_t()
    if driver.cuModuleGetGlobal_v2(byref(address), byref(length), module, f"{name}_bytes".encode()) == 0:
        _check(driver.cuMemcpyDtoH_v2(byref(size), address, ctypes.c_size_t(ctypes.sizeof(size))))
        _check(driver.cuFuncSetAttribute(function, _SHARED_BYTES, ctypes.c_int(size.value)))
    return Kernel(function, size.value)


def launch(
    kernel: Kernel,
    blocks: int,
    threads: int,
    device: torch.device,
    *arguments: ctypes.Structure | ctypes.Array[ctypes.c_char],
) -> None:
    """Launch a kernel on the current stream. arguments: its parameters, in the memory layout of C."""
    addresses = (ctypes.c_void_p * len(arguments))(*map(_address, arguments))
    stream = ctypes.c_void_p(current_stream(device))
    _check(
        _driver().cuLaunchKernel(
            kernel.function, blocks, 1, 1, threads, 1, 1, kernel.shared, stream, addresses, ctypes.c_void_p()
        )
    )


def tensor_map(x: torch.Tensor, rows: int) -> ctypes.Array[ctypes.c_char]:
    """Return a description of x [b, s, heads, d], with which a kernel loads boxes of `rows` rows of 128 bytes of one
    head. Addresses and strides must be multiples of 16 bytes, and d is contiguous."""
    return _tensor_map(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), rows)


@lru_cache(maxsize=4096)
def _tensor_map(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], rows: int
) -> ctypes.Array[ctypes.c_char]:
    (b, s, heads, d), size = shape, dtype.itemsize
    by_batch, by_row, by_head = (step * size for step in stride[:3])
    to = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNED)
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(_address(to)), _TYPES[dtype], 4, ctypes.c_void_p(address),
            (ctypes.c_uint64 * 4)(d, heads, s, b), (ctypes.c_uint64 * 3)(by_head, by_row, by_batch),
            (ctypes.c_uint32 * 4)(SWIZZLE // size, 1, rows, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            0, _SWIZZLE_128, _PROMOTION_128, 0,
        )
    )  # fmt: skip
    return to


def _address(x: ctypes.Structure | ctypes.Array[ctypes.c_char]) -> int:
    """Return the address of an argument; of a tensor map, the first aligned one."""
    address = ctypes.addressof(x)
    return address if isinstance(x, ctypes.Structure) else -(-address // _MAP_ALIGNED) * _MAP_ALIGNED


# -- the compiler


@cache
def _module(source: Path, macros: tuple[str, ...], device: torch.device) -> ctypes.c_void_p:
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(byref(module), _compiled(source, macros)))
    return module


def _compiled(source: Path, macros: tuple[str, ...]) -> ctypes.Array[ctypes.c_char]:
    compiler, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(compiler.nvrtcCreateProgram(byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", *(f"--define-macro={macro}".encode() for macro in macros)]
    status = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if status:
        _check(compiler.nvrtcGetProgramLogSize(program, byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(compiler.nvrtcGetProgramLog(program, log))
        raise CudaError(f"NVRTC: {log.value.decode(errors='replace').strip() or f'status {status}'}")
    _check(compiler.nvrtcGetCUBINSize(program, byref(size)))
    image = ctypes.create_string_buffer(size.value)
    _check(compiler.nvrtcGetCUBIN(program, image))
    _check(compiler.nvrtcDestroyProgram(byref(program)))
    return image


@cache
def _compiler() -> ctypes.CDLL:
    """Return NVRTC of torch's CUDA. Errors: OSError if it is not installed."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        beside = sorted((Path(torch.__file__).parent.parent / "nvidia").glob(f"*/lib/{name}"))
        if not beside:
            raise
        return ctypes.CDLL(str(beside[0]))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        raise CudaError(f"CUDA driver or compiler: status {status}")
