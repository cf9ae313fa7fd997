"""Causal attention with a sliding window through cuDNN's graph API, if the package nvidia-cudnn-frontend is installed.

This module exists because torch does not pass windows to cuDNN. Plans for the forward and backward pass of a shape are
built once, before its first use. If cuDNN rejects a shape, or computes a wrong result in a small test case, the
caller's kernels are used and a warning is logged. Documents, dropout and offsets of the queries are not supported.
After the first call for a shape, later calls do not synchronise, and they allocate memory only through torch, so they
can be captured in a CUDA graph."""

from __future__ import annotations

import importlib.metadata
import logging
import math
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from mega.core.device import current_stream
from mega.core.ops import observe
from mega.core.ops.autograd import FunctionContext
from mega.core.ops.mask import AttentionMask
from mega.core.ops.partial_attention import PLAIN, Gradients
from mega.core.ops.trial import error_of, first_line, passes

PACKAGE = "nvidia-cudnn-frontend"
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
WIDEST = 128
"""Maximum head width. Widths must be multiples of 8."""
DEVICES = ("cuda", "meta")
MOST = 32
"""Maximum number of shapes for which a process builds plans. Building a plan takes a large fraction of a second, which
does not pay off if lengths change often."""

log = logging.getLogger(__name__)


@cache
def version() -> str | None:
    """Return the version of nvidia-cudnn-frontend, or None if the package is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def fits(q: torch.Tensor, k: torch.Tensor, mask: AttentionMask) -> bool:
    """Whether this module supports an attention call. The call must be causal, read whole rows, and have a window that
    hides keys.

    The result is False if deterministic algorithms are required. According to the package's source, cuDNN on Hopper
    would then store a number for every pair of tokens (17 GB for 16,384 tokens and 32 heads), whereas mega's Triton
    kernels are always deterministic.
    """
    s, t, width = q.shape[1], k.shape[1], q.shape[-1]
    return (
        mask.kind == "causal"
        and mask.features == ("a window",)
        and mask.q_offset == 0
        and s == t
        and mask.band(s, t)[0] is not None
        and q.dtype in DTYPES
        and width % 8 == 0
        and width <= WIDEST
        and not torch.are_deterministic_algorithms_enabled()
    )


def applies(q: torch.Tensor, k: torch.Tensor, mask: AttentionMask) -> bool:
    """Whether to call `attention`, that is, whether the case is supported and the package is installed."""
    return q.device.type in DEVICES and fits(q, k, mask) and version() is not None


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor | None:
    """Compute `ops.attention.plain` without saving attention weights. Returns None if cuDNN does not support the case.
    Call this function only if `applies` returns True."""
    assert mask.window is not None
    if q.is_meta:
        return _Windowed.apply(q, k, v, mask)  # type: ignore[no-any-return]
    if not trusted(q.device, q.dtype):
        return None
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    plans = _planned(q, k, v, mask.window)
    return None if plans is None else _Windowed.apply(q, k, v, plans)  # type: ignore[no-any-return]


# -- plans


class ExecutionPlan(NamedTuple):
    """An executable cuDNN graph with its buffers."""

    graph: Any
    tensors: tuple[object, ...]  # the graph's inputs and outputs, in the order of the buffers of `run`
    workspace: int  # number of bytes

    def run(self, *buffers: torch.Tensor) -> None:
        device = buffers[0].device
        handle = _handle(device)
        import_module("cudnn").set_stream(handle=handle, stream=current_stream(device))
        workspace = torch.empty(max(1, self.workspace), dtype=torch.uint8, device=device)
        self.graph.execute(dict(zip(self.tensors, buffers, strict=True)), workspace, handle=handle)


class WindowPlans(NamedTuple):
    """The execution plans for one shape."""

    forward: ExecutionPlan
    backward: ExecutionPlan
    strides: tuple[tuple[int, ...], ...]  # strides of q, k, v


_PLANS: dict[tuple[object, ...], WindowPlans | None] = {}


def _planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> WindowPlans | None:
    key = (q.device, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(), window)
    if key not in _PLANS and len(_PLANS) < MOST:
        _PLANS[key] = None
        if len(_PLANS) == MOST:
            log.warning("attention with a window: %d shapes are planned by cuDNN, others take our kernels", MOST)
        try:
            _PLANS[key] = plan(q, k, v, window)
        except Exception as error:
            shape = "{} x {:,} tokens, {} heads of {}".format(*q.shape)
            log.warning("a window of %d, %s: takes our kernels; cuDNN's do not (%s)", window, shape, first_line(error))
    return _PLANS.get(key)


@cache
def _handle(device: torch.device) -> object:
    """Return the cuDNN handle of a device. Only one thread uses the handle at a time, because the main thread waits for
    autograd's thread."""
    return import_module("cudnn").create_handle()


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> WindowPlans:
    """Build the plans for the forward and backward pass of one shape. The package may raise exceptions of many
    types."""
    (b, s, heads, width), kv_heads = q.shape, k.shape[2]
    build = _GraphBuilder(q.dtype, q.device, window, 1 / math.sqrt(width))
    whole, few = (b, s, heads, width), (b, s, kv_heads, width)
    dense, lse = _strides(whole), ([b, heads, s, 1], [heads * s, s, 1, 1])
    strides = q.stride(), k.stride(), v.stride()
    forward = build.forward((whole, strides[0]), (few, strides[1]), (few, strides[2]), (whole, dense), lse)
    backward = build.backward((whole, strides[0]), (few, strides[1]), (few, strides[2]), (whole, dense), lse)
    return WindowPlans(forward, backward, strides)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape.

    >>> _strides((2, 3, 4, 8))
    (96, 32, 8, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape [b, s, heads, d] and the strides of a tensor."""


class _GraphBuilder:
    """Builds graphs for one dtype, device, window and scale of the scores."""

    def __init__(self, dtype: torch.dtype, device: torch.device, window: int, scale: float):
        self._cudnn = cudnn = import_module("cudnn")
        self._handle, self._io = _handle(device), getattr(cudnn.data_type, DTYPES[dtype])
        # The window includes the query itself, that is, query i sees key j if i - window < j <= i.
        self._seen = {
            "attn_scale": scale,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_left_bound": window,
            "diagonal_band_right_bound": 0,
        }

    def forward(self, q: Layout, k: Layout, v: Layout, out: Layout, lse: tuple[list[int], list[int]]) -> ExecutionPlan:
        """Build the graph of the forward pass. Its buffers are q, k, v, out, lse."""
        graph = self._graph()
        q_, k_, v_ = (self._input(graph, name, one) for name, one in (("q", q), ("k", k), ("v", v)))
        out_, lse_ = graph.sdpa(name="sdpa", q=q_, k=k_, v=v_, is_inference=False, **self._seen)
        self._output(out_, out)
        lse_.set_output(True).set_dim(lse[0]).set_stride(lse[1]).set_data_type(self._cudnn.data_type.FLOAT)
        return self._finish(graph, q_, k_, v_, out_, lse_)

    def backward(self, q: Layout, k: Layout, v: Layout, out: Layout, lse: tuple[list[int], list[int]]) -> ExecutionPlan:
        """Build the graph of the backward pass. Its buffers are q, k, v, out, d(out), lse, d(q), d(k), d(v). Gradients
        are contiguous."""
        graph = self._graph()
        inputs = ("q", q), ("k", k), ("v", v), ("o", out), ("dO", out)
        q_, k_, v_, out_, grad_ = (self._input(graph, name, one) for name, one in inputs)
        lse_ = graph.tensor(name="stats", dim=lse[0], stride=lse[1], data_type=self._cudnn.data_type.FLOAT)
        grads = graph.sdpa_backward(name="sdpa_backward", q=q_, k=k_, v=v_, o=out_, dO=grad_, stats=lse_, **self._seen)
        for grad, (shape, _) in zip(grads, (q, k, v), strict=True):
            self._output(grad, (shape, _strides(shape)))
        return self._finish(graph, q_, k_, v_, out_, grad_, lse_, *grads)

    def _graph(self) -> Any:
        fp32 = self._cudnn.data_type.FLOAT
        return self._cudnn.pygraph(
            io_data_type=self._io, intermediate_data_type=fp32, compute_data_type=fp32, handle=self._handle
        )

    def _input(self, graph: Any, name: str, layout: Layout) -> object:
        dim, stride = _heads_first(layout)
        return graph.tensor(name=name, dim=dim, stride=stride, data_type=self._io)

    def _output(self, tensor: Any, layout: Layout) -> None:
        dim, stride = _heads_first(layout)
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(self._io)

    def _finish(self, graph: Any, *tensors: object) -> ExecutionPlan:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans(self._cudnn.build_plan_policy.HEURISTICS_CHOICE)
        return ExecutionPlan(graph, tensors, graph.get_workspace_size())


def _heads_first(layout: Layout) -> tuple[list[int], list[int]]:
    """Return shape and strides with heads before tokens, as cuDNN expects.

    >>> _heads_first(((2, 3, 4, 8), (96, 32, 8, 1)))
    ([2, 4, 3, 8], [96, 8, 32, 1])
    """
    return tuple([one[0], one[2], one[1], one[3]] for one in layout)  # type: ignore[return-value]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x if every row of d elements starts at a multiple of 16 bytes, as the kernels require; otherwise return a
    contiguous copy of x."""
    steps = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    if (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(n == 1 or (step > 0 and step % 8 == 0) for n, step in steps)
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


# -- the op


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plans: WindowPlans | AttentionMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [b, s, heads, d] and lse fp32 [b, heads, s, 1]. plans: the plans of the shape, or, on the meta device,
    the mask to report to observers."""
    b, s, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, heads, s, 1, dtype=torch.float32, device=q.device)
    if isinstance(plans, AttentionMask):
        observe.attention("window", q, k, plans)
    else:
        plans.forward.run(q, k, v, out, lse)
    return out, lse


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plans: WindowPlans | AttentionMask,
) -> Gradients:
    """Return d(q), d(k), d(v) in the inputs' dtype."""
    if not isinstance(plans, AttentionMask):
        # Saved tensors may have different strides if they were offloaded since the forward pass.
        q, k, v = (_laid_out(x, stride) for x, stride in zip((q, k, v), plans.strides, strict=True))
        out, lse, grad = _aligned(out.contiguous()), lse.contiguous(), _aligned(grad.contiguous())
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_kv = torch.empty((2, *k.shape), dtype=q.dtype, device=q.device)
    if isinstance(plans, AttentionMask):
        # Allocate as much as cuDNN's workspace, which contains the query's gradient in fp32, and gradients of keys and
        # values for every query head.
        grouped = q.shape[2] > k.shape[2]
        torch.empty(grad_q.numel() * (1 + grouped) + lse.numel(), dtype=torch.float32, device=q.device)
        observe.attention("window", q, k, plans, backward=True)
    else:
        plans.backward.run(q, k, v, out, grad, lse, grad_q, grad_kv[0], grad_kv[1])
    return grad_q, grad_kv[0], grad_kv[1]


def _laid_out(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if x.stride() == stride and x.data_ptr() % 16 == 0:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext[WindowPlans | AttentionMask],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plans: WindowPlans | AttentionMask,
    ) -> torch.Tensor:
        out, lse = forward(q, k, v, plans)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.state = plans
        return out

    @staticmethod
    def backward(
        ctx: FunctionContext[WindowPlans | AttentionMask], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(grad, q, k, v, out, lse, ctx.state), None


# -- the comparison with the plain implementation


@cache
def trusted(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether cuDNN's output and gradients for a small case agree with those of the plain implementation. If not, a
    warning is logged."""
    words = "attention with a window takes our kernels: cuDNN's"
    return passes(lambda: _trial_error(device, dtype), dtype, words)


@torch.no_grad()
def _trial_error(device: torch.device, dtype: torch.dtype) -> float:
    mask, s, width = AttentionMask(window=70), 200, 64

    def some(heads: int, step: float) -> torch.Tensor:
        numbers = torch.arange(s * heads * width, device=device, dtype=torch.float32)
        return (numbers * step).sin().to(dtype).view(1, s, heads, width)

    q, k, v, grad = some(4, 0.7), some(2, 0.9), some(2, 1.1), some(4, 1.3)
    plans = plan(q, k, v, 70)
    out, lse = forward(q, k, v, plans)
    results = out, *backward(grad, q, k, v, out, lse, plans)
    q, k, v, grad = q.float(), k.float(), v.float(), grad.float()
    out, lse = PLAIN.forward(q, k, v, mask)
    exact = out, *PLAIN.backward(grad, q, k, v, out, lse, mask)
    return error_of(results, exact)
