"""Records the operations that a stage runs on the meta device, as shapes for cost.py.

torch ops are reported by trace.py's dispatch mode; Triton kernels, attention and exchanges are reported through
ops/observe.py. The bytes of an op are the bytes of the tensors that the op reads and writes, each tensor counted once.
If an op reads only some rows of a table, only these rows are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from mega.core.estimate.cost import (
    AttentionWork,
    CollectiveBegin,
    ElementwiseWork,
    Gemm,
    Operation,
    Received,
    Send,
    Wait,
)
from mega.core.ops.mask import AttentionMask

GEMMS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "_scaled_mm_v2": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
"""Matmul ops of torch -> index of the first factor among the arguments."""

ALLOCATIONS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "alias", "lift_fresh", "resize_", "set_", "_unsafe_view", "_reshape_alias"),
}
"""Ops that launch no kernel."""

LOOK_UPS = {"embedding": 2.0, "index": 2.0, "index_select": 2.0, "gather": 2.0, "nll_loss_forward": 1.0}
"""Op that reads some rows of a table -> its memory traffic, as a multiple of the result's size."""

ADDED_ROWS = {
    **{"index_add_": 3.0, "index_put_": 3.0, "embedding_dense_backward": 3.0, "scatter": 3.0, "scatter_": 3.0},
    "_add_rows": 5.0,
}
"""Op or kernel that writes rows of a table -> its memory traffic, as a multiple of the size of these rows, which are
the largest argument other than the table. The kernel adds 16-bit rows to an fp32 table."""

WITHOUT_TABLE = {"embedding_dense_backward", "scatter"}
"""Ops of `ADDED_ROWS` whose first argument is not the table that they write, but the rows."""

WRITTEN = {"copy_", "fill_", "zero_"}
"""In-place ops that do not read their output."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}

CUDNN = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")


class OperationLog:
    """A log of operations in the order of execution. packed: fraction of the (query, key) pairs of a row that remain
    visible if attention is limited to the documents packed into the row."""

    def __init__(self, *, packed: float = 1.0) -> None:
        self.operations: list[Operation] = []
        self._packed, self._count = packed, 0

    def take(self) -> tuple[Operation, ...]:
        """Return the operations recorded since the previous call of `take`, and clear the log."""
        operations, self.operations = tuple(self.operations), []
        return operations

    # -- ops of torch

    def op(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object], out: Any) -> None:
        """Record an executed op whose result is not a view."""
        name = func.overloadpacket.__name__
        if name in ALLOCATIONS:
            return
        if name in GEMMS:
            first = GEMMS[name]
            self.operations.append(_gemm(args[first], args[first + 1], out, blocks=name == "_scaled_mm_v2"))
        elif name in CUDNN:
            self._cudnn(args, backward=name == CUDNN[1])
        else:
            self.operations.append(ElementwiseWork(name, _moved(name, args, out)))

    def _cudnn(self, args: Sequence[Any], *, backward: bool) -> None:
        """Record cuDNN's attention. Among `args` are q [b, heads, s, d] and k [b, kv_heads, t, d]."""
        q, k = args[1:3] if backward else args[:2]
        causal = args[-1] if backward else args[6] if len(args) > 6 else False
        (b, heads, s, d), t = q.shape, k.shape[2]
        kernel, share = ("cudnn causal", 0.5) if causal else ("cudnn full", 1.0)
        self.operations.append(AttentionWork(kernel, backward, b * heads, s, t, d, share))

    # -- kernels, attention and exchanges

    def kernel(self, name: str, arguments: Sequence[object]) -> None:
        moved = _moved(name, arguments, None) if name in ADDED_ROWS else sum(map(_bytes, arguments))
        self.operations.append(ElementwiseWork(name, moved))

    def gemm(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, blocks: bool) -> None:
        self.operations.append(_gemm(a, b, out, blocks=blocks))

    def attention(self, kernel: str, q: torch.Tensor, k: torch.Tensor, mask: AttentionMask, *, backward: bool) -> None:
        (b, s, heads, d), t = q.shape, k.shape[1]
        share, curve = _visible(s, t, *mask.band(s, t)), "cudnn causal"
        assert kernel in ("ours", "window"), f"{kernel}: no curve says what this attention takes"
        if kernel == "ours":
            full = mask.kind == "full"
            share *= 1.0 if full or mask.q_documents is None else self._packed
            curve = f"ours {mask.kind}" + (" dropout" if mask.dropout is not None else "")
        self.operations.append(AttentionWork(curve, backward, b * heads, s, t, d, share))

    def exchange(self, kind: str, size: int, ranks: Sequence[int]) -> Callable[[], None]:
        self._count += 1
        number = self._count
        self.operations.append(CollectiveBegin(number, kind, size, len(ranks), ranks[1] - ranks[0]))
        return lambda: self.operations.append(Wait(number))

    def send(self, exchange: int, size: int, blocks: int) -> None:
        self.operations.append(Send(exchange, size, blocks))

    def receive(self, exchange: int, blocks: int) -> None:
        self.operations.append(Received(exchange, blocks))


