"""A mixture of experts on one GPU against dense layers of the same active width, and against transformers.

    python -m tests.gpu.mixtures --out rows.jsonl [--only mixtral,qwen3] [--peer] [--small]

    mixtral     2 layers of Mixtral 8x7B (on a GPU of more than 120 GiB 4), 8 experts of which a token passes 2
    qwen3       4 layers of Qwen3-30B-A3B, 128 experts of which a token passes 8
    --peer      transformers instead, with its grouped GEMMs, as it is and compiled, and its own dense layers; weights,
                gradients and moments in bf16, which is less memory to move than our fp32 masters and gradients

Sequences of 4,096 random tokens, 16 a step, bf16, AdamW; medians of 5 steps after 3. The dense twin has networks as
wide as the experts of one token together. `rate` is the share of its tokens a second. `largest_share` of a layer's
choices goes to one expert. --small: tiny shapes, to try this file on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mega.core.bench.training import measure
from mega.core.config.compose import compose
from mega.core.config.resolve import resolve
from mega.core.config.run import Options
from mega.core.device import Device, Timestamp
from mega.core.parallel.mesh import Groups
from mega.core.processes.connect import connect, disconnect
from tests.gpu.host import of
from tests.gpu.layouts import append

Row = dict[str, Any]
MODELS: Mapping[str, str] = {"mixtral": "mixtral-8x7b", "qwen3": "qwen3-30b-a3b"}
EVERY = {"dtype": "bf16", "seq_length": 4096, "global_batch": 16, "recompute": "none", "lr": 1e-4}
SMALL = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "expert_ffn": 96, "vocab": 512}
"""Of --small."""
LARGE_GIB = 120
REPEATS, WARMUP = 5, 3


def options(name: str, device: Device, micro: int, *, dense: bool, small: bool) -> Options:
    """The run of a mixture, or of its dense twin."""
    large = device.is_cuda and torch.cuda.get_device_properties(0).total_memory > LARGE_GIB * 2**30
    layers = 4 if name == "qwen3" or large else 2
    flags = {**EVERY, "layers": layers, "micro_batch": micro, **(SMALL | {"seq_length": 64} if small else {})}
    mixture = compose(MODELS[name], flags).model
    if not dense:
        return compose(MODELS[name], flags)
    width = mixture.experts_chosen * (mixture.expert_ffn or 0)
    kept = {field: getattr(mixture, field) for field in ("hidden", "heads", "kv_heads", "head_dim", "vocab", "qk_norm")}
    return compose("llama2-7b", {**flags, **kept, "ffn": width}, {})


def ours(name: str, device: Device, groups: Groups, *, small: bool) -> Iterator[Row]:
    for micro in (2, 4):
        speeds = {}
        for dense in (True, False):
            run = resolve(options(name, device, micro, dense=dense, small=small), 1)
            speed = speeds[dense] = measure(name, run, 0, 1, device, groups, repeats=REPEATS, warmup=WARMUP)
            rate = {} if dense else {"rate": speed.tokens_per_second / speeds[True].tokens_per_second}
            yield {"row": f"{name} {'dense' if dense else 'mixture'}, micro batch {micro}", **of(speed), **rate}


def peer(name: str, device: Device, *, small: bool) -> Iterator[Row]:
    import transformers

    micro = 2
    for dense in (True, False):
        model = options(name, device, micro, dense=dense, small=small).model
        for compiled in (False, True):
            kind = f"{'dense' if dense else 'mixture'}{' compiled' if compiled else ''}"
            row = {
                "row": f"transformers {name} {kind}",
                "transformers": transformers.__version__,
                "device": device.name,
            }
            device.release()
            try:
                seconds = of_transformers(model, micro, device, compiled=compiled, length=64 if small else 4096)
            except Exception as error:  # whatever the compiler raises
                yield {**row, "error": f"{type(error).__name__}: {error}"[:800]}
                continue
            yield {
                **row,
                "device": device.name,
                "seconds": seconds,
                "tokens_per_second": 16 * (64 if small else 4096) / seconds,
            }


def of_transformers(model: Any, micro: int, device: Device, *, compiled: bool, length: int) -> float:
    """Median seconds of a step."""
    import transformers

    kinds = {0: ("LlamaConfig", {}), 8: ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2})}
    many = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": model.expert_ffn}
    kind, more = kinds.get(model.experts, ("Qwen3MoeConfig", many))
    config = getattr(transformers, kind)(
        hidden_size=model.hidden,
        intermediate_size=model.expert_ffn if model.experts == 8 else model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab,
        use_cache=False,
        attn_implementation="sdpa",
        **({"experts_implementation": "grouped_mm"} if model.experts else {}),
        **more,
    )
    with torch.device(device.torch):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    forward = torch.compile(network) if compiled else network
    rule = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    ids = [torch.randint(model.vocab or 1, (micro, length), device=device.torch) for _ in range(16 // micro)]

    def step() -> None:
        for each in ids:
            (forward(input_ids=each, labels=each).loss / len(ids)).backward()
        rule.step()
        rule.zero_grad(set_to_none=False)

    return timed(step, device)


def timed(step: Callable[[], None], device: Device) -> float:
    moments = []
    for _ in range(WARMUP + REPEATS + 1):
        moments.append(Timestamp(device.torch))
        step()
    device.synchronize()
    times = [begin.seconds_to(end) for begin, end in zip(moments[WARMUP:], moments[WARMUP + 1 :], strict=False)]
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args(arguments)
    _, device, groups = connect("auto")
    failed = 0
    for name in asked.only.split(","):
        rows = peer(name, device, small=asked.small) if asked.peer else ours(name, device, groups, small=asked.small)
        try:
            for found in rows:
                append(asked.out, {**found, "torch": torch.__version__})
        except (RuntimeError, ValueError, TypeError) as error:
            failed += 1
            append(f"{asked.out}.failed", {"rows": name, "error": str(error)[-800:]})
    disconnect()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
