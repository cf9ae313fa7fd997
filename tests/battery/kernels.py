"""Every Triton kernel on a CPU, by Triton's interpreter, on shapes drawn at random.

    python tests/battery/kernels.py ["values 7" "kept 3" ...] [--share 1/2] [--limit 100] [--out FILE] [--summary]

values N       attention's output, log-sum-exp and gradients against the plain form in fp64: masks (causal or not,
               windows, documents, offsets), lengths that no tile divides, heads of 32 to 256, groups, dropout; fp32 and
               fp16, within the bounds of tests/gpu/test_attention.py
kept N         which weights are dropped, forward, in d(v) and in d(q): bit for bit those of the plain form
runs N         the same with key columns in two runs, as a ring of ranks has them
paged N, new N attention to the blocks of a cache, of single tokens among runs of several, against the plain form; of
               single tokens whose keys are turned and kept on the way
linear N, place N, gemm N
               what steps of few tokens take (tests/gpu/test_few_rows.py), and rows by tiles of weights in fp8
norm N, added N, activate N, heads N, entropy N, adamw N, fp8 N, fp8-weights N, total N
               the other kernels by the checks of tests/gpu/test_kernels.py, of other sizes
"""

from __future__ import annotations

import importlib.util
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from mega.core.ops import fp8
from tests.battery.data_ledger import Item, run
from tests.gpu import test_kernels as others
from tests.gpu.test_attention import kernels
from tests.gpu.test_few_rows import check_linear, check_place, check_tiled
from tests.gpu.test_paged_attention import check_new, check_paged
from tests.support.attention_cases import check_kept, check_values
from tests.support.triton import DEVICE

VALUES, KEPT, OTHERS = 400, 120, 20
LONGEST, WIDTHS = 160, [32, 40, 64, 80, 96, 128, 160, 256]


def dtype(seed: int) -> torch.dtype:
    return torch.float16 if seed % 4 == 3 else torch.float32


def values(seed: int) -> dict[str, Any]:
    return check_values(kernels(), seed, LONGEST, WIDTHS, dtype(seed), DEVICE)


def kept(seed: int) -> dict[str, Any]:
    return check_kept(kernels(), seed, (64, 128, 256)[seed % 3], dtype(seed), DEVICE)


def runs(seed: int) -> dict[str, Any]:
    return check_kept(kernels(), seed, 256, dtype(seed), DEVICE, runs=True)


def other(check: Callable[[random.Random], dict[str, Any]], seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    others.TOKENS = rng.randint(1, 40)
    others.DTYPE = rng.choice([torch.float16, torch.float32])
    drawn = check(rng)
    return {"tokens": others.TOKENS, "dtype": str(others.DTYPE).removeprefix("torch."), **drawn}


def flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


def norm(rng: random.Random) -> dict[str, Any]:
    branch = flag(rng)
    drawn: dict[str, Any] = {"width": rng.randint(1, 1100), "centred": flag(rng), "branch": branch}
    drawn |= {"branch_bias": branch and flag(rng), "dropped": branch and flag(rng)}
    others.test_add_norm(**drawn)
    return drawn


def added(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {"width": rng.randint(1, 1100), "residual": flag(rng), "bias": flag(rng)}
    others.test_added(**drawn)
    return drawn


def activate(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {"kind": rng.choice(["gelu_tanh", "gelu", "relu2", "swiglu"]), "bias": flag(rng)}
    drawn["width"] = 2 * rng.randint(1, 700)
    others.test_activate(**drawn)
    return drawn


def heads(rng: random.Random) -> dict[str, Any]:
    kv_heads, width = rng.randint(1, 3), 2 * rng.randint(1, 64)
    drawn: dict[str, Any] = {
        "heads_": kv_heads * rng.randint(1, 3),
        "kv_heads": kv_heads,
        "width": width,
        "bias": flag(rng),
    }
    drawn["turned"] = rng.choice([0, width, 2 * rng.randint(1, width // 2)])
    others.test_split_heads(**drawn)
    return drawn


def entropy(rng: random.Random) -> dict[str, Any]:
    width = rng.randint(1, 9000)
    drawn: dict[str, Any] = {"width": width, "real": rng.choice([width, rng.randint(1, width)])}
    others.test_cross_entropy(**drawn)
    drawn["width"] += rng.randint(0, 20_000)
    drawn["leap"] = rng.choice([0.0, 200.0])
    others.test_cross_entropy_in_one(**drawn)
    return drawn


def adamw(rng: random.Random) -> dict[str, Any]:
    size = rng.randint(1, 9000)
    drawn: dict[str, Any] = {"finite": 1.0, "size": size, "border": rng.randint(0, size)}
    others.test_adamw(**drawn)
    others.test_adamw_without_masters()
    return drawn


def fp8_cast(rng: random.Random) -> dict[str, Any]:
    shape, to = (rng.randint(1, 300), rng.randint(1, 300)), rng.choice(list(fp8.LIMITS))
    others.test_fp8_cast(shape, to)
    return {"shape": shape, "to": str(to).removeprefix("torch.")}


def by_fp8_weights(rng: random.Random) -> dict[str, Any]:
    drawn = {"rows": rng.randint(1, 16), "outs": rng.randint(1, 300), "ins": rng.randint(1, 900)}
    others.test_fp8_weights(**drawn)
    return drawn


def total(rng: random.Random) -> dict[str, Any]:
    shape = (rng.randint(1, 8), rng.randint(1, 9000))
    others.test_total(shape)
    return {"shape": shape}


CHECKS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "paged": check_paged,
    "new": check_new,
    "linear": check_linear,
    "place": check_place,
    "gemm": check_tiled,
    "norm": norm,
    "added": added,
    "activate": activate,
    "heads": heads,
    "entropy": entropy,
    "adamw": adamw,
    "fp8": fp8_cast,
    "fp8-weights": by_fp8_weights,
    "total": total,
}


def items() -> Iterator[Item]:
    yield from ((f"values {seed}", partial(values, seed)) for seed in range(VALUES))
    yield from ((f"kept {seed}", partial(kept, seed)) for seed in range(KEPT))
    yield from ((f"runs {seed}", partial(runs, seed)) for seed in range(OTHERS))
    for name, check in CHECKS.items():
        yield from ((f"{name} {seed}", partial(other, check, seed)) for seed in range(OTHERS))


if __name__ == "__main__":
    if importlib.util.find_spec("triton") is None:
        sys.exit("triton is absent: pip install triton")
    warnings.simplefilter("ignore", RuntimeWarning)  # of the interpreter, for log2 of a row without a key
    run("kernels", items())
