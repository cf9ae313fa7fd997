"""What single operations take on this GPU, sustained: the curves of mega/core/estimate/curves.json.

    python3 -m tests.gpu.cost_curves --out rows.jsonl [--seconds 60] [--only attention]

The measurement is that of `mega bench --calibrate` (mega/core/bench/curves.py), at more shapes. One JSON line a point,
with the name of its curve.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import chain
from pathlib import Path

import torch

from mega.core.bench import curves
from mega.core.bench.curves import Meter, Shapes
from mega.core.device import Device
from mega.core.ops.suite import choose

SHAPES = Shapes(
    matmuls=(
        (65536, 1024, 3072), (65536, 1024, 1024), (65536, 1024, 4096), (65536, 4096, 1024), (65536, 1024, 50304),
        (16384, 1024, 3072), (16384, 1024, 1024), (16384, 1024, 4096), (16384, 4096, 1024),
        (4096, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 1024), (1024, 1024, 1024), (1024, 1024, 4096),
        (1024, 4096, 1024), (1024, 1024, 50304), (32768, 768, 768), (32768, 768, 3072), (32768, 3072, 768),
        (8192, 4096, 12288), (8192, 4096, 4096), (8192, 4096, 22016), (8192, 11008, 4096), (8192, 4096, 32000),
        (4096, 4096, 12288), (4096, 4096, 4096), (4096, 4096, 22016), (4096, 11008, 4096),
        (2048, 6144, 18432), (2048, 6144, 6144), (8192, 6144, 24576), (8192, 24576, 6144), (8192, 768, 6144),
    ),
    attention=(
        (64, 16, 1024, 64), (16, 16, 1024, 64), (1, 16, 1024, 64), (64, 16, 512, 64), (64, 16, 128, 64),
        (2, 16, 4096, 64), (1, 16, 16384, 64), (1, 32, 2048, 128), (4, 32, 2048, 128), (2, 32, 4096, 128),
        (1, 32, 16384, 128), (1, 32, 32768, 128), (4, 32, 2048, 96),
    ),
    elementwise=curves.CUDA.elementwise,
    full_width=64,
)  # fmt: skip
"""Of W1 at several micro batches, GPT-2 124M, Llama-2 7B and GPT 22B."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180.0, help="begin no operation after so long")
    parser.add_argument("--only", choices=["attention"], help="only the curves of attention")
    options = parser.parse_args()
    until, device = time.monotonic() + options.seconds, Device.choose("cuda")
    meter = Meter(device, choose(device.torch, torch.bfloat16), torch.bfloat16)
    everything = chain([("gap", (curves.gap(meter),))], curves.points(meter, SHAPES))
    for name, point in curves.attention(meter, SHAPES) if options.only else everything:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"device": device.name, "curve": name, "point": point}) + "\n")
        if time.monotonic() > until:
            return


if __name__ == "__main__":
    main()
