"""Compare training in each layout with training on a single rank, one layout after the other. A file stores one row of
results per layout, so that an interrupted comparison can resume. This module does not depend on particular layouts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import mega
from mega.core.proof.layouts import LR, STEPS, Case, ParityDtype, reference_run

if TYPE_CHECKING:
    from mega.core.processes.pool import Pool
    from mega.core.proof.parity import Snapshot


@dataclass(frozen=True)
class Row:
    """The result of comparing one layout with the run on a single rank."""

    family: str
    layout: str
    dtype: str
    fine: bool
    """Whether all differences are within the bounds."""
    loss: float | None = None
    """Largest relative difference of the loss over `STEPS`."""
    gradients: tuple[float, ...] = ()
    """Error of the worst tensor at each of `STEPS`."""
    shares: tuple[float, ...] = ()
    """The errors in `gradients` as fractions of the allowed errors."""
    tensors: tuple[str, ...] = ()
    """Name of the worst tensor at each of `STEPS`."""
    problem: str | None = None
    """The error message if the comparison failed."""
    commit: str = ""
    """The commit of the code that was tested."""
    date: str = ""


def prove(cases: Sequence[Case], dtype: ParityDtype) -> Iterator[Row]:
    """Train every case on local ranks, and yield the row of each case when it is finished."""
    from mega.core.processes.pool import Pool
    from mega.core.proof.parity import compare, snapshots, within

    runs = [layout.run(model, dtype) for model, layout in cases]
    if not cases:
        return
    references: dict[tuple[str, tuple[int, ...], str], tuple[list[Snapshot], list[Snapshot] | None]] = {}
    with Pool(max(layout.world for _, layout in cases)) as pool:
        for (model, layout), run in zip(cases, runs, strict=True):
            key = (model, layout.depth(model), layout.rule)
            if key not in references:
                references[key] = _reference(pool, *key, dtype)
            expected, exact = references[key]
            try:
                actual = snapshots(pool, run, layout.world, STEPS)
                differences = compare(dtype, STEPS, expected, actual, exact)
            except RuntimeError as error:
                problem = str(error).strip().splitlines()[-1]
                yield Row(model, layout.name, dtype, fine=False, problem=problem)
                continue
            yield Row(
                model,
                layout.name,
                dtype,
                fine=all(within(dtype, one) for one in differences),
                loss=max(one.loss for one in differences),
                gradients=tuple(one.gradient for one in differences),
                shares=tuple(one.share for one in differences),
                tensors=tuple(one.tensor.removeprefix("grads/") for one in differences),
            )


def _reference(
    pool: Pool, model: str, depth: tuple[int, ...], rule: str, dtype: ParityDtype
) -> tuple[list[Snapshot], list[Snapshot] | None]:
    """Return the snapshots of training on one rank with one sample per microbatch and, for fp32, also the snapshots in
    fp64 with the same learning rate."""
    from mega.core.proof.parity import snapshots

    expected = snapshots(pool, reference_run(model, depth, dtype, rule=rule), 1, STEPS)
    if dtype == "fp64":
        return expected, None
    return expected, snapshots(pool, reference_run(model, depth, "fp64", LR[dtype], rule), 1, STEPS)


# -- the file


def code() -> str:
    """Return the commit of the running code, with a suffix if the work tree has changes. Without a git repository,
    return the version of the package."""
    folder = Path(mega.__file__).parent
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude", "*"]
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return mega.__version__
    return git.stdout.strip() or mega.__version__


def read_rows(path: str, commit: str) -> list[Row]:
    """Read the rows that `append` wrote for this commit. Errors: ValueError if the file contains lines that are not
    rows."""
    if not os.path.exists(path):
        return []
    try:
        with open(path, encoding="utf-8") as file:
            rows = [Row(**json.loads(line)) for line in file if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--json {path}: is not a file written by mega parity ({error})") from None
    return [row for row in rows if row.commit == commit]


def append(path: str, row: Row, commit: str) -> Row:
    """Append a row to the file and sync the file to disk. Return the row with commit and date added."""
    row = dataclasses.replace(row, commit=commit, date=f"{datetime.now(UTC):%Y-%m-%d}")
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return row
