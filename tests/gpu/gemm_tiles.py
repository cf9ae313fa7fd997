"""Times of the algorithms that cuBLASLt's heuristics propose for a GEMM, under sustained load on one GPU.

    python -m tests.gpu.gemm_tiles --out rows.jsonl [--only fp8] [--small]

fp8      forward GEMMs of Llama-2 7B's weights with 32,768 tokens, with less exact sums
bf16     forward GEMMs of GPT 345M's weights with 65,536 tokens

A large GEMM is limited by the power of the GPU, so all algorithms of a shape run by turns without a pause, and the
first round, in which the clock still falls, does not count. Each shape is appended as one JSON line: tiles
(cublasLtMatmulTile_t) and microseconds of the algorithms, best first by the heuristics, and whether all of them compute
the same bits. --small: tiny shapes, to try this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega.core.device import Timestamp
from mega.core.ops import cublaslt

SHAPES: Mapping[str, tuple[int, Sequence[tuple[int, int]]]] = {
    "fp8": (32768, ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))),
    "bf16": (65536, ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024))),
}
"""dtype -> tokens, and inputs and outputs of the weights."""
MOST, ROUNDS = 8, 7
SECONDS = 0.08
"""Duration of an algorithm's turn."""


def turns(gemms: Sequence[Callable[[], None]], device: torch.device, seconds: float, rounds: int) -> list[float]:
    """Median microseconds of each, run by turns in an order that changes from round to round."""
    times: list[list[float]] = [[] for _ in gemms]
    begin = Timestamp(device)
    gemms[0]()
    count = max(1, int(seconds / max(begin.seconds_to(Timestamp(device)), 1e-5)))
    for number in range(rounds):
        for index in range(len(gemms)):
            one = (index + number) % len(gemms)
            begin = Timestamp(device)
            for _ in range(count):
                gemms[one]()
            times[one].append(begin.seconds_to(Timestamp(device)) / count)
    return [1e6 * statistics.median(each[1:]) for each in times]


def measured(kind: str, m: int, k: int, n: int, device: torch.device, seconds: float, rounds: int) -> dict[str, Any]:
    """The row of a GEMM [m, k] x [n, k]^T."""
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    x, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    one = torch.ones((), device=device)
    attributes, addresses = {cublaslt.TRANSPOSED: 1}, {}
    if kind == "fp8":
        addresses = {cublaslt.SCALE_RIGHT: one, cublaslt.SCALE_LEFT: one}
        attributes |= {cublaslt.FAST: 1, **dict.fromkeys(addresses, cublaslt.ADDRESS)}
    matrices = (dtype, m, k), (dtype, n, k), (torch.bfloat16, m, n)
    gemms = cublaslt.propose(device, attributes, *matrices, most=MOST)
    outs = [torch.empty(m, n, dtype=torch.bfloat16, device=device) for _ in range(2)]

    def run(gemm: cublaslt.PlannedGemm, out: torch.Tensor = outs[0]) -> None:
        gemm.run(x, weight, out, addresses)

    run(gemms[0], outs[1])
    same = []
    for gemm in gemms:
        run(gemm)
        same.append(torch.equal(*outs))
    times = turns([partial(run, gemm) for gemm in gemms], device, seconds, rounds)
    return {
        "dtype": kind,
        "m": m,
        "k": k,
        "n": n,
        "tiles": [gemm.tile for gemm in gemms],
        "microseconds": [round(time, 1) for time in times],
        "same bits": all(same),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SHAPES), help="dtypes, with commas between")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args(arguments)
    for kind in asked.only.split(","):
        tokens, weights = SHAPES[kind] if not asked.small else (32, ((64, 96),))
        for inputs, outputs in weights:
            seconds, rounds = (SECONDS, ROUNDS) if not asked.small else (0.0, 2)
            row = measured(kind, tokens, inputs, outputs, torch.device(asked.device), seconds, rounds)
            print(json.dumps(row), flush=True)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
