"""All recorded command lines of the original systems, each translated and run on stand-ins, as in support/old_lines.py.

    PYTHONPATH=. python tests/battery/command_lines.py ["line 017" ...] [--share 1/2] [--limit 50] [--summary]
    ... --processes     each line of mega as a command of its own: of verbs that train without a model, write or convert
    PYTHONPATH=. python tests/battery/command_lines.py --table      (Markdown of what the results file holds)

Nothing of them may be refused obscurely, and no line of BERT's or T5's scripts may become another family's run.
"""

from __future__ import annotations

import collections
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.battery.data_ledger import run
from tests.support.old_lines import Stands, filled, judged, recorded

SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--model-parallel-size")
FAMILIES = {"pretrain_bert.py": "bert", "pretrain_t5.py": "t5"}


def prove(row: dict[str, Any], stands: Stands) -> dict[str, Any]:
    found = judged(row, stands)
    family = FAMILIES.get(row["program"])
    if family is not None and found["lines"]:
        assert f"--family {family}" in found["lines"][-1], found["lines"]
    return found


def ranks(flags: Sequence[str]) -> int:
    """Of one model: a dry run builds as many parts."""
    sizes = [filled(flags)[index + 1] for index, word in enumerate(filled(flags)) if word in SIZES]
    return math.prod(int(size) for size in sizes if size.isdecimal())


def table(path: Path) -> None:
    """System, program, verb and how many lines of it came to what."""
    rows = {line["item"]: line for line in map(json.loads, path.read_text().splitlines())}
    counts: dict[tuple[str, str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows.values():
        counts[row["system"], row["program"], row["verb"]][row["outcome"] if row["ok"] else "refused"] += 1
    print("| system | program | mega | accepted | translated | without counterpart |\n|---|---|---|---|---|---|")
    for (system, program, verb), count in sorted(counts.items()):
        numbers = (str(count[name] or "") for name in ("accepted", "translated", "without counterpart"))
        print(f"| {system} | `{program}` | {f'`{verb}`' if verb else ''} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        table(Path("build/battery/command_lines.jsonl"))
    else:
        with tempfile.TemporaryDirectory() as place:
            processes = "--processes" in sys.argv
            stands = Stands(Path(place), processes)
            sys.argv = [word for word in sys.argv if word != "--processes"]
            rows = sorted(enumerate(recorded()), key=lambda row: ranks(row[1]["flags"]))
            run("command_lines", [(f"line {number:03}", partial(prove, row, stands)) for number, row in rows])
