"""What `mega memory-estimate` predicts, beside what is measured: peaks of memory and step times, in one process group.

    torchrun --nproc-per-node 4 --max-restarts 6 tests/gpu/estimates.py --out rows.jsonl [--only "NAME;NAME"]
    python tests/gpu/estimates.py --compare rows.jsonl                     (no device: predict the same rows anew)

Four sets of rows, the most telling first:

    alone      one rank's work; every rank of the launch measures another row of them at the same time
    layouts    slices of real shapes on all ranks: tp, pp by each schedule, cp, ZeRO 0 to 3, recompute, bf16 and fp16
    choices    Llama-2 7B and GPT 22B whole, in the layouts that the planner likes best
    beyond     one row that does not fit, and is predicted so

A row is appended as soon as it is known, so a launch that was cut short goes on where it stopped. A rank that runs out
of memory leaves its peers in a collective: it says so in the file and dies, and torchrun starts all ranks again for the
rows that are left. Peaks are bytes, one for each pipeline stage, the most of its ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mega.core.config.check import check
from mega.core.config.compose import compose
from mega.core.config.resolve import data_parallel, resolve
from mega.core.config.run import RunConfig
from mega.core.estimate.hardware import Hardware, hardware
from mega.core.estimate.memory import memory
from mega.core.estimate.search import search
from mega.core.estimate.steptime import step_time

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
}  # fmt: skip
BEYOND: Mapping[str, Flags] = {
    "llama beyond": {"preset": "llama2-7b", "layers": 40, "micro_batch": 1, "global_batch": 4},
}
"""To run out of memory, and to be predicted so."""

CHOICES: Mapping[str, Flags] = {
    "llama2-7b": {"preset": "llama2-7b", "global_batch": 16},
    "gpt-22b": {"preset": "gpt-22b", "global_batch": 16, **QUIET},
}
COUNT = 8
"""Layouts of each choice that are measured."""


def run_of(flags: Flags, device: str) -> RunConfig:
    """A row's run as typed. On a CPU the same layout of a model that is small."""
    typed = {"lr": 1e-4, "steps": 8, "mock_data": True, "dtype": "bf16", "device": device, **flags}
    preset = typed.pop("preset")
    if device == "cpu":
        typed |= {"hidden": 64, "heads": 8, "ffn": 128, "seq_length": 64, "vocab": 256, "dtype": "fp32"}
        typed |= {"kv_heads": 8} if "llama" in preset else {}
        typed["layers"] = min(typed.get("layers", 8), 8)
    return compose(preset, flags=typed)


def choices(world: int, device: str, on: Hardware) -> Iterator[tuple[str, Flags]]:
    """The planner's favourites: its first four, then the best of every other (tp, pp, recompute)."""
    for name, flags in CHOICES.items():
        found = search(run_of({**flags, "micro_batch": 1}, device), world, on, keep=64).candidates
        seen: set[tuple[Any, ...]] = set()
        others = []
        for place, candidate in enumerate(found):
            options = candidate.options
            kind = (options["tp"], options["pp"], options["recompute"])
            if place >= 4 and kind not in seen:
                others.append(candidate)
            seen.add(kind)
        chosen = list(enumerate([*found[:4], *others][:COUNT]))
        # Communicators pile up in a process that tries many layouts: the fullest goes first.
        for place, candidate in sorted(chosen, key=lambda one: -one[1].need):
            options = {key: value for key, value in candidate.options.items() if value is not None}
            layout = " ".join(f"{key}{options[key]}" for key in ("tp", "pp", "chunks", "micro_batch", "recompute"))
            yield f"{name} choice {place}: {layout}", {**flags, **options}


