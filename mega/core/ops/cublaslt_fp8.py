"""fp8 GEMMs that write their result to an fp32 tensor or add it to the tensor, through cuBLASLt.

torch offers fp8 GEMMs that write, but not fp8 GEMMs that add. A separate addition reads the result again. Both GEMMs
use the algorithm that cuBLASLt's heuristics choose for the shape, which is the algorithm that torch uses, so the sums
are bitwise equal to those of a separate addition (seen on an H100 for the weights of Llama-2 7B, with scales of tensors
and of blocks). If cuBLASLt rejects a shape, or computes a wrong result in a small test, the caller adds the result.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from mega.core.device import block_scaled_matmuls
from mega.core.ops import cublaslt, observe
from mega.core.ops.operand import Operand
from mega.core.ops.trial import error_of, passes

ALIGNED = 256
"""The tensor must start at a multiple of this number of bytes, which cuBLASLt's heuristics assume."""
MOST = 256
"""Number of shapes whose plans are kept."""


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
    gemm.run(a.narrow, b.narrow, total, {cublaslt.SCALE_RIGHT: b.inverse, cublaslt.SCALE_LEFT: a.inverse}, beta)
    return True


@lru_cache(MOST)
def _gemm_of(
    device: torch.device, dtype_a: torch.dtype, dtype_b: torch.dtype, m: int, k: int, n: int, blocks: bool
) -> cublaslt.PlannedGemm | None:
    """Return the GEMM of a shape, or None if cuBLASLt proposes no algorithm. Errors: CublasError."""
    attributes = {cublaslt.TRANSPOSED: 1}
    for scale, mode in ((cublaslt.SCALE_RIGHT, cublaslt.MODE_RIGHT), (cublaslt.SCALE_LEFT, cublaslt.MODE_LEFT)):
        attributes[scale] = cublaslt.ADDRESS
        if blocks:
            attributes[mode] = cublaslt.ROWS_OF_BLOCKS
    return cublaslt.plan(device, attributes, (dtype_a, m, k), (dtype_b, n, k), (torch.float32, m, n), most=1)


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
