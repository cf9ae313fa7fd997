"""Every plan that cuDNN has for attention with a window, by one knob changed at a time from what its heuristic chooses.

python3 -m tests.gpu.window_plans --out rows.jsonl [--seconds 90]

One JSON line a plan: milliseconds of a layer, and how far the results are from those of the heuristic's plan. A plan
that cuDNN refuses is left out. Needs nvidia-cudnn-frontend.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mega.core.ops import cudnn
from mega.core.ops.trial import error_of, first_line
from tests.gpu.attention_speed import SHAPES, sustained, tensors

WINDOW = 4096

Knobs = Mapping[Any, int]


class Chosen(cudnn._GraphBuilder):
    """Makes graphs of an engine and its knobs; of the heuristic's where none is named, noting which."""

    engine: int | None = None
    knobs: Knobs | None = None
    allowed: list[Any]

    def _finish(self, graph: Any, *tensors: Any) -> cudnn.ExecutionPlan:
        graph.validate()
        graph.build_operation_graph()
        if self.engine is None:
            graph.create_execution_plans([self._cudnn.heur_mode.A])
            self.engine, self.knobs = graph.get_engine_and_knobs_at_index(0)
            self.allowed = list(graph.get_knobs_for_engine(self.engine))
        else:
            graph.create_execution_plan(self.engine, self.knobs)
        graph.check_support()
        graph.build_plans()
        return cudnn.ExecutionPlan(graph, tensors, graph.get_workspace_size())


def neighbours(knobs: Knobs, allowed: list[Any]) -> Iterator[Knobs]:
    """The same knobs with one of them changed."""
    for knob in allowed:
        for value in range(knob.min_value, knob.max_value + 1, max(1, knob.stride)):
            if value != knobs.get(knob.type):
                yield {**knobs, knob.type: value}


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    b, heads, kv_heads, s, width = SHAPES[-1]
    q, k, v, grad = (x.detach() for x in tensors(*SHAPES[-1]))
    whole, few, lse_shape = (b, s, heads, width), (b, s, kv_heads, width), ([b, heads, s, 1], [heads * s, s, 1, 1])
    dense = whole, cudnn._strides(whole)
    layouts = (whole, q.stride()), (few, k.stride()), (few, v.stride()), dense, lse_shape
    out, lse = torch.empty_like(grad), torch.empty(b, heads, s, 1, device="cuda")
    grads = torch.empty_like(grad), *torch.empty(2, *few, dtype=q.dtype, device="cuda")
    passes: dict[str, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {
        "forward": ((q, k, v, out, lse), (out, lse)),
        "backward": ((q, k, v, out, grad, lse, *grads), grads),
    }
    for name, (buffers, made) in passes.items():
        begun, first = time.monotonic(), builder(q)
        plan = getattr(first, name)(*layouts)
        yield {"pass": name, "knobs": named(first.knobs), "milliseconds": timed(plan, buffers)}
        truth = [x.clone() for x in made]
        assert first.knobs is not None
        for knobs in neighbours(first.knobs, first.allowed):
            if time.monotonic() - begun > seconds / 2:
                break
            other = builder(q)
            other.engine, other.knobs = first.engine, knobs
            try:
                taken = timed(getattr(other, name)(*layouts), buffers)
            except Exception as error:
                print(named(knobs), first_line(error)[:100])
                continue
            yield {"pass": name, "knobs": named(knobs), "milliseconds": taken, "off": error_of(made, truth)}


def builder(q: torch.Tensor) -> Chosen:
    return Chosen(q.dtype, q.device, WINDOW, q.shape[-1] ** -0.5)


def timed(plan: cudnn.ExecutionPlan, buffers: tuple[torch.Tensor, ...]) -> float:
    run: Callable[[], None] = functools.partial(plan.run, *buffers)
    return sustained(run, 0.06)


def named(knobs: Knobs | None) -> dict[str, int]:
    return {str(knob): value for knob, value in (knobs or {}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0)
    asked = parser.parse_args()
    for row in rows(asked.seconds):
        print(json.dumps(row), flush=True)
        with asked.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
