"""What single operations take on this GPU, sustained: the curves of mega/core/estimate/curves.json.

    python3 -m tests.gpu.cost_curves --out rows.jsonl [--seconds 60]

    matmul       [m, k] x [k, n] in bf16 and fp8; forward, dgrad, and wgrad that is added to fp32
    attention    by kernel, width of a head and length; forward and backward
    elementwise  a copy and a sum by size; the fused norm
    launch       one small kernel after another: asked for one by one, and in a recorded graph

Each operation runs again and again for a tenth of a second, so that the clock is that of a device under load. One JSON
line an operation, with its milliseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega.core.ops.attention import Attention, fused
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.kernels import attention as kernels
from mega.core.ops.mask import CAUSAL, FULL, AttentionMask

BF16 = torch.bfloat16

MATMULS = (
    (65536, 1024, 3072), (65536, 1024, 1024), (65536, 1024, 4096), (65536, 4096, 1024), (65536, 1024, 50304),
    (16384, 1024, 3072), (16384, 1024, 1024), (16384, 1024, 4096), (16384, 4096, 1024),
    (4096, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 1024), (1024, 1024, 1024), (1024, 1024, 4096),
    (1024, 4096, 1024), (1024, 1024, 50304), (32768, 768, 768), (32768, 768, 3072), (32768, 3072, 768),
    (8192, 4096, 12288), (8192, 4096, 4096), (8192, 4096, 22016), (8192, 11008, 4096), (8192, 4096, 32000),
    (4096, 4096, 12288), (4096, 4096, 4096), (4096, 4096, 22016), (4096, 11008, 4096),
    (2048, 6144, 18432), (2048, 6144, 6144), (8192, 6144, 24576), (8192, 24576, 6144), (8192, 768, 6144),
)  # fmt: skip
"""(m, k, n) of W1 at several micro batches, GPT-2 124M, Llama-2 7B and GPT 22B."""

ATTENTION = (
    (64, 16, 1024, 64), (16, 16, 1024, 64), (1, 16, 1024, 64), (64, 16, 512, 64), (64, 16, 128, 64), (2, 16, 4096, 64),
    (1, 16, 16384, 64), (1, 32, 2048, 128), (4, 32, 2048, 128), (2, 32, 4096, 128), (1, 32, 16384, 128),
    (1, 32, 32768, 128), (4, 32, 2048, 96),
)  # fmt: skip
"""Batch, heads, length, width of a head."""

SIZES = tuple(1 << power for power in range(20, 31, 2))
"""Bytes of a tensor."""


def sustained(run: Callable[[], object], seconds: float = 0.1) -> float:
    """Milliseconds of one of many that follow each other."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def several(count: int) -> float:
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / count

    return several(min(20000, max(3, int(1e3 * seconds / max(several(3), 1e-3)))))


def filled(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def matmuls() -> Iterator[dict[str, Any]]:
    for m, k, n in MATMULS:
        x, w, y = filled(m, k), filled(n, k), filled(m, n)
        main = torch.zeros(n, k, device="cuda")
        wide = torch.ops.aten.addmm.dtype_out
        found = {
            "forward": sustained(partial(torch.nn.functional.linear, x, w)),
            "dgrad": sustained(partial(torch.mm, y, w)),
            "wgrad": sustained(partial(wide, main, y.t(), x, torch.float32, out=main)),
        }
        yield {"kind": "matmul", "shape": (m, k, n), **found}


def fp8_matmuls() -> Iterator[dict[str, Any]]:
    one, e4m3 = torch.ones((), device="cuda"), torch.float8_e4m3fn
    for m, k, n in MATMULS:
        if m not in (4096, 8192):
            continue
        a, b = filled(m, k).to(e4m3), filled(n, k).to(e4m3)

        scaled = partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one)
        found = {
            "forward": sustained(partial(scaled, out_dtype=BF16, use_fast_accum=True)),
            "dgrad": sustained(partial(scaled, out_dtype=BF16)),
            "wgrad": sustained(partial(scaled, out_dtype=torch.float32)),
        }
        yield {"kind": "fp8 matmul", "shape": (m, k, n), **found}


def attention() -> Iterator[dict[str, Any]]:
    for b, heads, s, width in ATTENTION:
        keys = token_keys(1, torch.arange(b, device="cuda"), torch.arange(s, device="cuda"))
        drop = AttentionDropout(keys, site_key(3, "attention"), 0, (range(s),), 0.1)
        padded = torch.zeros(b, s, dtype=torch.int64, device="cuda")
        cases: dict[str, tuple[Attention, AttentionMask]] = {
            "cudnn causal": (fused, CAUSAL),
            "cudnn full": (fused, FULL),
            "ours causal dropout": (kernels.attention, AttentionMask(dropout=drop)),
            "ours full dropout": (
                kernels.attention,
                AttentionMask("full", q_documents=padded, k_documents=padded, dropout=drop),
            ),
            "ours full": (kernels.attention, AttentionMask("full", q_documents=padded, k_documents=padded)),
        }
        qkv = torch.randn(b, s, 3 * heads, width, device="cuda", dtype=BF16)
        q, k, v = (x.detach().requires_grad_() for x in qkv.split(heads, 2))
        grad = filled(b, s, heads, width)
        for name, (run, mask) in cases.items():
            if "full" in name and width > 64:
                continue
            with torch.no_grad():
                forward = sustained(partial(run, q, k, v, mask), 0.05)
            mixed = run(q, k, v, mask)
            gradients: Callable[..., Any] = torch.autograd.grad
            backward = sustained(partial(gradients, mixed, (q, k, v), grad, retain_graph=True), 0.05)
            yield {
                "kind": "attention",
                "case": name,
                "shape": (b, heads, s, width),
                "forward": forward,
                "backward": backward,
            }


def elementwise() -> Iterator[dict[str, Any]]:
    from mega.core.ops.suite import choose

    ops = choose(torch.device("cuda"), BF16)
    for size in SIZES:
        x, y, z = (filled(size // 2) for _ in range(3))
        copy, add = sustained(partial(y.copy_, x)), sustained(partial(torch.add, x, y, out=z))
        yield {"kind": "elementwise", "bytes": size, "copy": copy, "add": add}
        width = 1024 if size < 1 << 28 else 4096
        x, y, weight = x.view(-1, width), y.view(-1, width), torch.ones(width, device="cuda", dtype=BF16)
        norm = sustained(partial(ops.add_norm, x, y, None, None, weight, None, 1e-5))
        yield {"kind": "norm", "bytes": size, "forward": norm}


def launches() -> Iterator[dict[str, Any]]:
    x = filled(1024)
    eager = sustained(lambda: x.add_(1), 0.05)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            x.add_(1)
    yield {"kind": "launch", "eager": eager, "graph": sustained(graph.replay, 0.05) / 200}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no operation after so long")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    for rows in (launches, matmuls, elementwise, fp8_matmuls, attention):
        for row in rows():
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"device": torch.cuda.get_device_name(), **row}) + "\n")
            if time.monotonic() > until:
                return


if __name__ == "__main__":
    main()
