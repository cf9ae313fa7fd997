"""1,000 random runs, each judged twice: by `mega memory-estimate` and by `mega pretrain --dry-run`.

    python tests/battery/estimates.py [--count 1000] [--limit N] [--out FILE]

The two must refuse the same runs in the same words. Of a run that neither refuses, the estimate must be consistent:
parts that add up to the peak, nothing negative, at least one microbatch in flight; its parameters are those of the
stages that the dry run builds on meta tensors, tensor rank by tensor rank; its step takes time, and its pipeline waits
for no more than the whole. Which values are drawn is a function of the item's number alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mega.api.estimation import planned
from mega.core.config.compose import compose
from mega.core.config.presets import PRESETS
from mega.core.config.resolve import data_parallel
from mega.core.config.run import Options, updated
from mega.core.estimate import show
from mega.core.estimate.hardware import hardware
from mega.core.estimate.memory import memory
from mega.core.estimate.steptime import step_time
from mega.core.parallel.mesh import Mesh
from mega.core.parallel.weight import local_parameters
from mega.core.training.start.dry_run import dry_run
from mega.core.training.start.inputs import open_inputs, resolve_run
from mega.core.training.wire import build_stages
from tests.battery.data_ledger import ROWS, commit

DEVICES = ("h200", "h100", "a100", "b200", "v100", "p100")


def drawn(number: int) -> tuple[str | None, dict[str, Any]]:
    """A preset or none, and flags; many of the runs break a rule."""
    rng = random.Random(number)
    preset = rng.choice([None, None, None, "tiny-gpt", "tiny-llama", "gpt2-124m", "llama2-7b", "gpt-22b", "llama3-8b"])
    flags: dict[str, Any] = {"device": rng.choice(["cuda", "cuda", "cpu"])}
    if preset is None:
        flags |= {
            "layers": rng.choice([1, 2, 3, 4, 6, 8, 12]),
            "hidden": rng.choice([32, 48, 64, 96, 100]),
            "heads": rng.choice([1, 2, 3, 4, 6, 8]),
            "seq_length": rng.choice([16, 32, 48, 64, 100]),
            "vocab": rng.choice([50, 127, 128, 1000]),
            "family": rng.choice(["gpt", "llama"]),
        }
    elif PRESETS[preset]["vocab"] is None and rng.random() < 0.95:
        flags["vocab"] = 777
    choices: dict[str, tuple[float, list[Any]]] = {
        "tp": (0.6, [1, 2, 2, 3, 4, 8]),
        "pp": (0.6, [1, 2, 2, 3, 4]),
        "cp": (0.25, [1, 2, 4]),
        "chunks": (0.2, [1, 2, 3]),
        "schedule": (0.3, ["1f1b", "gpipe", "interleaved", "zb-h1"]),
        "cp_comm": (0.15, ["auto", "ring", "all-to-all"]),
        "sequence_parallel": (0.5, [True, False]),
        "zero": (0.5, [0, 1, 2, 3]),
        "micro_batch": (0.97, [1, 1, 2, 3, 4]),
        "global_batch": (0.7, [4, 8, 12, 16, 48, 64]),
        "dtype": (0.8, ["fp32", "bf16", "fp16", "fp64"]),
        "grad_dtype": (0.1, ["fp32", "fp64", "bf16"]),
        "recompute": (0.4, ["none", "selective", "full", "full"]),
        "recompute_method": (0.25, ["uniform", "block"]),
        "recompute_layers": (0.25, [1, 2, 3]),
        "distribute_saved": (0.1, [True]),
        "kv_heads": (0.2, [1, 2, 4]),
        "ffn": (0.2, [64, 100, 192]),
        "tied": (0.3, [True, False]),
        "bias": (0.3, [True, False]),
        "qk_norm": (0.2, [True]),
        "norm": (0.2, ["layernorm", "rmsnorm"]),
        "norm_offset": (0.1, [True]),
        "activation": (0.3, ["gelu", "swiglu", "relu2"]),
        "position": (0.3, ["learned", "rope", "none"]),
        "hidden_dropout": (0.4, [0.0, 0.1]),
        "attention_dropout": (0.4, [0.0, 0.1]),
        "bucket_size": (0.2, [1, 5000, 40_000_000]),
        "ops": (0.1, ["reference"]),
        "vocab_multiple": (0.2, [1, 64, 128]),
        "reset_attention": (0.1, [True]),
        "world": (0.95, [1, 2, 4, 6, 8, 16, 24, 64]),
        "fp8": (0.15, [True]),
        "tp_overlap": (0.2, [True]),
        "cuda_graph": (0.2, [True]),
    }
    for name, (share, values) in choices.items():
        if rng.random() < share:
            flags[name] = rng.choice(values)
    if rng.random() < 0.7:
        repair(rng, preset, flags)
    return preset, flags


def repair(rng: random.Random, preset: str | None, flags: dict[str, Any]) -> None:
    """Most draws contradict themselves; make the usual contradictions good, so that enough runs are let through."""
    if flags.get("recompute") == "full":
        flags |= {"recompute_method": rng.choice(["uniform", "block"]), "recompute_layers": rng.choice([1, 2, 3])}
    else:
        for name in ("recompute_method", "recompute_layers", "distribute_saved"):
            flags.pop(name, None)
    if flags.get("schedule") != "interleaved":
        flags.pop("chunks", None)
    elif flags.setdefault("chunks", 2) == 1 or flags.get("pp", 1) == 1:
        del flags["chunks"], flags["schedule"]
    if flags.get("pp", 1) > 1:
        flags["zero"] = min(flags.get("zero", 0), 1)
    if flags.get("fp8"):
        flags["dtype"] = "bf16"
        flags.pop("tp_overlap", None)
    if flags.get("tp_overlap"):
        flags |= {"tp": rng.choice([2, 4, 8]), "sequence_parallel": True}
    if flags.get("pp", 1) > 1 or flags.get("zero", 0) > 1:
        flags.pop("cuda_graph", None)
    flags.pop("grad_dtype", None)
    flags.pop("norm_offset", None)
    if preset is None:
        flags |= {"hidden": 96, "heads": rng.choice([4, 8]), "layers": 12, "seq_length": 64}
        flags["family"] = rng.choice(["gpt", "llama"])
    flags.setdefault("micro_batch", 1)
    dp = rng.choice([1, 1, 2, 4])
    flags["world"] = flags.get("tp", 1) * flags.get("pp", 1) * flags.get("cp", 1) * dp
    flags["global_batch"] = flags["micro_batch"] * dp * flags.get("pp", 1) * rng.choice([1, 2, 5])


def refusal(judge: Any) -> str | None:
    try:
        judge()
    except ValueError as error:
        return str(error)
    return None


def dry(options: Options) -> None:
    """What `pretrain --dry-run` does, without its print."""
    options = updated(options, {"dry_run": True})
    world = options.runtime.world or 1
    with contextlib.redirect_stdout(io.StringIO()):
        dry_run(open_inputs(resolve_run(options, world)), world)


def judged(number: int) -> dict[str, Any]:
    """What one item shows. Errors: AssertionError where the two disagree or the estimate contradicts itself."""
    preset, flags = drawn(number)
    run = compose(preset, flags={**flags, "dry_run": True})
    found: dict[str, Any] = {}
    refused = refusal(lambda: found.update(run=planned(run)))
    said = refusal(lambda: dry(run))
    assert refused == said, (refused, said)
    if refused is not None:
        assert refused and all(": " in line or "is missing" in line for line in refused.splitlines()), refused
        return {"refused": refused}
    resolved, world = found["run"]
    needs = memory(resolved, world)
    dp = data_parallel(resolved, world)
    parallel = resolved.parallel
    for stage in needs.stages:
        sizes = show.parts(stage)
        assert sum(sizes.values()) == stage.peak and min(sizes.values()) >= 0, sizes
        assert stage.live >= 1 and stage.when != "never", stage
        for tensor in {0, parallel.tp - 1}:
            rank = tensor + stage.stage * parallel.tp * parallel.cp * dp
            mesh = Mesh.at(rank, tp=parallel.tp, cp=parallel.cp, dp=dp, pp=parallel.pp)
            built = sum(local_parameters(chunk) for chunk in build_stages(resolved, mesh, torch.device("meta")))
            ours = stage.held.parameters
            assert built == ours, (stage.stage, tensor, built, ours)
    device = hardware(DEVICES[number % len(DEVICES)])
    step = step_time(resolved, world, device)
    assert step.seconds > 0 and -1e-9 <= step.bubble < 1 and step.mfu < 1, step
    assert json.loads(json.dumps(show.as_json(resolved, world, needs, device)))["peak"] == needs.worst.peak
    return {"peak": needs.worst.peak, "stages": len(needs.stages), "seconds": step.seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=10**9, help="items of this launch")
    parser.add_argument("--out", type=Path, default=ROWS / "estimates.jsonl", help="file of rows: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    here = commit()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    rows = {row["item"]: row for row in map(json.loads, lines) if row["commit"] == here}
    todo = [number for number in range(options.count) if number not in rows][: options.limit]
    with options.out.open("a", encoding="utf-8") as out:
        for number in todo:
            began = time.perf_counter()
            try:
                verdict = {"fine": True, **judged(number)}
            except Exception as error:  # any other than ValueError is a finding
                verdict = {"fine": False, "error": f"{type(error).__name__}: {error}"[:400], "drawn": drawn(number)}
                print(number, verdict, flush=True)
            took = round(time.perf_counter() - began, 3)
            rows[number] = {"item": number, "commit": here, "date": str(date.today()), "took": took, **verdict}
            out.write(json.dumps(rows[number]) + "\n")
            out.flush()
    bad = [number for number, row in rows.items() if not row["fine"]]
    refused = sum("refused" in row for row in rows.values())
    print(
        f"{len(rows)} runs on {here}: {refused} refused alike, {len(rows) - refused - len(bad)} agree, {len(bad)} fail"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
