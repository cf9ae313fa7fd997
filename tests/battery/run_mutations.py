"""Seeded bugs: each patch of tests/battery/mutations, applied to a copy of the tree, must be killed by its named test.

    python tests/battery/run_mutations.py            run what has no result for this commit yet, then write the table
    python tests/battery/run_mutations.py NAME ...   only these

A patch opens with two lines, `What:` and `Killed-by:`. The named tests must first pass on the tree as it is; then a
mutant is killed if its test fails, and survives if it passes. One JSON line per mutant, with commit and date, goes to
tests/battery/results/mutations.jsonl as it is known, so a run that was cut short goes on where it stopped. Exit 1 if
any survives. The tree itself is never touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests" / "battery" / "mutations"
RESULTS = ROOT / "tests" / "battery" / "results" / "mutations.jsonl"
TABLE = ROOT / "docs" / "mutations.md"
LIMIT_S = 120

PASSED, FAILED = 0, 1
"""pytest's exit codes; every other means that no test was run, which kills nothing."""


@dataclass(frozen=True)
class Mutation:
    """One seeded bug."""

    name: str
    what: str
    test: str
    path: Path


@dataclass(frozen=True)
class Result:
    """What became of one mutant."""

    mutation: str
    killed: bool
    test: str
    seconds: float
    commit: str
    date: str


def read(path: Path) -> Mutation:
    """Errors: ValueError where the two opening lines are missing."""
    what, test = path.read_text(encoding="utf-8").splitlines()[:2]
    if not (what.startswith("What: ") and test.startswith("Killed-by: ")):
        raise ValueError(f"{path}: must open with `What: ...` and `Killed-by: ...`")
    return Mutation(path.stem, what.removeprefix("What: "), test.removeprefix("Killed-by: "), path)


def copy_tree(into: Path) -> None:
    """The package and its tests, as they lie in the working tree."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "battery")
    for name in ("mega", "tests"):
        shutil.copytree(ROOT / name, into / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", into)


def run_tests(tree: Path, tests: list[str]) -> int:
    """pytest's exit code; a test that hangs has failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=LIMIT_S * (10 if len(tests) > 1 else 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return FAILED
    if process.returncode not in (PASSED, FAILED):
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{out.decode(errors='replace')}")
    return process.returncode


def try_mutation(mutation: Mutation, commit: str) -> Result:
    """Apply, test, and throw the copy away. Errors: RuntimeError where the patch does not apply any more."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        applied = subprocess.run(
            ["git", "apply", "-p1", str(mutation.path)], cwd=tree, capture_output=True, text=True, check=False
        )
        if applied.returncode:
            raise RuntimeError(f"{mutation.name}: the patch does not apply: {applied.stderr.strip()}")
        begin = time.monotonic()
        killed = run_tests(tree, [mutation.test]) == FAILED
        seconds = round(time.monotonic() - begin, 1)
    return Result(mutation.name, killed, mutation.test, seconds, commit, f"{datetime.now(UTC):%Y-%m-%d}")


def check_clean(mutations: Iterable[Mutation]) -> None:
    """The named tests pass without any bug. Errors: RuntimeError where one does not."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        if run_tests(tree, sorted({mutation.test for mutation in mutations})) != PASSED:
            raise RuntimeError("a named test fails on the tree as it is")


def results() -> list[Result]:
    if not RESULTS.exists():
        return []
    return [Result(**json.loads(line)) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def keep(result: Result) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as out:
        out.write(json.dumps(asdict(result)) + "\n")


def write_table(mutations: list[Mutation]) -> None:
    """docs/mutations.md from the newest result of each mutation."""
    newest = {result.mutation: result for result in results()}
    lines = [
        "# Seeded bugs",
        "",
        "Bugs that a change could bring in, kept as patches, and the test that each must be killed by. Made by",
        "`python tests/battery/run_mutations.py`.",
        "",
        "| bug | what it does | killed by | result | seconds | commit | date |",
        "|---|---|---|---|---|---|---|",
    ]
    for mutation in mutations:
        result = newest.get(mutation.name)
        said = "not run | | |"
        if result is not None:
            verdict = "killed" if result.killed else "**survived**"
            said = f"{verdict} | {result.seconds} | {result.commit} | {result.date} |"
        lines.append(f"| {mutation.name} | {mutation.what} | `{mutation.test.removeprefix('tests/')}` | {said}")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(names: list[str]) -> int:
    every = [read(path) for path in sorted(PATCHES.glob("*.patch"))]
    unknown = set(names) - {mutation.name for mutation in every}
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no such patch in {PATCHES}")
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    done = {result.mutation for result in results() if result.commit == commit}
    due = [one for one in every if (one.name in names if names else one.name not in done)]
    if due:
        check_clean(due)
    survivors = 0
    for mutation in due:
        result = try_mutation(mutation, commit)
        keep(result)
        survivors += not result.killed
        print(f"{'killed' if result.killed else 'SURVIVED':8} {result.seconds:5.1f} s  {mutation.name}", flush=True)
    write_table(every)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
