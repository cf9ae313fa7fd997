"""GEMMs of cuBLASLt with features that torch does not offer. torch loads cuBLASLt, and this module calls it by ctypes.

`plan` describes a GEMM and chooses one of the algorithms that cuBLASLt's heuristics propose, once per shape, so that
every run on a device uses the same algorithm. `run` launches it on the current stream. No call synchronises, and memory
is allocated only through torch, so runs can be captured in a CUDA graph. This module does not know what the GEMMs are
for.

Matrices are dense and row-major, as in torch. cuBLASLt's are column-major, so it sees the transpose of each tensor and
computes out^T = right^T left^T: its A is `right` and its B is `left`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from mega.core.device import current_stream


class Attribute(NamedTuple):
    """An attribute of a GEMM."""

    number: int
    kind: type[ctypes.c_int8 | ctypes.c_uint32 | ctypes.c_int64 | ctypes.c_void_p]


# Constants of cublasLt.h and library_types.h, with their names there. Attributes: CUBLASLT_MATMUL_DESC_(name).
TRANSPOSED = Attribute(3, ctypes.c_uint32)  # TRANSA: 1 if the GEMM multiplies by right^T
EPILOGUE = Attribute(7, ctypes.c_uint32)  # EPILOGUE: the last operation, on the result
BIAS = Attribute(8, ctypes.c_void_p)  # BIAS_POINTER: one number per column of `out`
AUX = Attribute(11, ctypes.c_void_p)  # EPILOGUE_AUX_POINTER: another tensor of the epilogue, shaped like `out`
AUX_STRIDE = Attribute(12, ctypes.c_int64)  # EPILOGUE_AUX_LD: elements per row of this tensor
SCALE_RIGHT, SCALE_LEFT = Attribute(17, ctypes.c_void_p), Attribute(18, ctypes.c_void_p)  # A_, B_SCALE_POINTER
FAST = Attribute(25, ctypes.c_int8)  # FAST_ACCUM: 1 if sums of fp8 products may be less exact
MODE_RIGHT, MODE_LEFT = Attribute(31, ctypes.c_uint32), Attribute(32, ctypes.c_uint32)  # A_, B_SCALE_MODE
# Values of EPILOGUE: CUBLASLT_EPILOGUE_(name).
GELU = 164  # GELU_AUX_BIAS: add BIAS, store the sum in AUX, and apply GELU
SLOPE = 192  # DGELU: multiply by the slope of GELU at AUX
# Values of modes: CUBLASLT_MATMUL_MATRIX_SCALE_(name). By default, a tensor has one scale.
ROWS_OF_BLOCKS = 4  # VEC128_32F: one scale per 1 x 128 elements
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_FP32 = 68
_WORKSPACE = 1  # attribute of a preference
_TILE = 1  # attribute of an algorithm

ADDRESS = 1 << 20
"""Value of an address in a plan. `run` sets the address, but cuBLASLt's heuristics require an aligned one."""
_WORKSPACE_BYTES = 32 << 20


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


Matrix = tuple[torch.dtype, int, int]
"""dtype, number of rows and number of columns."""


@dataclass(frozen=True)
class PlannedGemm:
    """A GEMM of some shape, with its algorithm."""

    description: ctypes.c_void_p
    right: ctypes.c_void_p  # layouts of matrices
    left: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: _Algorithm
    workspace: int
    """Number of bytes."""
    proposed: int
    """Number of algorithms that cuBLASLt's heuristics proposed."""

    @property
    def tile(self) -> int:
        """The tile of the algorithm: a value of cublasLtMatmulTile_t."""
        tile, size = ctypes.c_uint32(), ctypes.c_size_t()
        algorithm, bytes_of_tile = byref(self.algorithm), ctypes.c_size_t(4)
        _check(
            _library().cublasLtMatmulAlgoConfigGetAttribute(algorithm, _TILE, byref(tile), bytes_of_tile, byref(size))
        )
        return tile.value

    def run(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        addresses: Mapping[Attribute, torch.Tensor],
        beta: float = 0.0,
    ) -> None:
        """Compute out = left right + beta out, with the tensors of those attributes that are addresses."""
        workspace = torch.empty(max(1, self.workspace), dtype=torch.uint8, device=out.device)
        for attribute, x in addresses.items():
            _set(self.description, attribute, x.data_ptr())
        one, of_out = ctypes.c_float(1.0), ctypes.c_float(beta)
        to = ctypes.c_void_p(out.data_ptr())
        _check(
            _library().cublasLtMatmul(
                _handle(out.device), self.description, byref(one), ctypes.c_void_p(right.data_ptr()), self.right,
                ctypes.c_void_p(left.data_ptr()), self.left, byref(of_out), to, self.out, to, self.out,
                byref(self.algorithm), ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(self.workspace),
                ctypes.c_void_p(current_stream(out.device)),
            )
        )  # fmt: skip


def propose(
    device: torch.device, attributes: Mapping[Attribute, int], left: Matrix, right: Matrix, out: Matrix, *, most: int
) -> list[PlannedGemm]:
    """Return a GEMM with each of the algorithms that the heuristics propose, at most `most`, best first.

    left: [n, k]. right: [k, m], or [m, k] if transposed. out: [n, m]. The description takes about a kilobyte of host
    memory, which is not freed. Errors: CublasError.
    """
    library, description, preference, proposed = _library(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _check(library.cublasLtMatmulDescCreate(byref(description), _COMPUTE_FP32, _TYPES[torch.float32]))
    for attribute, value in attributes.items():
        _set(description, attribute, value)
    layouts = _layout(*right), _layout(*left), _layout(*out)
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    size = ctypes.c_uint64(_WORKSPACE_BYTES)
    _check(library.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE, byref(size), ctypes.c_size_t(8)))
    proposals = (_Proposal * most)()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(device), description, *layouts, layouts[-1], preference, most, proposals, byref(proposed)
    )
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    count = 0 if status else proposed.value
    return [
        PlannedGemm(description, *layouts, proposal.algorithm, proposal.workspace, count)
        for proposal in proposals[:count]
    ]


def plan(
    device: torch.device,
    attributes: Mapping[Attribute, int],
    left: Matrix,
    right: Matrix,
    out: Matrix,
    *,
    most: int,
    tiles: Collection[int] = (),
) -> PlannedGemm | None:
    """Return the first GEMM from `propose` with one of these tiles, otherwise the first, or None without proposals."""
    gemms = propose(device, attributes, left, right, out, most=most)
    suitable = (gemm for gemm in gemms if tiles and gemm.tile in tiles)
    return next(suitable, gemms[0] if gemms else None)


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(columns)
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), _TYPES[dtype], *sizes))
    return layout


def _set(description: ctypes.c_void_p, attribute: Attribute, value: int) -> None:
    number, kind = attribute
    size = ctypes.c_size_t(ctypes.sizeof(kind))
    _check(_library().cublasLtMatmulDescSetAttribute(description, number, byref(kind(value)), size))


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
