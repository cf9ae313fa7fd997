"""Chooses the implementation of each op for a device and dtype. The result is passed to the layers.

REFERENCE   plain torch, on any device and in any dtype; all other implementations are tested against REFERENCE
on a CPU    torch's fused attention, otherwise the reference
on CUDA     Triton kernels; cuDNN's attention if it supports the shape and the mask (windows only with the package
            nvidia-cudnn-frontend); GEMMs that accumulate into fp32
--fp8       in addition, fp8 GEMMs in the blocks, emulated if the device has none
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from mega.core.device import fp8_matmuls
from mega.core.ops import (
    activation,
    attention,
    cross_entropy,
    cublaslt_fp8,
    cudnn,
    heads,
    norm,
    packages,
    paged_attention,
    partial_attention,
    rows,
    total,
)
from mega.core.ops.few_experts import FewExperts
from mega.core.ops.few_rows import FewRows
from mega.core.ops.fp8 import Fp8Matmuls
from mega.core.ops.fp8_blocks import BlockMatmuls
from mega.core.ops.fp8_weights import Fp8Weights
from mega.core.ops.mask import AttentionMask
from mega.core.ops.matmuls import Matmuls, WideMatmuls


@dataclass(frozen=True)
class Ops:
    """One implementation of each op. Default values are the references, which define signatures and shapes."""

    name: str = "reference"
    """Name of this suite of ops, shown by `mega doctor`."""
    reason: str = "plain torch"
    """Reason why this suite was chosen."""
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = norm.add_norm
    added: Callable[..., torch.Tensor] = norm.added
    activate: Callable[..., torch.Tensor] = activation.activate
    bias_gradient: activation.BiasGradient = activation.bias_gradient
    activate_weighted: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor] = activation.activate_weighted
    sum_rows: Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor] = rows.sum_rows
    add_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = rows.add_rows
    split_heads: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = heads.split_heads
    attention: attention.Attention = attention.plain
    paged_attention: paged_attention.PagedAttention = paged_attention.PLAIN
    partial_attention: partial_attention.PartialAttention = partial_attention.PLAIN
    softmax_parts: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = cross_entropy.softmax_parts
    softmax_gradient: Callable[..., torch.Tensor] = cross_entropy.softmax_gradient
    nll_and_gradient: Callable[..., tuple[torch.Tensor, torch.Tensor]] = cross_entropy.nll_and_gradient
    accumulate: Callable[[torch.Tensor, torch.Tensor], None] = total.accumulate
    total: Callable[[torch.Tensor], torch.Tensor] = total.total
    matmuls: Matmuls = Matmuls()  # noqa: RUF009 - holds nothing
    adamw: Callable[..., None] | None = None
    """Kernel for the whole update of AdamW; None if the optimizer uses torch ops."""
    row_shards: int = 1
    """Number of context ranks over which rows are sharded. If it is greater than 1, `attention` takes this rank's
    columns of q, k and v, and the mask of whole rows."""
    few_rows: FewRows | None = None
    """Kernels for decoding steps of few tokens on CUDA, or None."""
    few_experts: FewExperts | None = None
    """Kernels for mixture-of-experts layers in decoding steps of few tokens on CUDA, or None."""
    spread: bool = False
    """Whether to use faster variants for decoding on a CPU. cos and sin are then prepared by `rotary.spread`, the last
    GEMM of a branch adds its result to the residual stream, and norms are computed by `norm.rms_norm_by`."""

    @property
    def plain(self) -> bool:
        """Whether these ops are the reference implementations."""
        return self.name == "reference"

    def implementations(self) -> Iterator[tuple[str, str]]:
        """Yield each op and the module and name of its implementation, for `mega doctor`.

        >>> dict(REFERENCE.implementations())["add_norm"]
        'norm.add_norm'
        """
        for name, value in vars(self).items():
            function = type(value) if isinstance(value, Matmuls) else getattr(value, "func", value)
            if callable(function):
                yield name, f"{function.__module__.removeprefix('mega.core.ops.')}.{function.__name__}"


REFERENCE = Ops()

CPU = "no CUDA device"


def choose(
    device: torch.device,
    dtype: torch.dtype,
    *,
    reference: bool = False,
    fp8: Literal["tensor", "block"] | None = None,
    recompute: bool = False,
    package: str | None = None,
    shapes: bool = False,
) -> Ops:
    """Choose the fastest implementations for a device and a compute dtype. The field `reason` of the result says why
    they were chosen.

    fp8: whether the blocks' GEMMs in fp8 have one scale per tensor or per block of elements; None for GEMMs in `dtype`.
    recompute: whether attention recomputes its weights in the backward pass instead of saving them, and norms and
    activations are recomputed. package: a name that `packages.package` accepts; ops of this package replace the default
    ops. shapes: whether to choose for meta tensors that represent tensors on `device`, in which case the device need
    not exist.
    """
    ops = _base_ops(device, dtype, reference, shapes)
    if recompute:
        ops = replace(ops, attention=attention.recomputing(ops.attention))
    # Kernels of packages do not support meta tensors.
    if package is not None and not shapes:
        ops = replace(ops, reason=f"{ops.reason}; --ops {package}", **packages.package(package, ops.attention))
    if fp8 is None:
        return ops
    kind, kernels, on_device = _FP8[fp8]
    fast = kernels() if ops.name == "triton" and (shapes or on_device(device)) else {}
    if fast and fp8 == "tensor" and package is None:  # the casts then need not compute largest magnitudes
        ops = replace(ops, add_norm=partial(ops.add_norm, measures=True), activate=partial(ops.activate, measures=True))
    return replace(ops, matmuls=kind(ops.matmuls, saves_narrow=not recompute, **fast))


def attention_words(ops: Ops, mask: AttentionMask, dtype: torch.dtype, length: int, width: int) -> str:
    """Describe the implementation of attention for rows of `length` tokens and heads of `width`, and say why it is
    used.

    >>> attention_words(REFERENCE, AttentionMask(), torch.bfloat16, 8, 4)
    'plain torch'
    """
    x = torch.empty(1, length, 1, width, dtype=dtype, device="meta")
    simple, implementation = mask.simple_kind(length, length) is not None, ops.attention
    if isinstance(implementation, partial):  # a package's op, which calls mega's op for other masks
        if simple and dtype.itemsize == 2:
            return "flash-attn, as asked for"
        implementation = implementation.keywords["other"]
    if implementation in (attention.plain, attention.plain_recomputing):
        return "plain torch"
    if ops.name == "triton":
        from mega.core.ops.kernels import hopper
        from mega.core.ops.kernels.attention import applies

        if cudnn.applies(x, x, mask):
            return f"cuDNN's kernels, for a window ({cudnn.PACKAGE} {cudnn.version()})"
        if applies(x, x, mask):
            return f"our kernels, for {' and '.join(mask.features)}"
        if simple and dtype.itemsize == 2 and hopper.is_short(mask, length, width):
            return "our kernels on Hopper GPUs, else cuDNN's"
    if mask.dropout is not None:
        return "plain torch, for dropout"
    return "torch's fused kernels" + (", cuDNN's first" if ops.name == "triton" and dtype.itemsize == 2 else "")


def attention_advice(ops: Ops, mask: AttentionMask, dtype: torch.dtype, length: int, width: int) -> str | None:
    """Return advice on how to make attention faster for rows of `length` tokens, or None.

    >>> attention_advice(REFERENCE, AttentionMask(window=4), torch.bfloat16, 8, 8)
    """
    x = torch.empty(1, length, 1, width, dtype=dtype, device="meta")
    if ops.name != "triton" or not cudnn.fits(x, x, mask) or cudnn.version() is not None:
        return None
    return "attention with a window is 1.5 times as fast by cuDNN: pip install '.[cudnn]' in a clone"


def forward_only(ops: Ops, *, fp8_weights: bool = False) -> Ops:
    """Return a variant of `ops` that runs fewer operations, for inference.

    On a CPU, the overhead of an operation exceeds its computation. On CUDA, steps of few tokens are limited by memory
    bandwidth. fp8_weights: whether the weights of the linear layers in blocks are stored in fp8.
    """
    if ops.name == "triton":
        ops = replace(ops, few_rows=_few_rows_kernels(), few_experts=_few_experts_kernels())
    if fp8_weights:
        fast = {"multiply": _fp8_weights_kernel()} if ops.name == "triton" else {}
        return replace(ops, matmuls=Fp8Weights(ops.matmuls, **fast))
    if ops.name != "torch" or ops.reason != CPU:
        return ops
    return replace(ops, spread=True)


def _base_ops(device: torch.device, dtype: torch.dtype, reference: bool, shapes: bool) -> Ops:
    if reference:
        return replace(REFERENCE, reason="asked for by --ops reference")
    plain = replace(REFERENCE, name="torch", attention=attention.fused)
    if device.type != "cuda":
        return replace(plain, reason=CPU)
    plain = replace(plain, partial_attention=partial_attention.FUSED)
    if dtype == torch.float64:
        return replace(plain, reason="the kernels compute in fp32, this run in fp64")
    if not shapes and importlib.util.find_spec("triton") is None:
        return replace(plain, reason="triton is absent", matmuls=WideMatmuls())
    return replace(plain, name="triton", reason="CUDA device", matmuls=WideMatmuls(), **_kernels())


def _kernels() -> dict[str, Any]:
    from mega.core.ops import kernels

    return kernels.table()


def _few_rows_kernels() -> FewRows:
    from mega.core.ops.kernels import few_rows

    return few_rows.FEW_ROWS


def _few_experts_kernels() -> FewExperts:
    from mega.core.ops.kernels import few_experts

    return few_experts.FEW_EXPERTS


def _fp8_weights_kernel() -> Callable[..., torch.Tensor]:
    from mega.core.ops.kernels import fp8_weights

    return fp8_weights.multiply


_Kernels = Mapping[str, object]
"""Name of a field of `Matmuls` -> the field's fast implementation."""


def _fp8_kernels() -> _Kernels:
    from mega.core.ops.kernels import fp8, fused_casts

    return {
        "cast": fp8.cast,
        "multiply": fp8.multiply,
        "accumulate": cublaslt_fp8.accumulate,
        "fused": fused_casts.TENSOR,
    }


def _fp8_block_kernels() -> _Kernels:
    from mega.core.ops.kernels import fp8_blocks, fused_casts

    return {
        "cast_rows": fp8_blocks.cast_rows,
        "cast_blocks": fp8_blocks.cast_blocks,
        "multiply": fp8_blocks.multiply,
        "accumulate": cublaslt_fp8.accumulate,
        "fused": fused_casts.BLOCKS,
    }


_FP8: dict[str, tuple[Callable[..., Matmuls], Callable[[], _Kernels], Callable[[torch.device], bool]]] = {
    "tensor": (Fp8Matmuls, _fp8_kernels, fp8_matmuls),
    "block": (BlockMatmuls, _fp8_block_kernels, fp8_matmuls),
}
"""Granularity of scales -> (the GEMMs, their kernels, whether a device supports the kernels)."""
