"""Do two revisions train the same bytes? Small runs of another revision, repeated and resumed by the working tree.

    python tests/battery/same_bytes.py REVISION [--out FILE] [--work DIR] [NAME ...]

For every run of `RUNS` and two revisions, the other one (in a `git worktree`) and the working tree:

    1 REVISION trains 4 steps and saves after steps 2 and 4
    2 the working tree trains the same 4 steps from the start
    3 the working tree resumes REVISION's checkpoint of step 2 and trains to step 4

Weights, masters and moments of step 4, and the losses and gradient norms of all steps, must be equal byte for byte.
Runs differ in family, layout, ZeRO stage, schedule and precision; half of them train adapters (LoRA). One JSON line a
run goes to --out. What REVISION trained is kept in --work, so it is trained once. Exit 1 if any run differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "build" / "battery" / "same_bytes.jsonl"

SHAPE = "--layers 4 --hidden 32 --heads 4 --vocab 101"
TRAIN = (
    "--seq-length 16 --global-batch 8 --micro-batch 1 --lr 3e-2 --lr-decay constant --eval-iters 0 --device cpu "
    "--log-interval 1 --bucket-size 3000"
)
FAMILIES = {
    "gpt": "",
    "llama": "--family llama --norm rmsnorm --activation swiglu --position rope --no-bias --no-tied --ffn 48",
    "bert": "--family bert",
    "t5": "--family t5 --layers 2 --decoder-layers 2",
}
DATA = {"t5": "--decoder-seq-length 12"}
LORA = "--lora-rank 3 --lora-alpha 12 --lora-dropout 0.2"
TARGETS = "--lora-rank 3 --lora-dropout 0.2 --lora-targets q_proj down_proj"

RUNS: dict[str, tuple[str, int, str]] = {
    "lora one rank": ("llama", 1, LORA),
    "lora tp": ("llama", 2, f"--tp 2 {LORA}"),
    "lora tp sequence": ("llama", 2, f"--tp 2 --sequence-parallel {LORA}"),
    "lora tp pp sequence, full recompute": (
        "gpt",
        4,
        f"--tp 2 --pp 2 --sequence-parallel --recompute full --recompute-method uniform --recompute-layers 1 {LORA}",
    ),
    "lora tp zero 1, selective recompute": ("gpt", 4, f"--tp 2 --zero 1 --recompute selective {LORA}"),
    "lora zero 2": ("llama", 2, f"--zero 2 {LORA}"),
    "lora zero 3": ("llama", 2, f"--zero 3 {LORA}"),
    "lora zero-bubble": ("gpt", 2, f"--pp 2 --schedule zb-h1 {TARGETS}"),
    "lora bf16 tp sequence": ("llama", 2, f"--tp 2 --sequence-parallel --dtype bf16 {LORA}"),
    "lora bf16 zero 2": ("gpt", 2, f"--zero 2 --dtype bf16 {TARGETS}"),
    "lora t5 tp pp": ("t5", 4, f"--tp 2 --pp 2 --split-rank 1 --sequence-parallel {LORA}"),
    "lora bert tp cp": ("bert", 4, f"--tp 2 --cp 2 --sequence-parallel {LORA}"),
    "gpt tp pp sequence": ("gpt", 4, "--tp 2 --pp 2 --sequence-parallel"),
    "gpt bf16 zero 1": ("gpt", 2, "--zero 1 --dtype bf16"),
    "gpt zero-bubble": ("gpt", 2, "--pp 2 --schedule zb-h1"),
    "gpt tp overlap": ("gpt", 2, "--tp 2 --sequence-parallel --tp-overlap"),
    "gpt lamb cp zero 2": ("gpt", 4, "--cp 2 --zero 2 --optimizer lamb"),
    "gpt adafactor tp zero 1": ("gpt", 4, "--tp 2 --zero 1 --optimizer adafactor"),
    "llama zero 3": ("llama", 2, "--zero 3"),
    "llama tp zero 3 bf16": ("llama", 4, "--tp 2 --zero 3 --dtype bf16"),
    "llama interleaved": ("llama", 2, "--pp 2 --chunks 2"),
    "bert tp zero 2": ("bert", 4, "--tp 2 --zero 2"),
    "t5 pp": ("t5", 2, "--pp 2 --split-rank 1"),
    "t5 tp zero 1": ("t5", 4, "--tp 2 --sequence-parallel --zero 1"),
}
"""Name -> family, ranks, flags."""


def train(tree: Path, folder: Path, name: str) -> None:
    """Train a run of `RUNS` in `folder` to step 4, from the newest checkpoint there. Errors: its output."""
    family, ranks, flags = RUNS[name]
    if "lora" in flags:
        words = ["finetune", "--load", str(folder.parent / f"base-{family}")]
    else:
        words = ["pretrain", *model(family)]
    mega(tree, [*words, *data(family), *flags.split()], folder, 4, ranks)


def model(family: str) -> list[str]:
    return [*SHAPE.split(), *FAMILIES[family].split()]


def data(family: str) -> list[str]:
    return [*TRAIN.split(), *DATA.get(family, "").split()]


def mega(tree: Path, words: list[str], folder: Path, steps: int, ranks: int = 1) -> None:
    where = ["--mock-data", "--steps", str(steps), "--save", str(folder), "--save-interval", "2", "--resume", "auto"]
    command = [sys.executable, "-m", "mega", *words, *where, *(["--nproc", str(ranks)] if ranks > 1 else [])]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")


def fingerprint(folder: Path, first: int = 1) -> dict[str, str]:
    """What is compared: a digest of every tensor of step 4, and the numbers of each step from `first` on."""
    found = {}
    for path in sorted((folder / "step-0000004").glob("*.safetensors")):
        raw = path.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        for key, entry in json.loads(raw[8:begin]).items():
            if key != "__metadata__":
                first_byte, end = (begin + offset for offset in entry["data_offsets"])
                words = f"{entry['dtype']} {entry['shape']} {hashlib.sha256(raw[first_byte:end]).hexdigest()}"
                found[f"{path.name} {key}"] = words
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "loss" in row and row["step"] >= first:
            found[f"step {row['step']}"] = f"loss {row['loss']!r}, grad norm {row['grad_norm']!r}"
    return found


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    return [key for key in sorted({*expected, *found}) if expected.get(key) != found.get(key)]


def expected_run(name: str, old: Path, work: Path) -> Path:
    """The folder of a run of `RUNS` that the other revision trained, now or before."""
    family, folder = RUNS[name][0], work / name.replace(",", "").replace(" ", "-")
    if not (work / f"base-{family}" / "step-0000002").exists():
        mega(old, ["pretrain", *model(family), *data(family)], work / f"base-{family}", 2)
    if not (folder / "step-0000004").exists():
        train(old, folder, name)
    return folder


def judge(name: str, before: Path, work: Path) -> dict[str, list[str]]:
    """What differs where the working tree trains a run from the start, and from step 2 of `before`."""
    found = {}
    for kind, first in (("from the start", 1), ("resumed", 3)):
        # A run of adapters names its base by its relative path.
        after = work / "after"
        shutil.rmtree(after, ignore_errors=True)
        if kind == "resumed":
            left_out = shutil.ignore_patterns("step-0000004", "latest*", "metrics.jsonl")
            shutil.copytree(before, after, ignore=left_out)
        train(ROOT, after, name)
        found[kind] = differences(fingerprint(before, first), fingerprint(after, first))
    return found


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these runs")
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "battery" / "same_bytes")
    options = parser.parse_intermixed_args()  # names may follow options
    if unknown := [name for name in options.names if name not in RUNS]:
        parser.error(f"{unknown[0]}: is not a run; valid: {', '.join(RUNS)}")
    revision, names, failed = git("rev-parse", options.revision), options.names or list(RUNS), 0
    work = options.work.resolve() / revision[:7]
    work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        old = Path(place) / "tree"
        git("worktree", "add", "--detach", str(old), revision)
        try:
            expected = {name: expected_run(name, old, work) for name in names}
        finally:
            git("worktree", "remove", "--force", str(old))
    for name in names:
        found, compared = judge(name, expected[name], work), len(fingerprint(expected[name]))
        equal, date = not any(found.values()), datetime.now(UTC).isoformat(timespec="seconds")
        row = {"run": name, "against": revision[:7], "commit": git("rev-parse", "--short", "HEAD"), "date": date}
        with options.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "compared": compared, "equal": equal, "differs": found}) + "\n")
        print(f"{'equal' if equal else 'DIFFERS'}: {name} ({compared} numbers and tensors)", flush=True)
        failed += not equal
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
