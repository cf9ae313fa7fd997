"""How long one layer's attention takes on a GPU: plain causal, with dropout, documents, a window; forward and backward.

python3 -m tests.gpu.attention_speed --out rows.jsonl [--turns 6]

--turns: only a window of 4,096 in 16,384 tokens against plain causal attention, so many times by turns, each for an
eighth of a second or longer, so that the device is as warm for one as for the other.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mega.core.ops import cudnn
from mega.core.ops.attention import Attention, fused
from mega.core.ops.counter import site_key, token_keys
from mega.core.ops.dropout import AttentionDropout
from mega.core.ops.kernels import attention as kernels
from mega.core.ops.mask import CAUSAL, AttentionMask

SHAPES = (
    (64, 16, 16, 1024, 64),
    (128, 16, 16, 512, 64),
    (2, 32, 32, 4096, 128),
    (1, 32, 32, 16384, 128),
    (1, 32, 8, 16384, 128),
)
"""Batch, heads, key/value heads, length, width of a head."""


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Our kernels, also for what cuDNN's would do."""
    return kernels._Attention.apply(q, k, v, mask)  # type: ignore[no-any-return]


def by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """A window by cuDNN's graph API."""
    assert cudnn.applies(q, k, mask)
    mixed = cudnn.attention(q, k, v, mask)
    assert mixed is not None
    return mixed


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """The median, after three more."""
    found = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[3:])


def measured(
    attention: Attention, mask: AttentionMask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> tuple[float, float]:
    """Milliseconds forward and backward, of calls that follow each other."""
    with torch.no_grad():
        forward = sustained(lambda: attention(q, k, v, mask))
    mixed = attention(q, k, v, mask)
    return forward, sustained(lambda: torch.autograd.grad(mixed, (q, k, v), grad, retain_graph=True))


def documents(rows: int, length: int) -> torch.Tensor:
    """Numbers of packed documents of 200 to 2,000 tokens."""
    rng, found = random.Random(0), []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < length:
            row += [len(row)] * rng.randint(200, 2000)
        found.append(row[:length])
    return torch.tensor(found, device="cuda")


def cases(b: int, s: int) -> dict[str, tuple[Attention, AttentionMask]]:
    tokens = torch.arange(b, device="cuda"), torch.arange(s, device="cuda")
    drop = AttentionDropout(token_keys(1, *tokens), site_key(3, "attention"), 0, (range(s),), 0.1)
    numbers = documents(b, s)
    apart = AttentionMask(q_documents=numbers, k_documents=numbers)
    found: dict[str, tuple[Attention, AttentionMask]] = {
        "cudnn": (fused, CAUSAL),
        "ours": (ours, CAUSAL),
        "ours, dropout 0.1": (ours, AttentionMask(dropout=drop)),
        "ours, documents": (ours, apart),
        "cudnn, full": (fused, AttentionMask("full")),
        "ours, full": (ours, AttentionMask("full")),
        "ours, full, dropout 0.1": (ours, AttentionMask("full", dropout=drop)),
        "ours, window 4096": (ours, AttentionMask(window=4096)),
    }
    if s <= 8192:
        return {**found, "documents as a dense mask": (fused, apart)}
    if cudnn.version() is not None:
        found["cudnn, window 4096"] = by_cudnn, AttentionMask(window=4096)
    return found


def tensors(b: int, heads: int, kv_heads: int, s: int, width: int) -> tuple[torch.Tensor, ...]:
    """q, k, v as parts of one tensor, and d(out)."""
    qkv = torch.randn(b, s, heads + 2 * kv_heads, width, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.detach().requires_grad_() for x in qkv.split([heads, kv_heads, kv_heads], 2))
    return q, k, v, torch.randn(b, s, heads, width, device="cuda", dtype=torch.bfloat16)


def sustained(run: Callable[[], object], seconds: float = 0.125) -> float:
    """Milliseconds of one of many that follow each other."""
    count = max(3, int(1e3 * seconds / milliseconds(run, 1)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def by_turns(turns: int) -> dict[str, Any]:
    """Milliseconds of a layer, forward and backward: medians of the turns, and of their ratios."""
    shape = SHAPES[-1]
    q, k, v, grad = tensors(*shape)
    found: dict[str, list[float]] = {"causal": [], "window": []}
    for _ in range(turns):
        for name, attention, mask in (("causal", fused, CAUSAL), ("window", by_cudnn, AttentionMask(window=4096))):
            with torch.no_grad():
                forward = sustained(functools.partial(attention, q, k, v, mask))
            mixed = attention(q, k, v, mask)
            back = functools.partial(torch.autograd.grad, mixed, (q, k, v), grad, retain_graph=True)
            found[name].append(forward + sustained(back))
    ratios = [window / causal for causal, window in zip(found["causal"], found["window"], strict=True)]
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {"shape": shape, "case": "by turns", **medians, "ratios": ratios, "ratio": statistics.median(ratios)}


def rows() -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        q, k, v, grad = tensors(*shape)
        for name, (attention, mask) in cases(shape[0], shape[3]).items():
            forward, backward = measured(attention, mask, q, k, v, grad)
            yield {"shape": shape, "case": name, "forward": forward, "backward": backward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=0)
    asked = parser.parse_args()
    for row in [by_turns(asked.turns)] if asked.turns else rows():
        print(json.dumps(row), flush=True)
        with asked.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
