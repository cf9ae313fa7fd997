"""fp8 GEMMs that write their result to an fp32 tensor or add it to the tensor, through cuBLASLt.

torch offers fp8 GEMMs that write, but not fp8 GEMMs that add. A separate addition reads the result again. Both GEMMs
use the algorithm that cuBLASLt's heuristics choose for the shape, which is the algorithm that torch uses, so the sums
are bitwise equal to those of a separate addition (seen on an H100 for the weights of Llama-2 7B, with scales of tensors
and of blocks). If cuBLASLt rejects a shape, or computes a wrong result in a small test, the caller adds the result.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from mega.core.device import block_scaled_matmuls, current_stream
from mega.core.ops import cublaslt, observe
from mega.core.ops.operand import Operand
from mega.core.ops.trial import error_of, passes

ALIGNED = 256
"""The tensor must start at a multiple of this number of bytes, which cuBLASLt's heuristics assume."""
MOST = 256
"""Number of shapes whose algorithms are kept, as in cublaslt.py."""

# Constants of cublasLt.h and library_types.h.
_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.float32: 0}
_COMPUTE_FP32, _SCALE_FP32 = 68, 0
_TRANSPOSED, _SCALE_A, _SCALE_B, _MODE_A, _MODE_B = 3, 17, 18, 31, 32  # attributes of a description
_ROWS_OF_BLOCKS = 4  # a mode of scales: one scale per 1 x 128 elements


@dataclass(frozen=True)
class _AddingGemm:
    """How to compute a GEMM of some shape. cuBLASLt's matrices are column-major, so its factors are b and a."""

    description: ctypes.c_void_p
    b: ctypes.c_void_p  # layouts of matrices
    a: ctypes.c_void_p
    total: ctypes.c_void_p
    algorithm: cublaslt._Algorithm
    workspace: int  # number of bytes


def accumulate(total: torch.Tensor, a: Operand, b: Operand, *, overwrite: bool) -> bool:
    """Add a b^T to `total` [m, n], or write a b^T to `total`. Return False, without changing `total`, if cuBLASLt does
    not support the GEMM.

    a [m, k], b [n, k]: operands with one scale per tensor, or in rows of 1 x 128. The device requires m, n and k to be
    multiples of 16.
    """
    if total.is_meta:
        observe.gemm(a.narrow, b.narrow.t(), total)
        if not overwrite:
            observe.kernel("read of a main_grad", (total,))
        return True
    blocks = a.inverse.dim() > 0
    if not _applies(total, a, b) or not _trusted(total.device, a.narrow.dtype, blocks):
        return False
    return _run(total, a, b, 0.0 if overwrite else 1.0)


def _applies(total: torch.Tensor, a: Operand, b: Operand) -> bool:
    dense = all(x.is_contiguous() for x in (total, a.narrow, b.narrow))
    aligned = all(x.data_ptr() % ALIGNED == 0 for x in (total, a.narrow, b.narrow))
    return total.dtype == torch.float32 and dense and aligned


def _run(total: torch.Tensor, a: Operand, b: Operand, beta: float) -> bool:
    blocks = a.inverse.dim() > 0
    gemm = _gemm_of(total.device, a.narrow.dtype, b.narrow.dtype, *a.narrow.shape, len(b.narrow), blocks)
    if gemm is None:
        return False
    workspace = torch.empty(max(1, gemm.workspace), dtype=torch.uint8, device=total.device)
    cublaslt._set(gemm.description, _SCALE_A, ctypes.c_void_p(b.inverse.data_ptr()))
    cublaslt._set(gemm.description, _SCALE_B, ctypes.c_void_p(a.inverse.data_ptr()))
    one, of_total = ctypes.c_float(1.0), ctypes.c_float(beta)
    cublaslt._check(
        cublaslt._library().cublasLtMatmul(
            cublaslt._handle(total.device), gemm.description, byref(one), ctypes.c_void_p(b.narrow.data_ptr()), gemm.b,
            ctypes.c_void_p(a.narrow.data_ptr()), gemm.a, byref(of_total), ctypes.c_void_p(total.data_ptr()),
            gemm.total, ctypes.c_void_p(total.data_ptr()), gemm.total, byref(gemm.algorithm),
            ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(gemm.workspace),
            ctypes.c_void_p(current_stream(total.device)),
        )
    )  # fmt: skip
    return True


