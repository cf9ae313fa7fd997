"""The loop that proves layouts, a row each as it is known, and the file of rows from which a run resumes that was cut
short. It knows no layout by name.
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
from mega.core.proof.layouts import LR, STEPS, Case, ParityDtype, alone

if TYPE_CHECKING:
    from mega.core.processes.pool import Pool
    from mega.core.proof.parity import Snapshot


@dataclass(frozen=True)
class Row:
    """How far one layout is from one rank.

    loss: worst relative difference. gradients: at each of `STEPS` the error of the worst tensor. shares: of what it was
    allowed. tensors: which. problem: why numbers are missing. commit, date: of what code, and when.
    """

    family: str
    layout: str
    dtype: str
    fine: bool
    loss: float | None = None
    gradients: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    tensors: tuple[str, ...] = ()
    problem: str | None = None
    commit: str = ""
    date: str = ""


def prove(cases: Sequence[Case], dtype: ParityDtype) -> Iterator[Row]:
    """Train every model in every layout on local ranks; one row each as it is done."""
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
                found = snapshots(pool, run, layout.world, STEPS)
                differences = compare(dtype, STEPS, expected, found, exact)
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
    """One rank, one sample at a time; in fp32 also in fp64, with the same learning rate."""
    from mega.core.proof.parity import snapshots

    expected = snapshots(pool, alone(model, depth, dtype, rule=rule), 1, STEPS)
    if dtype == "fp64":
        return expected, None
    return expected, snapshots(pool, alone(model, depth, "fp64", LR[dtype], rule), 1, STEPS)


# -- the file


def code() -> str:
    """The commit of the code that runs, with a mark where it has been changed since; else the version."""
    where = Path(mega.__file__).parent
    try:
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude", "*"]
        git = subprocess.run(asked, cwd=where, capture_output=True, text=True, check=False)
    except OSError:
        return mega.__version__
    return git.stdout.strip() or mega.__version__


def kept(path: str, commit: str) -> list[Row]:
    """The rows that `append` wrote for this commit. Errors: ValueError where the file has other lines."""
    if not os.path.exists(path):
        return []
    try:
        with open(path, encoding="utf-8") as file:
            rows = [Row(**json.loads(line)) for line in file if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--json {path}: is not a file written by mega parity ({error})") from None
    return [row for row in rows if row.commit == commit]


def append(path: str, row: Row, commit: str) -> Row:
    """Add a row of this commit, safe on disk; the row as written."""
    row = dataclasses.replace(row, commit=commit, date=f"{datetime.now(UTC):%Y-%m-%d}")
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return row
