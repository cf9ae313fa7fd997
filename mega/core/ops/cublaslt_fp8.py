"""fp8 GEMMs through cuBLASLt that torch does not offer:

    wgrad          the result is written to an fp32 tensor or added to it; a separate addition reads the result again
    large forward  the algorithm has a tile that needs less power

wgrad uses the algorithm that cuBLASLt's heuristics choose for the shape, which is the algorithm that torch uses, so the
sums are bitwise equal to those of a separate addition (seen on an H100 for the weights of Llama-2 7B, with scales of
tensors and of blocks). The algorithms for forward GEMMs compute the same bits as torch's (seen for 8 algorithms of
each of the same weights). If cuBLASLt rejects a shape, or computes a wrong result in a small test, the caller uses
torch.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from mega.core.device import block_scaled_matmuls
from mega.core.ops import cublaslt, observe
from mega.core.ops.operand import Operand
from mega.core.ops.trial import error_of, passes

ALIGNED = 256
"""Tensors must start at a multiple of this number of bytes, which cuBLASLt's heuristics assume."""
MOST = 256
"""Number of shapes whose plans are kept."""
LARGE = 1 << 36
"""Minimum number of products that a large forward GEMM adds. Sustained, it is limited by the power of the GPU."""
TILES = {29, 201}
"""Tiles of large forward GEMMs: CUBLASLT_MATMUL_TILE_128x160 and 176x128. For the weights of Llama-2 7B and 32,768
tokens, sustained GEMMs took 0.89 to 0.95 of the time of the first algorithm, whose tile is 192x192, on an H100."""


def accumulate(total: torch.Tensor, a: Operand, b: Operand, *, overwrite: bool) -> bool:
    """Add a b^T to `total` [m, n], or write a b^T to `total`. Return False, without changing `total`, if cuBLASLt does
    not support the GEMM.

    a [m, k], b [n, k]: operands with one scale per tensor, or in rows of 1 x 128. The device requires m, n and k to be
    multiples of 16.
    """
    blocks = a.inverse.dim() > 0
    if total.is_meta:
        observe.gemm(a.narrow, b.narrow.t(), total, blocks=blocks)
        if not overwrite:
            observe.kernel("read of a main_grad", (total,))
        return True
    applies = total.dtype == torch.float32 and _applies(total, a.narrow, b.narrow)
    if not applies or not _trusted(total.device, a.narrow.dtype, blocks):
        return False
    return _run(total, a, b, 0.0 if overwrite else 1.0)


def multiply(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a b^T [m, n] in a 16-bit `dtype`, with the less exact sums of `ops.fp8.multiply`, or None if torch's GEMM
    is as fast, or cuBLASLt does not support the GEMM. a [m, k], b [n, k]: operands in e4m3 with one scale per tensor.
    """
    (m, k), n = a.narrow.shape, len(b.narrow)
    if m * n * k < LARGE or not _applies(a.narrow, b.narrow) or not _trusted(a.narrow.device, a.narrow.dtype, False):
        return None
    out = torch.empty(m, n, dtype=dtype, device=a.narrow.device)
    return out if _run(out, a, b, fast=True) else None


def _applies(*tensors: torch.Tensor) -> bool:
    return all(x.is_contiguous() and x.data_ptr() % ALIGNED == 0 for x in tensors)


def _run(out: torch.Tensor, a: Operand, b: Operand, beta: float = 0.0, *, fast: bool = False) -> bool:
    blocks = a.inverse.dim() > 0
    matrices = (a.narrow.dtype, *a.narrow.shape), (b.narrow.dtype, *b.narrow.shape), (out.dtype, *out.shape)
    gemm = _gemm_of(out.device, *matrices, blocks, fast)
    if gemm is None:
        return False
    gemm.run(a.narrow, b.narrow, out, {cublaslt.SCALE_RIGHT: b.inverse, cublaslt.SCALE_LEFT: a.inverse}, beta)
    return True


@lru_cache(MOST)
def _gemm_of(
    device: torch.device,
    a: cublaslt.Matrix,
    b: cublaslt.Matrix,
    out: cublaslt.Matrix,
    blocks: bool,
    fast: bool,
) -> cublaslt.PlannedGemm | None:
    """Return the GEMM of a shape, or None if cuBLASLt proposes no algorithm. Errors: CublasError."""
    attributes = {cublaslt.TRANSPOSED: 1}
    for scale, mode in ((cublaslt.SCALE_RIGHT, cublaslt.MODE_RIGHT), (cublaslt.SCALE_LEFT, cublaslt.MODE_LEFT)):
        attributes[scale] = cublaslt.ADDRESS
        if blocks:
            attributes[mode] = cublaslt.ROWS_OF_BLOCKS
    if fast:
        return cublaslt.plan(device, attributes | {cublaslt.FAST: 1}, a, b, out, most=8, tiles=TILES)
    return cublaslt.plan(device, attributes, a, b, out, most=1)


@cache
def _trusted(device: torch.device, dtype: torch.dtype, blocks: bool) -> bool:
    """Whether the results for a small case agree with those of plain torch. If not, a warning is logged. dtype: that of
    the first operand."""
    if blocks and not block_scaled_matmuls(device):
        return False
    words = "GEMMs in fp8 are torch's, and wgrad is added separately: cuBLASLt's GEMMs"
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
    forward = total.bfloat16()
    a, b = operands
    ran = [_run(total, a, b), _run(sums, a, b, 1.0)]
    pairs = [(total, plain), (sums, start + plain)]
    if dtype == torch.float8_e4m3fn and not blocks:
        ran.append(_run(forward, a, b, fast=True))
        pairs.append((forward, plain))
    if not all(ran):
        raise cublaslt.CublasError("cuBLASLt proposes no algorithm")
    return error_of(*zip(*pairs, strict=True))
