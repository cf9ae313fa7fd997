"""What `mega memory-estimate` predicts, beside what is measured: peaks of memory and step times.

    python tests/gpu/estimates.py --nproc 4 --out rows.jsonl [--sets choices] [--only "NAME;NAME"] [--seconds 540]
    python tests/gpu/estimates.py --compare rows.jsonl                     (no device: predict the same rows anew)

Sets of rows, the most telling first; the last two where --sets names them:

    choices    GPT 22B and Llama-2 7B whole, in the layouts that the planner likes best; the first choice first
    alone      one rank's work; every rank of the launch measures another row of them at the same time
    layouts    slices of real shapes on all ranks: tp, pp by each schedule, cp, ZeRO 0 to 3, recompute, bf16 and fp16
    beyond     one row that does not fit, and is predicted so
    families   one rank's work of BERT and T5, as `alone`; family-layouts: of all ranks, as `layouts`

This process only starts ranks. A row that may not fit gets ranks of its own, in which nothing lies from the row before;
the rows of `alone` and of `layouts` share theirs. A rank that runs out of memory leaves its peers in a collective: it
says so in the file and ends, which ends its peers, and the next row gets new ranks. A row is appended as soon as it is
known, so a launch that was cut short goes on where it stopped. Peaks are bytes, one for each pipeline stage, the most
of its ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.config.resolve import data_parallel, resolve
from mega.core.config.run import Options, RunConfig
from mega.core.estimate.hardware import Hardware, hardware
from mega.core.estimate.memory import memory
from mega.core.estimate.search import search
from tests.estimate.rows import (
    Judged,
    as_recorded,
    device_of,
    judged,
    peak_errors,
    predicted,
    read_rows,
    recorded_run,
    second_errors,
)

Flags = dict[str, Any]

QUIET: Flags = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
FULL: Flags = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
LLAMA: Flags = {"preset": "llama2-7b", "layers": 4, "micro_batch": 1}
GPT: Flags = {"preset": "gpt-22b", "layers": 4, "micro_batch": 1, **QUIET}

ALONE: Mapping[str, Flags] = {
    "llama": {**LLAMA, "global_batch": 4},
    "gpt": {**GPT, "micro_batch": 2, "global_batch": 8},
    "llama selective": {**LLAMA, "global_batch": 4, "recompute": "selective"},
    "gpt full": {**GPT, **FULL, "micro_batch": 4, "global_batch": 16},
    "llama fp16, full 2": {
        **LLAMA,
        **FULL,
        "recompute_layers": 2,
        "micro_batch": 2,
        "global_batch": 8,
        "dtype": "fp16",
        "initial_loss_scale": 65536.0,
    },
    "gpt fp16": {**GPT, "micro_batch": 4, "global_batch": 8, "dtype": "fp16", "initial_loss_scale": 65536.0},
    "gpt dropout": {"preset": "gpt-22b", "layers": 3, "micro_batch": 1, "global_batch": 4},
    "llama block 2": {**LLAMA, **FULL, "recompute_method": "block", "recompute_layers": 2, "global_batch": 4},
    "llama3 8b": {"preset": "llama3-8b", "layers": 3, "micro_batch": 1, "global_batch": 2},
    "gpt 345m": {"preset": "gpt2-345m", **QUIET, "micro_batch": 16, "global_batch": 32, "vocab": 50304},
    "llama2 70b": {"preset": "llama2-70b", "layers": 2, "micro_batch": 1, "global_batch": 4},
    "gpt selective": {**GPT, "micro_batch": 4, "global_batch": 8, "recompute": "selective"},
    "llama fp8": {**LLAMA, "global_batch": 4, "fp8": True},
    "gpt fp8, selective": {**GPT, "micro_batch": 4, "global_batch": 8, "recompute": "selective", "fp8": True},
    "llama fp8, full": {**LLAMA, **FULL, "micro_batch": 2, "global_batch": 8, "fp8": True},
    "gpt 345m, one by one": {"preset": "gpt2-345m", **QUIET, "micro_batch": 1, "global_batch": 16, "vocab": 50304},
    "gpt 345m, four by four": {"preset": "gpt2-345m", **QUIET, "micro_batch": 4, "global_batch": 64, "vocab": 50304},
}
BERT: Flags = {"preset": "bert-345m", "micro_batch": 16, "global_batch": 32}
T5: Flags = {"preset": "t5-220m", "micro_batch": 16, "global_batch": 32}
FAMILIES: Mapping[str, Flags] = {
    "bert": BERT,
    "bert, no dropout": {**BERT, **QUIET, "micro_batch": 32},
    "bert words alone": {**BERT, "binary_head": False},
    "bert 110m": {**BERT, "preset": "bert-110m", "micro_batch": 64, "global_batch": 64},
    "bert selective": {**BERT, "recompute": "selective", "micro_batch": 32},
    "bert full": {**BERT, **FULL, "micro_batch": 64, "global_batch": 64},
    "bert fp16": {**BERT, "dtype": "fp16", "initial_loss_scale": 65536.0},
    "bert 1.3b": {**BERT, "preset": "bert-1.3b", "micro_batch": 8},
    "bert 3.9b, 8 blocks": {**BERT, "preset": "bert-3.9b", "layers": 8},
    "t5": T5,
    "t5, no dropout": {**T5, **QUIET, "micro_batch": 32},
    "t5 four by four": {**T5, "micro_batch": 4},
    "t5 selective": {**T5, "recompute": "selective", "micro_batch": 32},
    "t5 full": {**T5, **FULL, "micro_batch": 64, "global_batch": 64},
    "t5 fp16": {**T5, "dtype": "fp16", "initial_loss_scale": 65536.0},
    "t5 770m": {**T5, "preset": "t5-770m", "micro_batch": 8},
    "t5 3b, 6 + 6 blocks": {**T5, "preset": "t5-3b", "layers": 6, "micro_batch": 4, "global_batch": 8},
    "t5 deep decoder": {**T5, "layers": 6, "decoder_layers": 18},
}
SINGLE: Mapping[str, Flags] = {
    "w1 dropout": {"preset": "gpt2-345m", "vocab": 50304, "micro_batch": 64, "global_batch": 128},
    "gpt 345m, one by one": ALONE["gpt 345m, one by one"],
    "gpt dropout": ALONE["gpt dropout"],
    "llama": ALONE["llama"],
    "bert": BERT,
    "t5": T5,
    "w1": {"preset": "gpt2-345m", **QUIET, "vocab": 50304, "micro_batch": 64, "global_batch": 128},
    "gpt 345m, four by four": ALONE["gpt 345m, four by four"],
    "gpt selective": ALONE["gpt selective"],
    "llama 32k": {**LLAMA, "layers": 2, "seq_length": 32768, "global_batch": 2},
    "llama fp8": ALONE["llama fp8"],
    "bert, no dropout": {**BERT, **QUIET, "micro_batch": 32},
    "t5, no dropout": {**T5, **QUIET, "micro_batch": 32},
    "eager": {**ALONE["gpt 345m, one by one"], "global_batch": 4, "cuda_graph": False},
    "window": {"preset": "mistral-7b", "layers": 4, "seq_length": 16384, "micro_batch": 1, "global_batch": 2},
    "llama full": {**LLAMA, **FULL, "global_batch": 4},
    "bert 110m": {**BERT, "preset": "bert-110m", "micro_batch": 64, "global_batch": 64},
    "llama3 8b": ALONE["llama3 8b"],
    "adapters": {**LLAMA, "global_batch": 4, "lora_rank": 16},
    "t5 four by four": {**T5, "micro_batch": 4},
}
FAMILY_LAYOUTS: Mapping[str, Flags] = {
    "bert tp2": {**BERT, "tp": 2, "sequence_parallel": True, "global_batch": 64},
    "bert pp2": {**BERT, "pp": 2, "global_batch": 64},
    "bert cp2": {**BERT, "cp": 2, "global_batch": 64},
    "bert zero 3": {**BERT, "zero": 3, "global_batch": 64},
    "t5 tp2, zero 1": {**T5, "tp": 2, "sequence_parallel": True, "zero": 1, "global_batch": 64},
    "t5 split": {**T5, "pp": 2, "split_rank": 1, "global_batch": 64},
    "t5 interleaved": {**T5, "pp": 2, "chunks": 2, "global_batch": 64},
    "t5 zero-bubble": {**T5, "pp": 2, "schedule": "zb-h1", "global_batch": 64},
    "t5 zero 3": {**T5, "zero": 3, "global_batch": 64},
}
LAYOUTS: Mapping[str, Flags] = {
    "llama tp2 pp2": {**LLAMA, "layers": 8, "tp": 2, "pp": 2, "sequence_parallel": True, "global_batch": 8},
    "gpt tp4": {**GPT, "tp": 4, "sequence_parallel": True, "micro_batch": 4, "global_batch": 16},
    "llama zero 1": {**LLAMA, "zero": 1, "global_batch": 8},
    "gpt tp2 selective, zero 1": {
        **GPT, "tp": 2, "sequence_parallel": True, "zero": 1, "recompute": "selective", "micro_batch": 2,
        "global_batch": 16,
    },
    "llama zero 3": {**LLAMA, "zero": 3, "global_batch": 8},
    "gpt pp4": {**GPT, "layers": 8, "pp": 4, "global_batch": 16},
    "llama interleaved": {**LLAMA, "layers": 8, "pp": 4, "chunks": 2, "global_batch": 8},
    "gpt zero-bubble": {**GPT, "layers": 8, "pp": 4, "schedule": "zb-h1", "global_batch": 16},
    "llama zero 2": {**LLAMA, "zero": 2, "global_batch": 8},
    "llama cp2": {**LLAMA, "cp": 2, "global_batch": 8},
    "llama ring, tp2, zero 1": {
        **LLAMA, "cp": 2, "cp_comm": "ring", "tp": 2, "sequence_parallel": True, "zero": 1, "global_batch": 4,
        "seq_length": 8192,
    },
    "gpt interleaved fp16": {
        **GPT, "tp": 2, "pp": 2, "chunks": 2, "sequence_parallel": True, "global_batch": 16, "micro_batch": 2,
        "dtype": "fp16", "initial_loss_scale": 65536.0,
    },
    "gpt tp2 plain, zero 1": {**GPT, "tp": 2, "zero": 1, "recompute": "selective", "global_batch": 16},
    "llama tp4 full": {**LLAMA, **FULL, "tp": 4, "sequence_parallel": True, "micro_batch": 4, "global_batch": 16},
    "gpt tp2 pp2 block 1": {
        **GPT, **FULL, "recompute_method": "block", "tp": 2, "pp": 2, "sequence_parallel": True, "micro_batch": 2,
        "global_batch": 16,
    },
    "llama pp2 zero 1": {**LLAMA, "pp": 2, "zero": 1, "recompute": "selective", "global_batch": 16},
    "gpt dp4": {**GPT, "layers": 3, "micro_batch": 2, "global_batch": 16},
    "llama tp2 zero 3": {**LLAMA, "tp": 2, "zero": 3, "sequence_parallel": True, "global_batch": 8},
    "gpt zero 2 full": {**GPT, **FULL, "zero": 2, "micro_batch": 2, "global_batch": 16},
    "llama zero-bubble tp2": {
        **LLAMA, "layers": 8, "tp": 2, "pp": 2, "schedule": "zb-h1", "sequence_parallel": True, "global_batch": 8,
    },
    "llama ring cp4": {**LLAMA, "cp": 4, "cp_comm": "ring", "seq_length": 16384, "global_batch": 2},
    "gpt gpipe": {**GPT, "layers": 8, "pp": 4, "schedule": "gpipe", "recompute": "selective", "global_batch": 8},
    "gpt tp4 plain dropout": {"preset": "gpt-22b", "layers": 4, "tp": 4, "micro_batch": 2, "global_batch": 8},
    "gpt tp2 beside": {
        **GPT, "layers": 8, "tp": 2, "sequence_parallel": True, "tp_overlap": True, "micro_batch": 4, "global_batch": 8,
    },
    "llama tp2 beside, selective": {
        **LLAMA, "layers": 8, "tp": 2, "sequence_parallel": True, "tp_overlap": True, "recompute": "selective",
        "micro_batch": 2, "global_batch": 8,
    },
    "llama tp2 fp8": {**LLAMA, "layers": 8, "tp": 2, "sequence_parallel": True, "fp8": True, "global_batch": 8},
}  # fmt: skip
BEYOND: Mapping[str, Flags] = {
    "llama beyond": {"preset": "llama2-7b", "layers": 40, "micro_batch": 1, "global_batch": 4},
}
"""To run out of memory, and to be predicted so."""

CHOICES: Mapping[str, Flags] = {
    "gpt-22b": {"preset": "gpt-22b", "global_batch": 16, **QUIET},
    "llama2-7b": {"preset": "llama2-7b", "global_batch": 16},
    "gpt-22b by adafactor": {"preset": "gpt-22b", "global_batch": 16, "optimizer": "adafactor", **QUIET},
    "gpt-22b's half": {"preset": "gpt-22b", "layers": 24, "global_batch": 8, **QUIET},
    "gpt-22b's quarter": {"preset": "gpt-22b", "layers": 12, "global_batch": 8, **QUIET},
}
"""On 2 devices half of the blocks leave each as much to hold as the whole on 4, a quarter as much as the whole on 8.
All of them lie there where the optimizer keeps no moments of full size."""

SETS: Mapping[str, Mapping[str, Flags]] = {
    "alone": ALONE,
    "layouts": LAYOUTS,
    "beyond": BEYOND,
    "families": FAMILIES,
    "single": SINGLE,
    "family-layouts": FAMILY_LAYOUTS,
}
"""Those that are not chosen by the planner."""

DEFAULT_GPU = "h200"
"""The device of predictions that are stored with a measured row."""

COUNT = 8
"""Layouts of each choice that are measured."""


def run_of(flags: Flags, device: str) -> Options:
    """A row's run as typed. On a CPU the same layout of a model that is small."""
    typed = {"lr": 1e-4, "steps": 8, "mock_data": True, "dtype": "bf16", "device": device, **flags}
    preset = typed.pop("preset")
    if device == "cpu":
        typed |= {"hidden": 64, "heads": 8, "ffn": 128, "seq_length": 64, "vocab": 256, "dtype": "fp32"}
        typed |= {"kv_heads": 8} if "llama" in preset else {}
        typed |= {"head_dim": 8, "decoder_seq_length": 32} if "t5" in preset else {}
        typed["layers"] = min(typed.get("layers", 8), 8)
    return compose(preset, flags=typed)


