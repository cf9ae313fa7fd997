"""The rows of the original recipes in one launch, by turns: a row is measured again when every other has been.

    python3 -m tests.gpu.recipes --out rows.jsonl [--only "w1 dropout;w1"] [--rounds 3] [--seconds 540]
        [--repeats 7] [--warmup 5] [--tiny]

Each measurement is one JSON line, appended as it is known: the row of `mega bench`, with the time by kind of kernel the
first time. A later launch continues where the file ends. A row that would not fit the seconds that are left is not
begun, as far as its time is known. --tiny: the same with small models on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega.core.bench.rows import row
from mega.core.bench.training import measure
from mega.core.config.resolve import resolve
from mega.core.processes.connect import connect, disconnect

_BLOCKS = {"layers": 8, "global_batch": 8}
_SMALL = {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50257}

ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "w1": ("w1", {}),
    "w1 dropout": ("w1", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "w1 hidden dropout": ("w1", {"hidden_dropout": 0.1}),
    "w1 muon": ("w1", {"optimizer": "muon"}),
    "w1 small": ("w1", {"global_batch": 64}),
    "w1 small muon": ("w1", {"global_batch": 64, "optimizer": "muon"}),
    "7b rows": ("w2", _BLOCKS),
    "7b documents": ("w2", {**_BLOCKS, "reset_attention": True}),
    "window": ("window", {}),
    "window causal": ("window", {"window": 16384}),
    "bert": ("bert", {}),
    "t5": ("t5", {"global_batch": 256}),
    "345m micro 1": ("w1", {"micro_batch": 1, "global_batch": 16}),
    "124m micro 16": ("w1", {**_SMALL, "micro_batch": 16, "global_batch": 16}),
    "w2": ("w2", {}),
    "w2-fp8": ("w2-fp8", {}),
}
"""Name -> a row of `mega bench`, and its flags."""

TINY: Mapping[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 2, "kv_heads": None, "ffn": 64, "vocab": 96, "seq_length": 32,
    "micro_batch": 1, "global_batch": 2, "device": "cpu",
}  # fmt: skip


def lines_of(path: Path, commit: str | None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["commit"] == commit]


def due(lines: Sequence[Mapping[str, Any]], names: Sequence[str], rounds: int, left: float) -> str | None:
    """The row whose turn it is, of those that fit `left` seconds as far as is known; None: all are done, or none fits.

    >>> lines = [{"row": "a", "wall": 60.0}, {"row": "b", "wall": 5.0}, {"row": "a", "wall": 50.0}]
    >>> [due(lines, "ab", 2, left) for left in (100, 4)], due(lines, "ab", 1, 100), due(lines, "ac", 2, 30)
    (['b', None], None, 'c')
    """
    walls = {name: [line["wall"] for line in lines if line["row"] == name] for name in names}
    fit = [name for name in names if len(walls[name]) < rounds and max(walls[name], default=0.0) <= left]
    return min(fit, key=lambda name: len(walls[name]), default=None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=";".join(ROWS), help="rows, with ; between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of a measurement, and before those")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--commit", default=None, help="what the lines are marked with")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(arguments)
    begun, names = time.monotonic(), asked.only.split(";")
    world, device, groups = connect("cpu" if asked.tiny else "cuda")
    lines = lines_of(asked.out, asked.commit)
    while (name := due(lines, names, asked.rounds, begun + asked.seconds - time.monotonic())) is not None:
        start, (base, flags) = time.monotonic(), ROWS[name]
        first = all(line["row"] != name for line in lines)
        line: dict[str, Any] = {"row": name, "commit": asked.commit}
        try:
            run = resolve(row(base, {**flags, **(TINY if asked.tiny else {})}, world.size), world.size)
            counts = {"repeats": asked.repeats, "warmup": asked.warmup}
            speed = measure(name, run, world.rank, world.size, device, groups, profiled=first, **counts)
            line |= speed.fields()
            said = f"{speed.tokens_per_second:,.0f} tokens/s, {1e3 * speed.seconds:,.1f} ms, spread {speed.spread:.1%}"
        except (ValueError, RuntimeError) as error:
            line["error"] = said = f"{type(error).__name__}: {error}"[:500]
        gc.collect()
        device.release()
        line["wall"] = time.monotonic() - start
        lines.append(line)
        print(f"{name}: {said}", flush=True)
        with asked.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    for name in names:
        speeds = [line["tokens_per_second"] for line in lines if line["row"] == name and "error" not in line]
        print(f"{name}: {f'{statistics.median(speeds):,.0f} tokens/s, of {len(speeds)}' if speeds else 'not measured'}")
    disconnect()
    return int(any("error" in line for line in lines if line["row"] in names))


if __name__ == "__main__":
    raise SystemExit(main())