def _gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, blocks: bool) -> Gemm:
    """Describe the product [.., m, k] x [.., k, n]. The strides show which factor is transposed, and so determine the
    layout. In fp8, every second factor is transposed, and only gradients with one scale per tensor are in e5m2."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    layout = "wgrad" if _is_transposed(a) else "forward" if _is_transposed(b) else "dgrad"
    fp8 = a.element_size() == 1
    if fp8 and out.dtype == torch.float32:
        layout = "wgrad"
    elif a.dtype == torch.float8_e5m2:
        layout = "dgrad"
    dtype = ("fp8 blocks" if blocks else "fp8") if fp8 else DTYPES[a.dtype]
    bytes_moved = a.nbytes + b.nbytes + out.nbytes
    return Gemm(*(_measured_as(m, k, n, layout)), layout, dtype, bytes_moved, a.shape[0] if a.ndim == 3 else 1)


def _measured_as(m: int, k: int, n: int, layout: str) -> tuple[int, int, int]:
    """Return (tokens, in, out) of the linear layer [tokens, in] -> [tokens, out] to which a product [m, k] x [k, n]
    belongs."""
    return (m, k, n) if layout == "forward" else (m, n, k) if layout == "dgrad" else (k, n, m)


def _is_transposed(x: torch.Tensor) -> bool:
    return x.stride(-1) != 1 and x.stride(-2) == 1


def _bytes(x: object) -> int:
    """Bytes of memory that a tensor occupies; an expanded tensor occupies less than its shape suggests."""
    if not isinstance(x, torch.Tensor):
        return 0
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _moved(name: str, args: Sequence[object], out: object) -> int:
    outs = sum(map(_bytes, out if isinstance(out, tuple | list) else (out,)))
    if name in LOOK_UPS:
        return int(LOOK_UPS[name] * outs)
    tensors = [_bytes(x) for value in args for x in (value if isinstance(value, list | tuple) else (value,))]
    if name in ADDED_ROWS:
        return int(ADDED_ROWS[name] * max(tensors[:1] if name in WITHOUT_TABLE else tensors[1:], default=0))
    if name in WRITTEN:
        return sum(tensors)
    return sum(tensors) + outs


@lru_cache(maxsize=256)
def _visible(s: int, t: int, low: int | None, high: int | None) -> float:
    """Return the fraction of the s x t (query, key) pairs that lie in a band (ops.mask.AttentionMask.band).

    >>> _visible(4, 4, None, 0), _visible(4, 4, None, None), round(_visible(8, 8, -1, 0), 3)
    (0.625, 1.0, 0.234)
    """
    low, high = -s if low is None else low, t if high is None else high
    return sum(max(0, min(t, i + high + 1) - max(0, i + low)) for i in range(s)) / (s * t)