def choices(world: int, device: str, on: Hardware) -> Iterator[tuple[str, Flags]]:
    """The planner's favourites: its first four, then the best of every other (tp, pp, recompute)."""
    for name, flags in CHOICES.items():
        found = search(run_of({**flags, "micro_batch": 1}, device), world, on, keep=64).candidates
        seen: set[tuple[Any, ...]] = set()
        others = []
        for place, candidate in enumerate(found):
            layout_of = candidate.options
            kind = (layout_of["tp"], layout_of["pp"], layout_of["recompute"])
            if place >= 4 and kind not in seen:
                others.append(candidate)
            seen.add(kind)
        for place, candidate in enumerate([*found[:4], *others][:COUNT]):
            options: dict[str, Any] = {key: value for key, value in candidate.options.items() if value is not None}
            layout = " ".join(f"{key}{options[key]}" for key in ("tp", "pp", "chunks", "micro_batch", "recompute"))
            layout += f" zero{options['zero']}" if options["zero"] > 1 else ""
            layout += " zb-h1" if options["schedule"] == "zb-h1" else ""
            yield f"{name} choice {place}: {layout}", {**flags, **options}


class Row(NamedTuple):
    """A run to be measured. alone: by one rank, beside others. apart: in ranks that measure nothing else."""

    name: str
    flags: Flags
    alone: bool = False
    apart: bool = False


