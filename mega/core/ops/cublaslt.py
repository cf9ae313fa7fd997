"""GEMMs with GELU in their epilogue, through cuBLASLt:

    forward GEMM of the layer before GELU   stores its result, with the bias, and GELU of the unrounded result
    dgrad GEMM of the layer after GELU      multiplies its result by the slope of GELU

torch loads cuBLASLt but does not offer these epilogues. Without them, GELU and its slope are separate passes over the
widest activations of a layer. cuBLASLt's heuristics choose an algorithm once per shape, so that every run on a device
uses the same algorithm. No call synchronises, and memory is allocated only through torch, so calls can be captured in a
CUDA graph. If cuBLASLt rejects a shape or computes a wrong result in a small test, the caller makes a separate pass.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache

import torch
from torch.nn import functional as F

from mega.core.device import current_stream
from mega.core.ops.trial import error_of, passes

KIND = "gelu_tanh"
"""The activation that the epilogues compute."""
WIDEST = 2048
"""Maximum number of a GEMM's summands. With 4,096 summands and 8,192 to 32,768 rows, the dgrad GEMM with its epilogue
took 0.96 to 1.29 of the time of the GEMM alone on an H100. A separate pass takes about 0.18 of that time, and may be
faster."""
ALIGNED = 8
"""Rows of all operands must start at a multiple of this number of elements."""
MOST = 64
"""Number of shapes whose algorithms are kept. Each takes about a kilobyte of host memory, which is not freed."""

# Constants of cublasLt.h and library_types.h.
_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_FP32, _COMPUTE_FP32 = 0, 68
_TRANSPOSED, _EPILOGUE, _BIAS, _AUX, _AUX_STRIDE = 3, 7, 8, 11, 12  # attributes of a description
_WORKSPACE = 1  # attribute of a preference
_WORKSPACE_BYTES = 32 << 20
_Value = ctypes.c_void_p | ctypes.c_uint32 | ctypes.c_int64


class _Epilogue(IntEnum):
    """The last operation of a GEMM, on its result."""

    GELU = 164  # add the bias, store the sum, and apply GELU
    SLOPE = 192  # multiply by the slope of GELU


class CublasError(RuntimeError):
    """A call of cuBLASLt failed."""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class _Gemm:
    """How to compute a GEMM for a number of rows. cuBLASLt's matrices are column-major: m = `wide` and n = rows."""

    description: ctypes.c_void_p
    weight: ctypes.c_void_p  # layouts of matrices
    x: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: _Algorithm
    workspace: int  # number of bytes


def applies(kind: str, dtype: torch.dtype, width: int, wide: int) -> bool:
    """Whether the GEMMs support an activation of `wide` features between linear layers of `width` features."""
    return kind == KIND and dtype in _TYPES and width <= WIDEST and width % ALIGNED == 0 and wide % ALIGNED == 0