def predicted(run: RunConfig, world: int, on: Hardware) -> dict[str, Any]:
    """Peaks in bytes, seconds, and when the worst stage has its peak."""
    needs, time_ = memory(run, world), step_time(run, world, on)
    return {
        "peaks": [stage.peak for stage in needs.stages],
        "when": needs.worst.when,
        "need": needs.needed(on.communicator),
        "seconds": time_.seconds,
        "bubble": time_.bubble,
        "reduction": time_.reduction,
        "update": time_.update,
    }


class Bench:
    """One launch: its ranks, its file, and the rows that it has done."""

    def __init__(self, options: argparse.Namespace):
        from mega.core.parallel.launch import connect

        self.options, self.out = options, Path(options.out)
        self.world, self.device, self.groups = connect(options.device)
        self.kind = self.device.torch.type
        self.on = hardware(options.gpu)
        self.before = _records(self.out)
        self.begun = time.monotonic()

    def note(self, record: dict[str, Any]) -> None:
        """One line of the file, on the disk when this returns."""
        line = json.dumps({"world": self.world.size, "device": self.device.name, **record}) + "\n"
        with self.out.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def todo(self, rows: Mapping[str, Flags]) -> dict[str, Flags]:
        """Rows without an end in the file; one that was begun by an earlier launch and never ended has died."""
        ended = {record["name"] for record in self.before if record["outcome"] != "begun"}
        died = {record["name"] for record in self.before} - ended
        for name in sorted(died & rows.keys()):
            if self.world.rank == 0:
                self.note({"name": name, "flags": rows[name], "outcome": "died"})
        only = tuple(self.options.only.split(";"))
        return {name: flags for name, flags in rows.items() if name.startswith(only) and name not in ended | died}

    def late(self) -> bool:
        """Whether the time is over, by rank 0's clock."""
        import torch

        from mega.core.parallel.collectives import all_reduce
        from mega.core.parallel.mesh import Mesh

        passed = torch.tensor(time.monotonic() - self.begun, dtype=torch.float64, device=self.device.torch)
        all_reduce(passed, Mesh(self.world.rank, dp=self.world.size, groups=self.groups).everyone, "max")
        return float(passed) > self.options.seconds

    def alone(self, rows: Mapping[str, Flags]) -> None:
        """Every rank its own rows."""
        rank, size = self.world.rank, self.world.size
        for name, flags in list(self.todo(rows).items())[rank::size]:
            self.row(name, flags, rank=0, world=1)

    def together(self, rows: Mapping[str, Flags]) -> None:
        for name, flags in self.todo(rows).items():
            if self.late():
                return
            cells = flags.get("tp", 1) * flags.get("pp", 1) * flags.get("cp", 1)
            if self.world.size % cells == 0:
                self.row(name, flags, rank=self.world.rank, world=self.world.size)

    def row(self, name: str, flags: Flags, *, rank: int, world: int) -> None:
        import torch

        record: dict[str, Any] = {"name": name, "flags": flags, "ranks": world}
        typed = run_of(flags, self.kind)
        try:
            check(typed, world)
        except ValueError as error:
            if rank == 0:
                self.note({**record, "outcome": "refused", "error": str(error)})
            return
        run = resolve(typed, world)
        record |= {"predicted": predicted(run, world, self.on)}
        if rank == 0:
            self.note({**record, "outcome": "begun"})
        try:
            found = self.measured(name, run, rank, world)
        except torch.OutOfMemoryError as error:
            self.note({**record, "outcome": "out of memory", "rank": rank, "error": str(error).splitlines()[0]})
            if world > 1:
                os._exit(3)  # peers wait in a collective: torchrun ends them and starts anew
            self.device.release()
            return
        if rank == 0:
            self.note({**record, **found, "outcome": "measured"})
            line = _told({**record, **found})
            print(line, flush=True)

    def measured(self, name: str, run: RunConfig, rank: int, world: int) -> dict[str, Any]:
        import torch

        from mega.core.parallel.collectives import all_reduce
        from mega.core.parallel.mesh import Mesh
        from mega.core.training.bench import measure

        began, before, options = time.perf_counter(), self.device.resident(), self.options
        whole = "choice" in name
        speed = measure(
            name,
            run,
            rank,
            world,
            self.device,
            self.groups,
            warmup=1 if whole else options.warmup,
            repeats=2 if whole else options.repeats,
            profiled=not whole and options.profile,
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


def _reserved(device: Any) -> tuple[int, int]:
    """The most that the allocator took from the device, and what was given out beside it (contexts, NCCL)."""
    import torch

    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device), total - free - torch.cuda.memory_reserved(device)


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _told(record: Mapping[str, Any]) -> str:
    """A row in words: predicted / measured."""
    guess = record["predicted"]
    pairs = zip(guess["peaks"], record["peaks"], strict=True)
    peaks = " ".join(f"{a / 2**30:.2f}/{b / 2**30:.2f} ({a / max(b, 1) - 1:+.1%})" for a, b in pairs)
    change = guess["seconds"] / record["seconds"] - 1
    times = f"{1e3 * guess['seconds']:.1f}/{1e3 * record['seconds']:.1f} ({change:+.1%})"
    return f"{record['name']:<62} GiB {peaks}  ms {times}"


