"""Seeded bugs: each patch of tests/battery/mutations, applied to a copy of the tree, must be killed by its named test.

    python tests/battery/run_mutations.py [--out FILE]            run what has no row for this commit, then the table
    python tests/battery/run_mutations.py [--out FILE] NAME ...   only these

A patch opens with two lines, `What:` and `Killed-by:`. The named tests must first pass on the tree as it is; then a
mutant is killed if its test fails, and survives if it passes. One JSON line per mutant, with its commit, goes to --out
as it is known, so a run that was cut short resumes where it stopped. A mutant that has no line there keeps its row of
docs/mutations.md. Exit 1 if any survives. The sources themselves are never touched.
"""

from __future__ import annotations

import argparse
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
ROWS = ROOT / "build" / "battery" / "mutations.jsonl"
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
    """The package and its tests, as they lie in the working tree, with their bytecode, which is that of a source of the
    same size and time: what is patched is compiled again."""
    ignored = shutil.ignore_patterns(".*", "battery")
    for name in ("mega", "tests"):
        shutil.copytree(ROOT / name, into / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", into)


def run_tests(tree: Path, tests: list[str]) -> int:
    """pytest's exit code; a test that hangs has failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
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


def results(out: Path) -> list[Result]:
    """The rows of earlier runs, oldest first."""
    if not out.exists():
        return []
    return [Result(**json.loads(line)) for line in out.read_text(encoding="utf-8").splitlines()]


def keep(result: Result, out: Path) -> None:
    """Append a row."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def write_table(mutations: list[Mutation], found: Iterable[Result], table: Path = TABLE) -> None:
    """docs/mutations.md from the newest result of each mutation; those without one keep their row."""
    newest = {result.mutation: result for result in found}
    before = _verdicts(table.read_text(encoding="utf-8")) if table.exists() else {}
    lines = [
        "# Seeded bugs",
        "",
        "Bugs that a change could introduce. Each bug is a patch in `tests/battery/mutations`, and the named test must",
        "fail when the patch is applied. `python tests/battery/run_mutations.py` applies each patch to a copy of the",
        "repository, runs the test, and writes this page. The result is `killed` if the test failed, `survived` if it",
        "passed, and `not run` if the patch is newer than the last run of this script.",
        "",
        "| bug | what it does | killed by | result |",
        "|---|---|---|---|",
    ]
    for mutation in mutations:
        verdict = before.get(mutation.name, "not run |")
        if mutation.name in newest:
            result = newest[mutation.name]
            verdict = f"{'killed' if result.killed else '**survived**'} |"
        lines.append(f"| {mutation.name} | {mutation.what} | `{mutation.test.removeprefix('tests/')}` | {verdict}")
    table.parent.mkdir(exist_ok=True)
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _verdicts(table: str) -> dict[str, str]:
    """Mutation -> the last column of its row."""
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[-1] for row in rows if len(row) > 3}


def main(arguments: list[str]) -> int:
    """The exit code: 1 where a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="patches; all")
    parser.add_argument("--out", type=Path, default=ROWS, help="file of rows: %(default)s")
    asked = parser.parse_args(arguments)
    names, out = asked.names, asked.out
    every = [read(path) for path in sorted(PATCHES.glob("*.patch"))]
    unknown = set(names) - {mutation.name for mutation in every}
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no such patch in {PATCHES}")
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    done = {result.mutation for result in results(out) if result.commit == commit}
    due = [one for one in every if (one.name in names if names else one.name not in done)]
    if due:
        check_clean(due)
    survivors = 0
    for mutation in due:
        result = try_mutation(mutation, commit)
        keep(result, out)
        survivors += not result.killed
        print(f"{'killed' if result.killed else 'SURVIVED':8} {result.seconds:5.1f} s  {mutation.name}", flush=True)
    write_table(every, results(out))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