def gelu_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return x weight^T + bias and GELU of this sum, both [n, wide], or None if cuBLASLt does not support the shape.

    x: [n, width]. weight: [wide, width]. bias: [wide]. All tensors have the same dtype. Call this function only if
    `applies` returns True.
    """
    before, active = (x.new_empty(len(x), len(weight)) for _ in range(2))
    computed = _compute(_Epilogue.GELU, _aligned(x), _aligned(weight), before, active, _aligned(bias))
    return (before, active) if computed else None


def slope_dgrad(grad: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
    """Compute (grad weight) * slope(before), [n, wide], or return None if cuBLASLt does not support the shape.

    grad: [n, width]. weight: [width, wide]. before: [n, wide], the input of GELU. All tensors have the same dtype. Call
    this function only if `applies` returns True.
    """
    before = _aligned(before)
    out = torch.empty_like(before)
    return out if _compute(_Epilogue.SLOPE, _aligned(grad), _aligned(weight), before, out) else None


def _compute(
    epilogue: _Epilogue,
    x: torch.Tensor,
    weight: torch.Tensor,
    before: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> bool:
    """Write the results to `out` and, with GELU, to `before`. Return False if cuBLASLt proposes no algorithm."""
    for rows in _parts(epilogue, x, out.shape[1]):
        gemm, _ = _gemm_of(x.device, x.dtype, epilogue, rows.stop - rows.start, x.shape[1], out.shape[1])
        if gemm is None:
            return False
        _run(gemm, x[rows], weight, before[rows], out[rows], bias)
    return True


def _parts(epilogue: _Epilogue, x: torch.Tensor, wide: int) -> tuple[slice, ...]:
    """Return the ranges of rows to compute separately: all rows, or two halves if cuBLASLt's heuristics know only one
    algorithm for all rows.

    For the dgrad of 32,768 rows, 1,024 summands and 4,096 columns, that algorithm is one for older devices (cuBLASLt
    13.1 on an H100), and two halves take 0.45 instead of 0.73 ms.
    """
    n = len(x)
    _, proposed = _gemm_of(x.device, x.dtype, epilogue, n, x.shape[1], wide)
    return (slice(0, n // 2), slice(n // 2, n)) if proposed == 1 and n % 2 == 0 else (slice(0, n),)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _run(
    gemm: _Gemm,
    x: torch.Tensor,
    weight: torch.Tensor,
    before: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    library, handle = _library(), _handle(x.device)
    workspace = torch.empty(max(1, gemm.workspace), dtype=torch.uint8, device=x.device)
    _set(gemm.description, _AUX, ctypes.c_void_p(before.data_ptr()))
    if bias is not None:
        _set(gemm.description, _BIAS, ctypes.c_void_p(bias.data_ptr()))
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    _check(
        library.cublasLtMatmul(
            handle, gemm.description, byref(one), ctypes.c_void_p(weight.data_ptr()), gemm.weight,
            ctypes.c_void_p(x.data_ptr()), gemm.x, byref(zero), ctypes.c_void_p(out.data_ptr()), gemm.out,
            ctypes.c_void_p(out.data_ptr()), gemm.out, byref(gemm.algorithm), ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(gemm.workspace), ctypes.c_void_p(current_stream(x.device)),
        )
    )  # fmt: skip


# -- the choice of algorithms


@lru_cache(MOST)
def _gemm_of(
    device: torch.device, dtype: torch.dtype, epilogue: _Epilogue, rows: int, width: int, wide: int
) -> tuple[_Gemm | None, int]:
    """Return the GEMM of a shape, or None if cuBLASLt proposes no algorithm, and the number of algorithms that it
    proposes. Errors: CublasError."""
    library, description, preference = _library(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(library.cublasLtMatmulDescCreate(byref(description), _COMPUTE_FP32, _FP32))
    _set(description, _EPILOGUE, ctypes.c_uint32(epilogue))
    _set(description, _AUX_STRIDE, ctypes.c_int64(wide))
    # Addresses are set for each run, but cuBLASLt's heuristics require aligned ones.
    _set(description, _AUX, ctypes.c_void_p(1 << 20))
    weight_shape = wide, width
    if epilogue == _Epilogue.GELU:
        _set(description, _BIAS, ctypes.c_void_p(1 << 20))
        _set(description, _TRANSPOSED, ctypes.c_uint32(1))
        weight_shape = width, wide
    weight, x, out = (_layout(dtype, *dims) for dims in (weight_shape, (width, rows), (wide, rows)))
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    most = ctypes.c_uint64(_WORKSPACE_BYTES)
    _check(library.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE, byref(most), ctypes.c_size_t(8)))
    proposals, proposed = (_Proposal * 8)(), ctypes.c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(device), description, weight, x, out, out, preference, len(proposals), proposals, byref(proposed)
    )
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    if status or not proposed.value:
        return None, 0
    first = proposals[0]
    return _Gemm(description, weight, x, out, first.algorithm, first.workspace), proposed.value


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """Return the layout of a dense column-major matrix."""
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), _TYPES[dtype], *sizes))
    return layout


def _set(
    description: ctypes.c_void_p, attribute: int, value: ctypes.c_void_p | ctypes.c_uint32 | ctypes.c_int64
) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _check(_library().cublasLtMatmulDescSetAttribute(description, attribute, byref(value), size))


def _check(status: int) -> None:
    if status:
        raise CublasError(f"cuBLASLt returned status {status}")


@cache
def _library() -> ctypes.CDLL:
    """Return the cuBLASLt that torch has loaded. Errors: OSError if torch has loaded none."""
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    """Return the handle of a device, which must be the current device. Only one thread uses the handle at a time,
    because the main thread waits for autograd's thread."""
    handle = ctypes.c_void_p()
    _check(_library().cublasLtCreate(byref(handle)))
    return handle


# -- the comparison with the plain implementation


@cache
def trusted(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the results for a small case agree with those of the plain implementation. If not, a warning is
    logged."""
    words = "GELU and its slope take separate passes: cuBLASLt's GEMMs"
    return passes(lambda: _trial_error(device, dtype), dtype, words)


def _trial_error(device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(0)
    x, weight, bias, grad, next_weight = (
        torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)
        for shape in ((200, 64), (136, 64), (136,), (200, 64), (64, 136))
    )
    outputs = gelu_forward(x, weight, bias)
    grad_before = None if outputs is None else slope_dgrad(grad, next_weight, outputs[0])
    if outputs is None or grad_before is None:
        raise CublasError("cuBLASLt proposes no algorithm")
    before = F.linear(x.float(), weight.float(), bias.float())
    leaf = outputs[0].float().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, grad.float() @ next_weight.float())
    return error_of([*outputs, grad_before], [before, F.gelu(before, approximate="tanh"), slope])
