"""Ranks that are killed or stopped under NCCL: who is named, how soon, and whether the run goes on bit for bit.

    python -m tests.gpu.kills --out rows.jsonl [--ranks 4] [--times 2] [--device cpu] [--restarts] [--layouts dp "tp 2"]

Ranks start as a launcher starts them, by environment variables. A GPT trains to its end once, undisturbed; then one
rank of it is killed (SIGKILL) or stopped (SIGSTOP) at a step drawn at random. Every other rank must end by itself,
not with 0, within the time-out and ten seconds. Ranks of one host say once which rank it was, and none says another
(`accused`). Then the same command runs again, and its last checkpoint must have the bytes of the undisturbed one. One
JSON line an item.

--restarts: all ranks are one command's, with --max-restarts, which must name the rank, start again by itself, and end
with 0 and the same bytes. `recovery`: seconds from the signal to the next step in metrics.jsonl.

--poison: instead of signals, a kernel of the rank fails on its device (--inject fail:device).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.layouts import append

STEPS, SAVES = 120, 20
TIMEOUT = 0.25
"""Minutes."""

ACCUSED = re.compile(r"rank (\d+) (?:has not answered|was killed|has ended)")

LAYOUTS = {
    "dp": ["--zero", "1"],
    "tp 2": ["--tp", "2", "--sequence-parallel", "--tp-overlap"],
    "pp 2": ["--pp", "2", "--schedule", "zb-h1"],
    "dp graph": ["--cuda-graph"],
}
SIZES = {
    "cuda": "--layers 8 --hidden 1024 --heads 16 --seq-length 1024 --vocab 50304 --micro-batch 2 --global-batch 32",
    "cpu": "--layers 2 --hidden 32 --heads 2 --seq-length 32 --vocab 512 --micro-batch 1 --global-batch 8",
}


def poison(rank: int, step: int) -> list[str]:
    """Flags with which a kernel of one rank fails at a step."""
    return ["--inject", f"fail:device@step={step},rank={rank}"]


def line_of(device: str, layout: str, save: Path, more: Sequence[str] = ()) -> list[str]:
    line = [
        *(sys.executable, "-m", "mega", "pretrain", *SIZES[device].split(), *LAYOUTS[layout], "--mock-data"),
        *("--steps", str(STEPS), "--save-interval", str(SAVES), "--save", str(save), "--load", str(save)),
        *("--lr", "1e-4", "--eval-iters", "0", "--deterministic", "--timeout-minutes", str(TIMEOUT)),
        *("--device", device, "--dtype", "bf16" if device == "cuda" else "fp32", "--no-progress"),
        *more,
    ]
    if not save.exists():
        del line[line.index("--load") : line.index("--load") + 2]
    return line


def start(ranks: int, device: str, layout: str, save: Path, more: Sequence[str] = ()) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line, processes = line_of(device, layout, save, more), []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        where = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
        where["MEGA_INJECT"] = "1"
        processes.append(subprocess.Popen(line, env=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return processes


def steps_of(save: Path) -> int:
    metrics = save / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def digest(save: Path) -> str:
    """Of the tensors of the last checkpoint, in the order of their files' names."""
    last = max(save.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    found = hashlib.sha256(last.name.encode())
    for path in sorted(last.rglob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def whole(ranks: int, device: str, layout: str, save: Path) -> tuple[str, float]:
    """Train to the end: the digest of the last checkpoint, and the seconds."""
    began = time.monotonic()
    shown = [
        (process.communicate(timeout=300)[0], process.returncode) for process in start(ranks, device, layout, save)
    ]
    bad = [text for text, code in shown if code]
    if bad:
        raise RuntimeError(bad[0][-1500:])
    return digest(save), time.monotonic() - began


def disturbed(
    ranks: int, device: str, layout: str, save: Path, how: signal.Signals | None, draw: random.Random, expected: str
) -> dict[str, object]:
    victim, at = draw.randrange(ranks), draw.randrange(SAVES + 1, STEPS - 10)
    processes = start(ranks, device, layout, save, poison(victim, at) if how is None else ())
    while steps_of(save) < at - (how is None) and all(process.poll() is None for process in processes):
        time.sleep(0.02)
    if how is not None:
        processes[victim].send_signal(how)
    began, others = time.monotonic(), [one for rank, one in enumerate(processes) if rank != victim]
    allowed = 10 + 60 * TIMEOUT
    shown = []
    for process in others:
        try:
            text = process.communicate(timeout=max(1.0, began + allowed + 30 - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + "\n[killed by the proof: did not end]"
        shown.append(text)
    took = time.monotonic() - began
    processes[victim].kill()
    processes[victim].communicate()
    named = [f"rank {victim}" in text for text in shown]
    codes = [process.returncode for process in others]
    ended = took <= allowed and all(code not in (0, -9) for code in codes)
    line = next((each for text in shown for each in text.splitlines() if f"rank {victim}" in each), shown[0][-300:])
    accused = {int(rank) for text in shown for rank in ACCUSED.findall(text)} - {victim}
    found, seconds = whole(ranks, device, layout, save)
    return {
        "rank": victim,
        "step": at,
        "seconds": round(took, 1),
        "named": sum(named),
        "codes": codes,
        "line": line,
        "accused": sorted(accused),
        "again": round(seconds, 1),
        "bitwise": found == expected,
        "ok": any(named) and not accused and ended and found == expected,
    }


def restarted(
    ranks: int, device: str, layout: str, save: Path, how: signal.Signals | None, draw: random.Random, expected: str
) -> dict[str, object]:
    victim, at = draw.randrange(ranks), draw.randrange(SAVES + 1, STEPS - 10)
    more = poison(victim, at) if how is None else []
    line = [*line_of(device, layout, save, more), "--nproc", str(ranks), "--max-restarts", "2"]
    where = {**os.environ, "MEGA_INJECT": "1"}
    process = subprocess.Popen(line, env=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while steps_of(save) < at - (how is None) and process.poll() is None:
        time.sleep(0.02)
    if how is not None:
        os.kill(sorted(local_ranks(process.pid))[victim], how)
    began, rows, recovery = time.monotonic(), steps_of(save), None
    cut = how is not None  # a kernel that fails is noticed later; until then, steps of before the failure are added
    shown: list[str] = []
    reader = threading.Thread(target=lambda: shown.append(process.communicate()[0]))
    reader.start()
    while process.poll() is None and time.monotonic() < began + 240:
        if recovery is None and steps_of(save) < rows:  # cut to the checkpoint, and growing again
            rows, cut = steps_of(save), True
        elif recovery is None and cut and steps_of(save) > rows + 1:
            recovery = round(time.monotonic() - began, 1)
        time.sleep(0.05)
    process.kill()
    reader.join()
    said = next((each for each in shown[0].splitlines() if "restart 1" in each), shown[0][-300:])
    named, bitwise = f"rank {victim}" in said, process.returncode == 0 and digest(save) == expected
    row = {"rank": victim, "step": at, "code": process.returncode, "line": said, "recovery": recovery}
    return {**row, "bitwise": bitwise, "ok": named and bitwise}


def local_ranks(launcher: int) -> list[int]:
    """Processes of the ranks: children of the one that has loaded torch for all of them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    children = {pid: [child for child, parent in parents.items() if parent == pid] for pid in parents}
    return max((children[pid] for pid in children[launcher]), key=len)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--restarts", action="store_true", help="by --max-restarts")
    parser.add_argument("--poison", action="store_true", help="by a kernel that fails")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    asked = parser.parse_args(arguments)
    draw, bad = random.Random(asked.seed), 0
    for layout in asked.layouts:
        with tempfile.TemporaryDirectory() as place:
            expected, seconds = whole(asked.ranks, asked.device, layout, Path(place) / "undisturbed")
            print(json.dumps({"layout": layout, "undisturbed": round(seconds, 1)}), flush=True)
            for turn in range(asked.times):
                hows: tuple[signal.Signals | None, ...] = (None,) if asked.poison else (signal.SIGKILL, signal.SIGSTOP)
                for how in hows:
                    name = "poison" if how is None else how.name
                    save = Path(place) / f"{name}-{turn}"
                    found = (restarted if asked.restarts else disturbed)(
                        asked.ranks, asked.device, layout, save, how, draw, expected
                    )
                    append(asked.out, {"ranks": asked.ranks, "layout": layout, "signal": name, **found})
                    bad += not found["ok"]
                    shutil.rmtree(save)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
