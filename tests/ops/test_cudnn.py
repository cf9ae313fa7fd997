"""The seam to nvidia-cudnn-frontend, with a stand-in for it: what is handed over, what comes back, and what is refused.

The stand-in has the package's signatures, sees its buffers only by the dims and strides that it was told, and computes
in the plain form. That cuDNN does so too is shown on a GPU (tests/gpu/test_cudnn.py).
"""

from __future__ import annotations

import logging
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mega.core.ops import cudnn
from mega.core.ops.attention import plain
from mega.core.ops.kernels.attention import attention
from mega.core.ops.mask import CAUSAL, AttentionMask
from mega.core.ops.partial_attention import PLAIN
from mega.core.ops.recompute import recompute
from tests.support.ranks import random

calls: list[str] = []
WINDOW = AttentionMask(window=5)


class NotSupported(Exception):
    pass


class Tensor:
    """What a graph is told of a tensor."""

    def __init__(self, dim: Any = None, stride: Any = None) -> None:
        self.dim, self.stride = dim, stride

    def set_output(self, real: bool) -> Tensor:
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: object) -> Tensor:
        return self

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """[b, s, heads, d]"""
        return buffer.as_strided(self.dim, self.stride).transpose(1, 2)


class Graph:
    refused: tuple[int, ...] = ()
    """Head widths."""
    wrong = 0.0

    def __init__(self, **types: Any) -> None:
        self.work: Any = None

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: object) -> Tensor:
        return Tensor(dim, stride)

    def sdpa(
        self, *, name: str, q: Tensor, k: Tensor, v: Tensor, is_inference: bool, **seen: Any
    ) -> tuple[Tensor, ...]:
        self.width, out, stats = q.dim[-1], Tensor(), Tensor()

        def work(at: dict[Tensor, torch.Tensor]) -> None:
            mixed, lse = PLAIN.forward(*(one.of(at[one]) for one in (q, k, v)), self.mask(q, **seen))
            out.of(at[out]).copy_(mixed + self.wrong)
            at[stats].as_strided(stats.dim, stats.stride).copy_(lse[..., None])
            calls.append("forward")

        self.work = work
        return out, stats

    def sdpa_backward(
        self, *, name: str, q: Tensor, k: Tensor, v: Tensor, o: Tensor, dO: Tensor, stats: Tensor, **seen: Any
    ) -> tuple[Tensor, ...]:
        grads = Tensor(), Tensor(), Tensor()
        self.width = q.dim[-1]

        def work(at: dict[Tensor, torch.Tensor]) -> None:
            inputs = (one.of(at[one]) for one in (dO, q, k, v, o))
            lse = at[stats].as_strided(stats.dim, stats.stride)[..., 0]
            for one, found in zip(grads, PLAIN.backward(*inputs, lse, self.mask(q, **seen)), strict=True):
                one.of(at[one]).copy_(found)
            calls.append("backward")

        self.work = work
        return grads

    def mask(self, q: Tensor, **seen: Any) -> AttentionMask:
        assert seen["attn_scale"] == 1 / math.sqrt(q.dim[-1]) and seen["diagonal_alignment"] == "top left"
        assert seen["diagonal_band_right_bound"] == 0
        return AttentionMask(window=seen["diagonal_band_left_bound"])

    def validate(self) -> None: ...

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: list[object]) -> None: ...

    def check_support(self) -> None:
        if self.width in self.refused:
            raise NotSupported("no engine for this\nmore of it")

    def build_plans(self, policy: object) -> None: ...

    def get_workspace_size(self) -> int:
        return 7

    def execute(self, at: dict[Tensor, torch.Tensor], workspace: torch.Tensor, *, handle: object) -> None:
        assert workspace.numel() == 7 and handle == "handle"
        self.work(at)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = types.ModuleType("cudnn")
    module.data_type = types.SimpleNamespace(BFLOAT16=1, HALF=2, FLOAT=3)
    module.diagonal_alignment = types.SimpleNamespace(TOP_LEFT="top left")
    module.heur_mode, module.build_plan_policy = types.SimpleNamespace(A=1, FALLBACK=2), types.SimpleNamespace()
    module.build_plan_policy.HEURISTICS_CHOICE = 1
    module.create_handle, module.pygraph = lambda: "handle", Graph
    module.set_stream = lambda *, handle, stream: None
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(cudnn, "version", lambda: "1.18.0")
    monkeypatch.setattr(cudnn, "DEVICES", ("cpu", "meta"))
    monkeypatch.setattr(cudnn, "_PLANS", {})
    monkeypatch.setattr(Graph, "refused", ())
    monkeypatch.setattr(Graph, "wrong", 0.0)
    for kept in (cudnn._handle, cudnn.trusted):
        kept.cache_clear()
    calls.clear()
    yield
    for kept in (cudnn._handle, cudnn.trusted):
        kept.cache_clear()


def inputs(b: int, s: int, heads: int, kv_heads: int, width: int, *, step: int = 1) -> list[torch.Tensor]:
    """q, k, v, each a part of something larger, and d(out)."""
    sizes = (heads, kv_heads, kv_heads, heads)
    parts = [random(b, s, step * n, width, seed=seed).bfloat16()[:, :, :n] for seed, n in enumerate(sizes)]
    return [*(one.detach().requires_grad_() for one in parts[:3]), parts[3]]


