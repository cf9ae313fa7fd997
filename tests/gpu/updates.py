"""How long an update takes by each rule, alone on one device: its milliseconds beside what the estimate says.

    python -m tests.gpu.updates --out rows.jsonl

Three blocks of GPT 22B, whole and as one of two tensor ranks holds them, in bf16. Zeroing gradients is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.estimate.hardware import hardware
from mega.core.estimate.steptime import update_bytes
from mega.core.estimate.weights import BYTES
from mega.core.processes.connect import connect, disconnect
from mega.core.training.state import TrainState
from mega.core.training.wire import build_mesh, build_state

MODEL: Mapping[str, Any] = {"layers": 3, "micro_batch": 1, "global_batch": 1, "dtype": "bf16", "lr": 1e-4}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "half": {"heads": 32, "head_dim": 96, "ffn": 12288, "vocab": 25600},
}
RULES: Mapping[str, Mapping[str, Any]] = {
    "adam": {},
    "adam, no masters": {"masters": False},
    "adam, 16-bit buckets": {"grad_dtype": "bf16"},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "sgd, momentum": {"optimizer": "sgd"},
    "lamb": {"optimizer": "lamb"},
    "adafactor": {"optimizer": "adafactor"},
    "adafactor, no masters": {"optimizer": "adafactor", "masters": False},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--gpu", default="h200")
    asked = parser.parse_args(arguments)
    _, device, groups = connect("cuda")
    on = hardware(asked.gpu)
    for shape, sizes in SHAPES.items():
        for name, rule in RULES.items():
            run = resolve(compose("gpt-22b", flags={**MODEL, **sizes, **rule, "device": "cuda"}), 1)
            state = build_state(run, build_mesh(run, 0, 1, groups), device)
            for bucket in state.grads.buckets:
                bucket.own_grads.normal_()
            times = [_milliseconds(state) for _ in range(7)][2:]
            elements = sum(bucket.own_grads.numel() for bucket in state.grads.buckets)
            assert run.precision.grad_dtype
            moved = update_bytes(run) - BYTES[run.precision.grad_dtype]
            said = 1e3 * moved * elements / (on.bandwidth * 1e12 * on.elementwise)
            row = {
                "shape": shape,
                "rule": name,
                "elements": elements,
                "ms": statistics.median(times),
                "predicted": said,
            }
            print(f"{shape:<6} {name:<22} {row['ms']:7.2f} ms, predicted {said:7.2f}", flush=True)
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            state.grads.wait_param_gather()
            del state, bucket
            device.release()
    disconnect()
    return 0


def _milliseconds(state: TrainState) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    state.optimizer.step(1e-4, 0.1)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


if __name__ == "__main__":
    raise SystemExit(main())