def rows(options: argparse.Namespace, on: Hardware) -> Iterator[Row]:
    """All rows that are asked for, in order."""
    only = tuple(options.only.split(";"))
    for name in options.sets.split(","):
        named: Mapping[str, Flags] = SETS.get(name, {})
        if name == "choices":
            named = dict(choices(options.nproc, _kind(options.device), on))
        for title, flags in named.items():
            alone = name in ("alone", "families", "single")
            cells = 1 if alone else flags.get("tp", 1) * flags.get("pp", 1) * flags.get("cp", 1)
            if title.startswith(only) and options.nproc % cells == 0:
                yield Row(title, flags, alone=alone, apart=name in ("choices", "beyond"))


def conduct(options: argparse.Namespace) -> int:
    """Start ranks for the rows that are left, until none is or the time is over; 1 if ranks could not even begin."""
    from mega.core.processes.launch import launch

    until, out = time.monotonic() + options.seconds, Path(options.out)
    asked = list(rows(options, hardware(options.gpu or DEFAULT_GPU)))
    _bury(out)
    while True:
        done = {record["name"] for record in _records(out)}
        left = [row for row in asked if row.name not in done]
        if not left or time.monotonic() > until:
            return 0
        first = left[0]
        mates = [row for row in left if not row.apart and row.alone == first.alone]
        code = launch(options.nproc, measure_rows, options, [first] if first.apart else mates, until)
        _bury(out)
        if code and len(done) == len({record["name"] for record in _records(out)}):
            return 1