def compare(path: Path, gpu: str) -> int:
    """Predict every measured row anew and judge: medians and worst of what the estimate promises."""
    on = hardware(gpu)
    space, time_ = [], []
    best: dict[str, list[tuple[float, str]]] = {}
    for record in _records(path):
        name = record["name"]
        if record["outcome"] in ("out of memory", "died") and record.get("rank", 0) == 0:
            run = resolve(run_of(record["flags"], "cuda"), record["ranks"])
            needs = memory(run, record["ranks"]).needed(on.communicator)
            print(f"{name:<62} out of memory; predicted {needs:.1f} of {on.memory:g} GiB")
        if record["outcome"] != "measured":
            continue
        world = record["ranks"]
        record["predicted"] = predicted(resolve(run_of(record["flags"], "cuda"), world), world, on)
        print(_told(record))
        guess = record["predicted"]
        space += [abs(a / b - 1) for a, b in zip(guess["peaks"], record["peaks"], strict=True)]
        time_.append(abs(guess["seconds"] / record["seconds"] - 1))
        if " choice " in name:
            best.setdefault(name.split()[0], []).append((record["seconds"], name))
    for name, measured in best.items():
        first = next(seconds for seconds, row in measured if " choice 0:" in row)
        fastest, row = min(measured)
        print(f"{name}: the planner's first is {first / fastest - 1:+.1%} from the best of {len(measured)} ({row})")
    if not time_:
        return 1
    print(
        f"{len(time_)} runs, {len(space)} peaks: median error {statistics.median(space):.1%}, worst {max(space):.1%}; "
        f"step time: median {statistics.median(time_):.1%}, worst {max(time_):.1%}"
    )
    return 0 if statistics.median(space) < 0.03 and max(space) < 0.08 and statistics.median(time_) < 0.1 else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="estimates.jsonl")
    parser.add_argument("--compare", type=Path, help="a file of rows to predict anew; nothing is measured")
    parser.add_argument("--gpu", default="h200", help="the device of the prediction, or a TOML file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="how names of rows begin, with ; between")
    parser.add_argument("--sets", default="alone,layouts,choices,beyond")
    parser.add_argument("--seconds", type=float, default=280.0, help="begin no row after so long")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    if options.compare is not None:
        return compare(options.compare, options.gpu)
    from mega.core.parallel.launch import disconnect

    bench = Bench(options)
    sets = options.sets.split(",")
    bench.late()  # all ranks have read the file before one writes to it
    if "alone" in sets:
        bench.alone(ALONE)
    if "layouts" in sets:
        bench.together(LAYOUTS)
    if "choices" in sets:
        bench.together(dict(choices(bench.world.size, bench.kind, bench.on)))
    if "beyond" in sets:
        bench.together(BEYOND)
    disconnect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
