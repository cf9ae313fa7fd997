"""GEMMs with GELU in their epilogue, through cuBLASLt:

    forward GEMM of the layer before GELU   stores its result, with the bias, and GELU of the unrounded result
    dgrad GEMM of the layer after GELU      multiplies its result by the slope of GELU

Without these epilogues, GELU and its slope are separate passes over the widest activations of a layer. If cuBLASLt
rejects a shape or computes a wrong result in a small test, the caller makes a separate pass.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch.nn import functional as F

from mega.core.ops import cublaslt
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
"""Number of shapes whose plans are kept."""
DTYPES = torch.float16, torch.bfloat16


def applies(kind: str, dtype: torch.dtype, width: int, wide: int) -> bool:
    """Whether the GEMMs support an activation of `wide` features between linear layers of `width` features."""
    return kind == KIND and dtype in DTYPES and width <= WIDEST and width % ALIGNED == 0 and wide % ALIGNED == 0


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return x weight^T + bias and GELU of this sum, both [n, wide], or None if cuBLASLt does not support the shape.

    x: [n, width]. weight: [wide, width]. bias: [wide]. All tensors have the same dtype. Call this function only if
    `applies` returns True.
    """
    before, active = (x.new_empty(len(x), len(weight)) for _ in range(2))
    computed = _compute(cublaslt.GELU, _aligned(x), _aligned(weight), before, active, _aligned(bias))
    return (before, active) if computed else None


def slope_dgrad(grad: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
    """Compute (grad weight) * slope(before), [n, wide], or return None if cuBLASLt does not support the shape.

    grad: [n, width]. weight: [width, wide]. before: [n, wide], the input of GELU. All tensors have the same dtype. Call
    this function only if `applies` returns True.
    """
    before = _aligned(before)
    out = torch.empty_like(before)
    return out if _compute(cublaslt.SLOPE, _aligned(grad), _aligned(weight), before, out) else None


def _compute(
    epilogue: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    before: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> bool:
    """Write the results to `out` and, with GELU, to `before`. Return False if cuBLASLt proposes no algorithm."""
    addresses = {} if bias is None else {cublaslt.BIAS: bias}
    for rows in _parts(epilogue, x, out.shape[1]):
        gemm = _gemm_of(x.device, x.dtype, epilogue, rows.stop - rows.start, x.shape[1], out.shape[1])
        if gemm is None:
            return False
        gemm.run(x[rows], weight, out[rows], {cublaslt.AUX: before[rows], **addresses})
    return True


def _parts(epilogue: int, x: torch.Tensor, wide: int) -> tuple[slice, ...]:
    """Return the ranges of rows to compute separately: all rows, or two halves if cuBLASLt's heuristics know only one
    algorithm for all rows.

    For the dgrad of 32,768 rows, 1,024 summands and 4,096 columns, that algorithm is one for older devices (cuBLASLt
    13.1 on an H100), and two halves take 0.45 instead of 0.73 ms.
    """
    n = len(x)
    gemm = _gemm_of(x.device, x.dtype, epilogue, n, x.shape[1], wide)
    halves = gemm is not None and gemm.proposed == 1 and n % 2 == 0
    return (slice(0, n // 2), slice(n // 2, n)) if halves else (slice(0, n),)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


@lru_cache(MOST)
def _gemm_of(
    device: torch.device, dtype: torch.dtype, epilogue: int, rows: int, width: int, wide: int
) -> cublaslt.PlannedGemm | None:
    """Return the GEMM of a shape, or None if cuBLASLt proposes no algorithm. Errors: CublasError."""
    attributes = {cublaslt.EPILOGUE: epilogue, cublaslt.AUX_STRIDE: wide, cublaslt.AUX: cublaslt.ADDRESS}
    weight = dtype, width, wide
    if epilogue == cublaslt.GELU:
        attributes |= {cublaslt.BIAS: cublaslt.ADDRESS, cublaslt.TRANSPOSED: 1}
        weight = dtype, wide, width
    return cublaslt.plan(device, attributes, (dtype, rows, width), weight, (dtype, rows, wide), most=8)


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
    outputs = forward(x, weight, bias)
    grad_before = None if outputs is None else slope_dgrad(grad, next_weight, outputs[0])
    if outputs is None or grad_before is None:
        raise cublaslt.CublasError("cuBLASLt proposes no algorithm")
    before = F.linear(x.float(), weight.float(), bias.float())
    leaf = outputs[0].float().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, grad.float() @ next_weight.float())
    return error_of([*outputs, grad_before], [before, F.gelu(before, approximate="tanh"), slope])