def _bury(path: Path) -> None:
    """Rows that were begun and have no end have died with their ranks."""
    records = _records(path)
    ended = {record["name"] for record in records if record["outcome"] != "begun"}
    for name, record in {record["name"]: record for record in records}.items():
        if name not in ended:
            _append(path, {**record, "outcome": "died"})


def measure_rows(options: argparse.Namespace, together: Sequence[Row], until: float) -> None:
    """One rank's part of a launch."""
    from mega.core.processes.connect import disconnect

    bench = Bench(options)
    alone, rank, world = together[0].alone, bench.world.rank, bench.world.size
    bench.late(until)  # nobody leaves before all have come
    for row in together[rank::world] if alone else together:
        if time.monotonic() > until if alone else bench.late(until):
            break
        bench.row(row, rank=0 if alone else rank, world=1 if alone else world)
    disconnect()


class Bench:
    """One launch, seen from one of its ranks."""

    def __init__(self, options: argparse.Namespace):
        from mega.core.processes.connect import connect

        self.options, self.out = options, Path(options.out)
        self.world, self.device, self.groups = connect(options.device)
        self.kind = self.device.torch.type
        self.on = hardware(options.gpu or DEFAULT_GPU)

    def note(self, record: dict[str, Any]) -> None:
        _append(
            self.out, {"world": self.world.size, "device": self.device.name, "commit": self.options.commit, **record}
        )

    def late(self, until: float) -> bool:
        """Whether the time is over, by the last rank's clock."""
        import torch

        from mega.core.parallel.collectives import all_reduce
        from mega.core.parallel.mesh import Mesh

        over = torch.tensor(time.monotonic() - until, dtype=torch.float64, device=self.device.torch)
        all_reduce(over, Mesh(self.world.rank, dp=self.world.size, groups=self.groups).everyone, "max")
        return float(over) > 0

    def row(self, row: Row, *, rank: int, world: int) -> None:
        """Measure it and write what came of it, as rank `rank` of `world`."""
        import torch

        record: dict[str, Any] = {"name": row.name, "ranks": world}
        typed = run_of(row.flags, self.kind)
        try:
            check(typed, world)
        except ValueError as error:
            if rank == 0:
                self.note({**record, "outcome": "refused", "error": str(error)})
            return
        run = resolve(typed, world)
        record |= {"slopes": True, "activations": True, "hopper": True}  # the kernels, see tests/estimate/rows.py
        record |= {"run": as_recorded(run, world), "predicted": predicted(run, world, self.on)}
        if rank == 0:
            self.note({**record, "outcome": "begun"})
        try:
            found = self.measured(row, run, rank, world)
        except torch.OutOfMemoryError as error:
            self.note({**record, "outcome": "out of memory", "rank": rank, "error": str(error).splitlines()[0]})
            if world > 1:
                os._exit(3)  # peers wait in a collective: whoever launched us ends them
            self.device.release()
            return
        if rank == 0:
            record |= {**found, "outcome": "measured"}
            self.note(record)
            print(Judged(record, record["predicted"]), flush=True)

    def measured(self, row: Row, run: RunConfig, rank: int, world: int) -> dict[str, Any]:
        import torch

        from mega.core.bench.training import measure
        from mega.core.parallel.collectives import all_reduce
        from mega.core.parallel.mesh import Mesh

        began, before, options = time.perf_counter(), self.device.resident(), self.options
        speed = measure(
            row.name,
            run,
            rank,
            world,
            self.device,
            self.groups,
            warmup=1 if row.apart else options.warmup,
            repeats=2 if row.apart else options.repeats,
            profiled=not row.apart and options.profile,
        )
        stages = run.parallel.pp
        peaks = torch.zeros(3, stages, dtype=torch.float64, device=self.device.torch)
        stage = rank // (world // stages)
        peaks[0, stage] = speed.peak_gib * 2**30
        peaks[1:, stage] = torch.tensor(_reserved(self.device.torch), dtype=torch.float64)
        parallel = run.parallel
        mesh = Mesh(
            rank,
            tp=parallel.tp,
            cp=parallel.cp,
            pp=stages,
            dp=data_parallel(run, world),
            groups=self.groups if world > 1 else None,
        )
        all_reduce(peaks, mesh.everyone, "max")
        return {
            "peaks": [int(peak) for peak in peaks[0].tolist()],
            "reserved": [int(peak) for peak in peaks[1].tolist()],
            "outside": [int(peak) for peak in peaks[2].tolist()],
            "before": before,
            "seconds": speed.seconds,
            "spread": speed.spread,
            "phases": speed.phases,
            "row_seconds": round(time.perf_counter() - began, 1),
        }


