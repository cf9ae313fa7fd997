"""Measures steps of small models on this machine and predicts them from its calibration alone.

python tests/battery/calibrated.py [--gpu mine.toml] [--device cpu] [--only llama] [--repeats 5]

Without --gpu, the machine is calibrated first (mega bench --calibrate). A line a model: milliseconds of a step,
predicted and measured, and the error.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from mega.core.bench.calibrate import calibrate
from mega.core.bench.training import measure
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.device import Device
from mega.core.estimate.hardware import hardware
from mega.core.estimate.steptime import step_time
from mega.core.processes.connect import connect, disconnect

QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
CPU_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt, 4 blocks of 128": ("gpt2-345m", {"layers": 4, "hidden": 128, "heads": 4, "seq_length": 128, **QUIET}),
    "gpt, 4 blocks of 256": ("gpt2-345m", {"layers": 4, "hidden": 256, "heads": 4, "seq_length": 128, **QUIET}),
    "gpt, 8 blocks of 256, 256 tokens": ("gpt2-345m", {"layers": 8, "hidden": 256, "heads": 8, **QUIET}),
    "gpt, 2 blocks of 512": ("gpt2-345m", {"layers": 2, "hidden": 512, "heads": 8, "seq_length": 128, **QUIET}),
    "gpt, dropout": ("gpt2-345m", {"layers": 4, "hidden": 256, "heads": 4, "seq_length": 128}),
    "gpt, recomputed": (
        "gpt2-345m",
        {
            "layers": 4,
            "hidden": 256,
            "heads": 4,
            "seq_length": 128,
            "recompute": "full",
            "recompute_method": "uniform",
            "recompute_layers": 1,
            **QUIET,
        },
    ),
    "llama, 4 blocks of 256": ("llama2-7b", {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 704}),
    "llama, 6 blocks of 384": ("llama2-7b", {"layers": 6, "hidden": 384, "heads": 6, "kv_heads": 2, "ffn": 1024}),
    "gpt, 2 blocks of 64": ("gpt2-345m", {"layers": 2, "hidden": 64, "heads": 4, "seq_length": 64, **QUIET}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.gpu or str(Path(folder) / "mine.toml")
        if given.gpu is None:
            calibrate(path, given.device, "auto", 5, given.repeats)
        on = hardware(path)
    world, device, groups = connect(given.device, "auto", 5)
    errors = []
    for name, (preset, flags) in CPU_RUNS.items():
        if given.only not in name:
            continue
        run = run_of(preset, device, flags)
        found = measure(name, run, world.rank, 1, device, groups, repeats=given.repeats, warmup=2, profiled=False)
        guess, took = step_time(run, 1, on).seconds, min(found.steps)
        errors.append(abs(guess / took - 1))
        print(f"{name:<36} {1e3 * guess:9.2f} {1e3 * took:9.2f} {guess / took - 1:+.1%}", flush=True)
    disconnect()
    print(f"median {sorted(errors)[len(errors) // 2]:.1%}, worst {max(errors):.1%} of {len(errors)}")


def run_of(preset: str, device: Device, flags: dict[str, Any]) -> Any:
    dtype = "bf16" if device.is_cuda else "fp32"
    base = {"vocab": 1024, "seq_length": 256, "micro_batch": 2, "global_batch": 4, "dtype": dtype, "lr": 1e-4}
    base |= {"device": device.torch.type, "mock_data": True, "steps": 1}
    return resolve(compose(preset, flags={**base, **flags}), 1)


if __name__ == "__main__":
    main()
