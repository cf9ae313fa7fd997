"""Training steps of `mega` beside nanoGPT's, transformers' and torchao's, in one launch on one GPU.

    python -m tests.gpu.training_peers --out rows.jsonl [--nanogpt model.py] [--only "w1 dropout;bert"] [--seconds 540]
        [--small]

    w1, w1 dropout   GPT 345M, 512 sequences of 1,024 tokens; the peer is nanoGPT's model (--nanogpt: its model.py),
                     compiled, with torch's autocast and fused AdamW, with micro batches of 16
    bert             BERT 345M with dropout, 256 sequences of 512 tokens; the peer is transformers' model with autocast
                     and micro batches of 64, of which embeddings, layers, head and loss are compiled
    blocks           8 blocks of Llama-2 7B, 8 sequences of 4,096 tokens; the peer is transformers' model, compiled,
                     with weights, gradients and moments in bf16
    blocks fp8       the same in fp8, by each of our scalings; the peer's linear layers are torchao's (tensorwise). Both
                     take all 8 sequences as one micro batch, which is the fastest size of both (of 2, 4 and 8)

Each measurement runs in a process of its own, so that it has the whole memory, and is appended as one JSON line. The
rows of `mega` and of the peer alternate. `ratio` is our rate relative to the peer's rate in the same launch. --small:
tiny models, to try this file on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mega.core.bench.rows import row
from mega.core.bench.training import measure
from mega.core.config.resolve import resolve
from mega.core.device import Device
from mega.core.processes.connect import connect, disconnect
from tests.gpu.mixtures import REPEATS, WARMUP, timed

Row = dict[str, Any]
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
BLOCKS = {"layers": 8, "global_batch": 8, "recompute": "none"}
OURS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "w1": ("w1", {}),
    "w1 dropout": ("w1", DROPOUT),
    "bert": ("bert", {}),
    "blocks": ("w2", BLOCKS),
    "blocks fp8": ("w2-fp8", {**BLOCKS, "micro_batch": 8}),
    "blocks fp8 block": ("w2-fp8", {**BLOCKS, "micro_batch": 8, "fp8_scaling": "block"}),
}
"""Our measurement -> a row of `mega bench`, and flags."""
CASES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "w1 dropout": (("w1 dropout",), ("nanogpt dropout",)),
    "w1": (("w1",), ("nanogpt",)),
    "bert": (("bert",), ("transformers bert",)),
    "blocks fp8": (("blocks fp8", "blocks fp8 block"), ("torchao blocks",)),
    "blocks": (("blocks",), ("transformers blocks",)),
}
"""Case -> our measurements, and the peer's."""
SMALL: Mapping[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 512, "seq_length": 64,
    "micro_batch": 1, "global_batch": 2,
}  # fmt: skip
GLOBAL = {"nanogpt": 512, "bert": 256, "blocks": 8}
"""Sequences of a peer's step."""


def our_row(name: str, small: bool) -> Row:
    preset, flags = OURS[name]
    _, device, groups = connect("auto")
    run = resolve(row(preset, {**flags, **(SMALL if small else {})}, 1), 1)
    speed = measure(name, run, 0, 1, device, groups, repeats=REPEATS, warmup=WARMUP)
    disconnect()
    fields = speed.fields()
    return {name: fields[name] for name in ("device", "seconds", "tokens_per_second", "mfu", "peak_gib", "phases")}


