"""What transformers takes for the rows of tests/gpu/serving_rows.py: Llama-2 7B's shape, random weights, bf16, one GPU.

python -m tests.gpu.serving_peer --out rows.jsonl

prompts   8 prompts of 2,048 tokens in one forward pass, without a cache of its own
decode    a step of 1 row and of 64 rows at 512 tokens and more: static cache, compiled with graphs
burst     64 requests of 512 tokens in and 128 out, in one batch: one forward pass of all prompts, and 127 steps
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

STEPS = 32


def timed(work: Callable[[], Any], times: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def static_cache(config: Any, rows: int, length: int) -> Any:
    from transformers import StaticCache

    try:
        return StaticCache(config=config, max_cache_len=length)
    except TypeError:  # before transformers 4.56
        older: Any = StaticCache
        return older(config, rows, length, device="cuda", dtype=torch.bfloat16)


@torch.inference_mode()
def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out

    def report(row: str, **values: Any) -> None:
        line = {"row": row, "transformers": transformers.__version__, "torch": torch.__version__, **values}
        print(json.dumps(line), flush=True)
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    config = transformers.LlamaConfig(max_position_embeddings=4096)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    prompts = torch.randint(32000, (8, 2048), device="cuda")

    def forward(ids: torch.Tensor, **more: Any) -> Any:
        return model(ids, logits_to_keep=1, **more)

    timed(lambda: forward(prompts, use_cache=False), 1)
    took = timed(lambda: forward(prompts, use_cache=False), 4)
    report("prompts", prompt_tokens_per_second=prompts.numel() / took)
    compiled = torch.compile(model.forward, mode="reduce-overhead")
    for rows in (1, 64):
        cache = static_cache(config, rows, 768)
        ids = torch.randint(32000, (rows, 512), device="cuda")
        positions = torch.arange(512, device="cuda")
        forward(ids, past_key_values=cache, cache_position=positions)
        prefill = timed(lambda: forward(ids, use_cache=False), 1)  # noqa: B023
        at = torch.tensor([512], device="cuda")

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            compiled(ids[:, :1], past_key_values=cache, cache_position=at, logits_to_keep=1).logits.argmax(-1)  # noqa: B023
            at.add_(1)  # noqa: B023

        for _ in range(8):
            step()
        took = timed(step, STEPS)
        report("decode", rows=rows, ms=1e3 * took, tokens_per_second=rows / took)
        if rows == 64:
            report("burst", tokens_per_second=64 * 128 / (prefill + 127 * took), first=prefill)


if __name__ == "__main__":
    main()
