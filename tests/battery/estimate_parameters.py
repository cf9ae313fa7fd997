"""Parameter counts without torch, beside the models as they are built: every preset, and 500 random runs.

    PYTHONPATH=. python tests/battery/estimate_parameters.py ["random 3" ...] [--share 1/2] [--limit 50] [--summary]

Of each run: the whole model's parameters are the elements of the logical tensors that one rank builds on meta tensors;
and on every stage and tensor rank of its layout the parameters, the flat buckets with their spans, and the bytes of
weights, gradients, masters and moments are those of the built ones. A random run is a function of its number alone, and
each obeys the rules: none is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.core.config.presets import PRESETS
from mega.core.config.resolve import data_parallel
from mega.core.config.run import RunConfig
from mega.core.estimate.memory import parameters
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import weights
from mega.core.training.wire import build_stages
from tests.battery.data_ledger import Item, run
from tests.estimate.test_weights import agree, run_of

COUNT = 500


def drawn(number: int) -> tuple[dict[str, Any], int]:
    """Flags of a run that obeys the rules, and its data ranks."""
    rng = random.Random(number)
    heads, dtype = rng.choice([2, 4, 6, 8]), rng.choice(["fp32", "bf16", "fp16", "fp64"])
    flags: dict[str, Any] = {
        "family": rng.choice(["gpt", "llama"]),
        "layers": rng.choice([2, 4, 6]),
        "heads": heads,
        "hidden": heads * 2 * rng.randint(1, 24),
        "ffn": rng.choice([12, 64, 100, 172]),
        "vocab": rng.randint(3, 2000),
        "seq_length": rng.choice([16, 48]),
        "tp": rng.choice([1, 2]),
        "zero": rng.choice([0, 1, 2, 3]),
        "dtype": dtype,
        "bucket_size": rng.choice([1, 500, 20_000, 40_000_000]),
    }
    flags["pp"] = rng.choice([1, 2]) if flags["zero"] < 2 else 1
    others: dict[str, list[Any]] = {
        "kv_heads": [2],
        "tied": [True, False],
        "bias": [True, False],
        "qk_norm": [True],
        "qkv_bias": [True, False],
        "sequence_parallel": [True, False],
        "position": ["learned", "none"],
        "norm": ["layernorm", "rmsnorm"],
        "activation": ["gelu", "swiglu", "relu2"],
        "vocab_multiple": [1, 7, 128],
        "optimizer": ["sgd", "lamb", "adafactor"],
        **({"embedding_fp32": [True, False], "masters": [True, False]} if dtype == "bf16" else {}),
    }
    flags |= {name: rng.choice(values) for name, values in others.items() if rng.random() < 0.4}
    return flags, rng.choice([1, 2, 3])


def elements(run: RunConfig) -> int:
    """Elements of the distinct logical tensors that one rank alone builds; no padding counts."""
    stages = build_stages(run, Mesh.at(0), torch.device("meta"))
    found = (segment for stage in stages for weight in weights(stage) for segment in weight.segments)
    return sum({segment.shard.name: prod(segment.shard.whole) for segment in found}.values())


def judged(preset: str | None, flags: dict[str, Any], world: int) -> dict[str, Any]:
    alone = run_of(preset, 1, **{name: value for name, value in flags.items() if name not in ("tp", "pp", "zero")})
    assert parameters(alone.model) == elements(alone), (parameters(alone.model), elements(alone))
    run = run_of(preset, world, **flags)
    for stage in range(run.parallel.pp):
        for tensor in {0, run.parallel.tp - 1}:
            agree(run, data_parallel(run, world), stage, tensor)
    return {"parameters": parameters(alone.model), "flags": flags, "world": world}


def of_preset(name: str) -> dict[str, Any]:
    """The preset on 4 data ranks of the widest layout that it allows."""
    row: Mapping[str, Any] = PRESETS[name]
    pp = next(p for p in (8, 7, 4, 2) if row["layers"] % p == 0)
    tp = 8 if row["heads"] % 8 == 0 and row.get("kv_heads", row["heads"]) % 8 == 0 else 2
    return judged(name, {"tp": tp, "pp": pp, "zero": 1, "dtype": "bf16", "sequence_parallel": True}, tp * pp * 4)


def of_draw(number: int) -> dict[str, Any]:
    flags, dp = drawn(number)
    return judged(None, flags, flags["tp"] * flags["pp"] * dp)


def items() -> list[Item]:
    presets: list[Item] = [(f"preset {name}", partial(of_preset, name)) for name in PRESETS]
    return presets + [(f"random {number}", partial(of_draw, number)) for number in range(COUNT)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run("estimate_parameters", items())