def stepped(
    network: Any, loss: Callable[[Any, torch.Tensor], torch.Tensor], ids: torch.Tensor, micro: int, whole: bool = True
) -> Row:
    """Measure a peer's step: microbatches, the norm of the gradients, and fused AdamW. whole: compile the network in
    one graph."""
    device = Device.choose("auto")
    forward = torch.compile(network) if whole else network
    rule = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    parts = ids.split(micro)

    def step() -> None:
        for part in parts:
            (loss(forward, part) / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        rule.step()
        rule.zero_grad(set_to_none=True)

    seconds = timed(step, device)
    return {"device": device.name, "seconds": seconds, "tokens_per_second": ids.numel() / seconds}


def nanogpt(model_py: str, dropout: float, small: bool) -> Row:
    spec = importlib.util.spec_from_file_location("nanogpt_model", model_py)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    size = {"n_layer": 24, "n_head": 16, "n_embd": 1024} if not small else {"n_layer": 2, "n_head": 4, "n_embd": 64}
    length, vocab, micro, count = (1024, 50304, 16, GLOBAL["nanogpt"]) if not small else (64, 512, 1, 2)
    device = Device.choose("auto").torch
    network = module.GPT(module.GPTConfig(block_size=length, vocab_size=vocab, dropout=dropout, **size)).to(device)
    ids = torch.randint(vocab, (count, length), device=device)

    def loss(forward: Any, part: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return forward(part, part)[1]  # type: ignore[no-any-return]

    return stepped(network, loss, ids, micro)


def transformers_bert(small: bool) -> Row:
    transformers: Any = importlib.import_module("transformers")
    size = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    if small:
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    length, micro, count = (512, 64, GLOBAL["bert"]) if not small else (64, 1, 2)
    device = Device.choose("auto").torch
    config = transformers.BertConfig(vocab_size=30592, attn_implementation="sdpa", **size)
    network = transformers.BertForPreTraining(config).to(device).train()
    for module in (network.bert.embeddings, *network.bert.encoder.layer, network.cls):
        module.compile()  # layer by layer: the compilation of all 24 layers in one graph takes more than five minutes
    ids = torch.randint(30000, (count, length), device=device)
    cross_entropy = torch.compile(torch.nn.functional.cross_entropy)

    def loss(forward: Any, part: torch.Tensor) -> torch.Tensor:
        labels = part.where(part % 7 == 0, -100)  # about 15 % of the tokens are predicted
        with torch.autocast(device.type, torch.bfloat16):
            found = forward(input_ids=part)
            words = cross_entropy(found.prediction_logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            return words + torch.nn.functional.cross_entropy(found.seq_relationship_logits, part[:, 0] % 2)

    return stepped(network, loss, ids, micro, whole=False)


def transformers_blocks(narrow: bool, small: bool) -> Row:
    transformers: Any = importlib.import_module("transformers")
    size = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 32}
    if small:
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    large = 4096, 32000, 8 if narrow else 2, GLOBAL["blocks"]
    length, vocab, micro, count = large if not small else (64, 512, 1, 2)
    device = Device.choose("auto").torch
    config = transformers.LlamaConfig(vocab_size=vocab, use_cache=False, attn_implementation="sdpa", **size)
    with torch.device(device):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if narrow:
        float8: Any = importlib.import_module("torchao.float8")
        float8.convert_to_float8_training(network, module_filter_fn=lambda module, name: "lm_head" not in name)
    ids = torch.randint(vocab, (count, length), device=device)
    return stepped(network, lambda forward, part: forward(input_ids=part, labels=part).loss, ids, micro)


def measured(name: str, asked: argparse.Namespace) -> Row:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if name in OURS:
        return our_row(name, asked.small)
    if name.startswith("nanogpt"):
        return nanogpt(asked.nanogpt, 0.1 if "dropout" in name else 0.0, asked.small)
    if name == "transformers bert":
        return transformers_bert(asked.small)
    return transformers_blocks(name.startswith("torchao"), asked.small)


def in_a_process(name: str, line: Sequence[str], timeout: float) -> Row:
    command = [sys.executable, "-m", "tests.gpu.training_peers", *line, "--one", name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"row": name, "error": f"took longer than {timeout:.0f} seconds"}
    if ended.returncode:
        return {"row": name, "error": ended.stderr.strip()[-800:]}
    found: Row = json.loads(ended.stdout.splitlines()[-1])
    return {"row": name, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nanogpt", help="path of nanoGPT's model.py; without it, the rows of nanoGPT are left out")
    parser.add_argument("--only", default=";".join(CASES), help="cases, with ; between")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no measurement after this time")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        print(json.dumps(measured(asked.one, asked)))
        return 0
    line = ["--out", str(asked.out), *(["--nanogpt", asked.nanogpt] if asked.nanogpt else [])]
    line += ["--small"] * asked.small
    end, failed = time.monotonic() + asked.seconds, 0
    with asked.out.open("a", encoding="utf-8") as file:
        for case in asked.only.split(";"):
            ours, peers = CASES[case]
            speeds: dict[str, float] = {}
            for name in (*ours, *peers):
                left = end - time.monotonic()
                if left <= 0 or (name.startswith("nanogpt") and not asked.nanogpt):
                    continue
                found = in_a_process(name, line, left)
                failed += "error" in found
                speeds[name] = found.get("tokens_per_second", float("nan"))
                if name in peers:
                    found["ratio"] = {each: speeds[each] / speeds[name] for each in ours if each in speeds}
                print(json.dumps(found), file=file, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