def results(run: Any, parts: list[torch.Tensor], mask: AttentionMask) -> tuple[torch.Tensor, ...]:
    q, k, v, grad = parts
    mixed = run(q, k, v, mask)
    return mixed, *torch.autograd.grad(mixed, (q, k, v), grad)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("step", [1, 3])
def test_a_window_is_cudnns(heads: int, kv_heads: int, step: int) -> None:
    parts = inputs(2, 13, heads, kv_heads, 16, step=step)
    for found, exact in zip(results(attention, parts, WINDOW), results(plain, parts, WINDOW), strict=True):
        assert found.shape == exact.shape
        torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)
    assert calls[2:] == ["forward", "backward"]  # those before are of the trial


def test_what_is_not_for_it() -> None:
    q, k, *_ = (x.detach() for x in inputs(1, 13, 2, 2, 16))
    assert cudnn.applies(q, k, WINDOW) and cudnn.applies(q.half(), k.half(), WINDOW)
    numbers = torch.zeros(1, 13, dtype=torch.int64)
    for mask in (
        CAUSAL,
        AttentionMask(window=13),
        AttentionMask("full", window=5),
        AttentionMask(window=5, q_offset=1),
        AttentionMask(window=5, q_documents=numbers, k_documents=numbers),
    ):
        assert not cudnn.applies(q, k, mask)
    assert not cudnn.applies(q[:, :9], k, WINDOW) and not cudnn.applies(q.float(), k.float(), WINDOW)
    assert not cudnn.applies(q[..., :12], k[..., :12], WINDOW)
    torch.use_deterministic_algorithms(True)
    try:
        assert not cudnn.applies(q, k, WINDOW)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_it_cannot_read_is_copied() -> None:
    """Rows that begin anywhere, and what autograd makes of a sum: one number, seen everywhere."""
    whole = random(1, 13, 2, 17, seed=0).bfloat16()
    q = whole[..., 1:].requires_grad_()
    found, exact = (torch.autograd.grad(run(q, q, q, WINDOW).sum(), q)[0] for run in (attention, plain))
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)
    assert calls[2:] == ["forward", "backward"]


def test_layouts_may_change_while_something_else_keeps_the_inputs() -> None:
    parts = inputs(1, 13, 4, 4, 16, step=2)
    exact = results(attention, parts, WINDOW)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
        found = results(attention, parts, WINDOW)
    assert all(map(torch.equal, found, exact))


def test_under_recompute() -> None:
    parts = inputs(1, 13, 2, 1, 16)
    exact = results(attention, parts, WINDOW)
    found = results(lambda q, k, v, mask: recompute(attention, q, k, v, mask), parts, WINDOW)
    assert all(map(torch.equal, found, exact))
    assert calls[4:] == ["forward", "forward", "backward"]


def test_a_refused_shape_is_refused_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Graph, "refused", (24,))
    q, k, v, _ = (x.detach() for x in inputs(1, 13, 2, 2, 24))
    with caplog.at_level(logging.WARNING):
        assert cudnn.attention(q, k, v, WINDOW) is None and cudnn.attention(q, k, v, WINDOW) is None
    assert [one.getMessage() for one in caplog.records] == [
        "a window of 5, 1 x 13 tokens, 2 heads of 24: takes our kernels; cuDNN's do not (no engine for this)"
    ]
    assert cudnn.attention(q[..., :16], k[..., :16], v[..., :16], WINDOW) is not None


def test_no_more_shapes_than_pay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cudnn, "MOST", 2)
    taken = []
    for s in (8, 9, 10, 8):
        q, k, v, _ = (x.detach() for x in inputs(1, s, 2, 2, 16))
        taken.append(cudnn.attention(q, k, v, WINDOW) is not None)
    assert taken == [True, True, False, True] and len(caplog.records) == 1


@pytest.mark.parametrize("how", ["wrong", "absent", "refused"])
def test_what_fails_a_trial_is_not_used(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "wrong":
        monkeypatch.setattr(Graph, "wrong", 0.3)
    elif how == "refused":
        monkeypatch.setattr(Graph, "refused", (64,))
    else:
        monkeypatch.setitem(sys.modules, "cudnn", None)
    q, k, v, _ = (x.detach() for x in inputs(1, 13, 2, 2, 16))
    for _ in range(2):
        assert cudnn.attention(q, k, v, WINDOW) is None
    (line,) = (one.getMessage() for one in caplog.records)
    assert line.startswith("attention with a window takes our kernels: cuDNN's fail on this device (")
    assert {"wrong": "off by ", "absent": "import of cudnn halted", "refused": "no engine for this)"}[how] in line


def test_shapes_alone() -> None:
    """On the meta device: what it saves and makes, without the package's help."""
    q, k, v = (torch.empty(1, 13, n, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4, 2, 2))
    sizes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(tuple(x.shape)) or x, lambda x: x):
        mixed = attention(q, k, v, WINDOW)
    assert sizes == [(1, 13, 4, 16), (1, 13, 2, 16), (1, 13, 2, 16), (1, 13, 4, 16), (1, 4, 13, 1)]
    grads = torch.autograd.grad(mixed, (q, k, v), torch.empty_like(mixed))
    assert [one.shape for one in grads] == [x.shape for x in (q, k, v)] and not calls