def _kind(device: str) -> str:
    """cuda or cpu; asking makes no context on a device."""
    import torch

    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _reserved(device: Any) -> tuple[int, int]:
    """The most that the allocator took from the device, and what was given out beside it (contexts, NCCL)."""
    import torch

    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device), total - free - torch.cuda.memory_reserved(device)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """One line of the file, on the disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _records(path: Path) -> list[dict[str, Any]]:
    return read_rows(path) if path.exists() else []


def compare(path: Path, gpu: str | None) -> int:
    """Predict every measured row again and judge: medians and worst of what the estimate promises."""
    rows = read_rows(path)
    on = None if gpu is None else hardware(gpu)
    best: dict[str, list[tuple[float, str]]] = {}
    found = []
    for one in judged(rows, on):
        print(one)
        found.append(one)
        if " choice " in one.name:
            best.setdefault(one.name.split(" choice ")[0], []).append((one.row["seconds"], one.name))
    for row in {row["name"]: row for row in rows if row["outcome"] in ("out of memory", "died")}.values():
        world, device = int(row.get("ranks", row["world"])), on or device_of(row)
        needs = memory(recorded_run(row["run"]), world).needed(device.communicator)
        print(f"{row['name']:<62} {row['outcome']}; predicted {needs:.1f} of {device.memory:g} GiB")
    for row in rows:
        if row["outcome"] == "retired":
            print(f"{row['name']:<62} retired: {row['because']}")
    for name, measured in best.items():
        first = next((seconds for seconds, title in measured if " choice 0:" in title), None)
        fastest, title = min(measured)
        distance = "has not been measured" if first is None else f"is {first / fastest - 1:+.1%} from the best"
        print(f"{name}: the planner's first {distance} of {len(measured)} (best: {title})")
    if not found:
        return 1
    peaks = peak_errors(found)
    print(f"peaks: {peaks}")
    if not any(one.seconds is not None for one in found):
        return int(peaks.median > 0.03 or peaks.worst > 0.08)
    steps = second_errors(found)
    print(f"step times: {steps}")
    return int(peaks.median > 0.03 or peaks.worst > 0.08 or steps.median > 0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="estimates.jsonl")
    parser.add_argument("--compare", type=Path, help="a file of rows to predict anew; nothing is measured")
    parser.add_argument("--gpu", help="the device of the prediction, or a TOML file; --compare: else each row's own")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="how names of rows begin, with ; between")
    parser.add_argument("--sets", default="choices,alone,layouts,beyond")
    parser.add_argument("--nproc", type=int, default=1, help="ranks, one a device")
    parser.add_argument("--seconds", type=float, default=280.0, help="begin no row after so long")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--commit", default=None, help="what the rows are marked with")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    if options.compare is not None:
        return compare(options.compare, options.gpu)
    return conduct(options)


if __name__ == "__main__":
    sys.exit(main())