@lru_cache(MOST)
def _gemm_of(
    device: torch.device, dtype_a: torch.dtype, dtype_b: torch.dtype, m: int, k: int, n: int, blocks: bool
) -> _AddingGemm | None:
    """Return the GEMM of a shape, or None if cuBLASLt proposes no algorithm. Errors: CublasError."""
    library, description, preference = cublaslt._library(), ctypes.c_void_p(), ctypes.c_void_p()
    cublaslt._check(library.cublasLtMatmulDescCreate(byref(description), _COMPUTE_FP32, _SCALE_FP32))
    cublaslt._set(description, _TRANSPOSED, ctypes.c_uint32(1))
    for scale, mode in ((_SCALE_A, _MODE_A), (_SCALE_B, _MODE_B)):
        # The addresses of scales are set for each run, but cuBLASLt's heuristics require aligned ones.
        cublaslt._set(description, scale, ctypes.c_void_p(1 << 20))
        if blocks:
            cublaslt._set(description, mode, ctypes.c_uint32(_ROWS_OF_BLOCKS))
    layouts = _layout(dtype_b, k, n), _layout(dtype_a, k, m), _layout(torch.float32, n, m)
    cublaslt._check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    most = ctypes.c_uint64(cublaslt._WORKSPACE_BYTES)
    set_preference = library.cublasLtMatmulPreferenceSetAttribute
    cublaslt._check(set_preference(preference, cublaslt._WORKSPACE, byref(most), ctypes.c_size_t(8)))
    proposals, proposed = (cublaslt._Proposal * 1)(), ctypes.c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        cublaslt._handle(device), description, *layouts, layouts[-1], preference, len(proposals), proposals,
        byref(proposed),
    )  # fmt: skip
    cublaslt._check(library.cublasLtMatmulPreferenceDestroy(preference))
    if status or not proposed.value:
        return None
    return _AddingGemm(description, *layouts, proposals[0].algorithm, proposals[0].workspace)


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """Return the layout of a dense column-major matrix."""
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    cublaslt._check(cublaslt._library().cublasLtMatrixLayoutCreate(byref(layout), _TYPES[dtype], *sizes))
    return layout


@cache
def _trusted(device: torch.device, dtype: torch.dtype, blocks: bool) -> bool:
    """Whether the results for a small case agree with those of plain torch. If not, a warning is logged. dtype: that of
    the first operand."""
    if blocks and not block_scaled_matmuls(device):
        return False
    words = "wgrad GEMMs in fp8 write a tensor that is then added: cuBLASLt's GEMMs"
    return passes(lambda: _trial_error(device, dtype, blocks), torch.float16, words)


def _trial_error(device: torch.device, dtype: torch.dtype, blocks: bool) -> float:
    m, n, k = 64, 96, 256
    generator = torch.Generator(device).manual_seed(0)
    operands, factors = [], []
    for rows, kind in ((m, dtype), (n, torch.float8_e4m3fn)):
        narrow = torch.randn(rows, k, device=device, generator=generator).to(kind)
        scales = torch.rand((k // 128, rows) if blocks else (4,), device=device, generator=generator)
        operands.append(Operand(narrow, scales.t() if blocks else scales[0]))
        factors.append(narrow.float() * (scales.t().repeat_interleave(128, 1) if blocks else scales[0]))
    plain, start = factors[0] @ factors[1].t(), torch.randn(m, n, device=device, generator=generator)
    total, sums = torch.full_like(plain, torch.nan), start.clone()
    a, b = operands
    if not _run(total, a, b, 0.0) or not _run(sums, a, b, 1.0):
        raise cublaslt.CublasError("cuBLASLt proposes no algorithm")
    return error_of([total, sums], [plain, start + plain])
