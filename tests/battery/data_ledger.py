"""Items of a long proof: each run once for a commit, one JSON line appended as it is known, exit 1 if any failed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "battery" / "results"

Item = tuple[str, Callable[[], dict[str, Any]]]
"""A name, and a function that returns what it found, or raises."""


def commit() -> str:
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def run(battery: str, items: Iterable[Item]) -> None:
    """Run the items that have no good line for this commit yet; names on the command line choose some."""
    path, now, wanted = RESULTS / f"{battery}.jsonl", commit(), sys.argv[1:]
    path.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {line["item"] for line in lines if line["commit"] == now and line["ok"]}
    failed = 0
    for name, prove in items:
        if name in done or (wanted and name not in wanted):
            continue
        begin = time.perf_counter()
        try:
            found, ok = prove(), True
        except Exception as error:
            found, ok = {"error": f"{type(error).__name__}: {error}"[:500]}, False
        failed += not ok
        line = {"item": name, "ok": ok, **found, "seconds": round(time.perf_counter() - begin, 2), "commit": now}
        line["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    sys.exit(1 if failed else 0)
