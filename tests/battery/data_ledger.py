"""Items of a long proof: each run once for a commit, one JSON line appended as it is known, exit 1 if any failed.

    python tests/battery/NAME.py ["flips 3" ...] [--share 2/8] [--limit 50] [--out FILE] [--commit ID] [--summary]

Several processes may share a proof, each with its own --share, and one file of rows: a line is one write.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "build" / "battery"
"""Where rows go unless --out names a file: ignored by git."""

Item = tuple[str, Callable[[], dict[str, Any]]]
"""A name, and a function that returns what it found, or raises."""


def commit() -> str:
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def resident(field: str) -> int:
    """MB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) >> 10


def run(battery: str, items: Iterable[Item], arguments: Sequence[str] | None = None) -> None:
    """Run the items that have no good line for this commit yet, report how all stand, and exit."""
    asked, all_items = _asked(battery, arguments), list(items)
    now = asked.commit or commit()
    number, count = asked.share
    mine = [] if asked.summary else [item for item in all_items if not asked.items or item[0] in asked.items]
    known = _latest(asked.out, now)
    todo = [item for item in mine[number - 1 :: count] if item[0] not in known or not known[item[0]]["ok"]]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    fine = [_proven(name, prove, now, asked.out) for name, prove in todo[: asked.limit]]
    whole = _summary([name for name, _ in all_items], _latest(asked.out, now), now)
    sys.exit(not (whole if asked.summary else all(fine)))


def _asked(battery: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", help="names of items; all")
    parser.add_argument("--share", type=_share, default=(1, 1), metavar="K/N", help="every N-th item, from the K-th")
    parser.add_argument("--limit", type=int, default=None, help="most items of this launch")
    parser.add_argument("--out", type=Path, default=ROWS / f"{battery}.jsonl", help="file of rows: %(default)s")
    parser.add_argument("--commit", default=None, help="what the lines are marked with where git is absent")
    parser.add_argument("--summary", action="store_true", help="run nothing; exit 1 unless all are good")
    return parser.parse_args(arguments)


def _share(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def _latest(path: Path, now: str) -> dict[str, dict[str, Any]]:
    """The last line of every item for a commit."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["item"]: line for line in lines if line["commit"] == now}


def _proven(name: str, prove: Callable[[], dict[str, Any]], now: str, results: Path) -> bool:
    """Run one item and write its line down; whether it is good."""
    begin = time.perf_counter()
    try:
        found, ok = prove(), True
    except Exception as error:
        found, ok = {"error": f"{type(error).__name__}: {error}"[:500]}, False
    line = {"item": name, "ok": ok, **found, "seconds": round(time.perf_counter() - begin, 2), "commit": now}
    line["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps(line)
    descriptor = os.open(results, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)
    print(text, flush=True)
    return ok


def _summary(names: Sequence[str], known: Mapping[str, Mapping[str, Any]], now: str) -> bool:
    """A line for each kind of item (its name without the number), one for each that failed; whether all are good."""
    good = {name for name in names if name in known and known[name]["ok"]}
    bare = [name.rstrip("0123456789").rstrip() for name in names]
    kinds = [kind if bare.count(kind) > 1 else name for name, kind in zip(names, bare, strict=True)]
    for kind in dict.fromkeys(kinds):
        mine = [name for name, its in zip(names, kinds, strict=True) if its == kind]
        missing = sum(name not in known for name in mine)
        spent = sum(known[name]["seconds"] for name in mine if name in known)
        print(f"{kind}: {len(good & set(mine))} of {len(mine)} good, {missing} not run, {spent:.0f} s, commit {now}")
    for name in names:
        if name in known and name not in good:
            print(f"{name}: {known[name]['error']}")
    return len(good) == len(names)
