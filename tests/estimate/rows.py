"""Recorded rows: what was measured of a run, and the run itself as it was resolved then.

A row stores the options that differ from the defaults, as resolved, and whether microbatches were recorded as a graph
and exchanges overlapped. So a default or an automatic choice that changes later does not change what a row says. A row
whose code no longer exists is retired: it stays in the file with the reason, and nothing is compared with it. A row
without `seconds` was measured while other work had the device: only its peaks count; of a row whose `peaks` are empty
only the step time was kept.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mega.core.config.resolve import overlaps_exchanges, records_graph, resolve
from mega.core.config.run import Options, RunConfig, entries, updated, value_of
from mega.core.estimate import cost, trace
from mega.core.estimate.curves import Curves, built_in
from mega.core.estimate.hardware import Hardware, hardware
from mega.core.estimate.memory import memory
from mega.core.estimate.steptime import step_time
from mega.core.ops.kernels import attention, heads
from mega.core.ops.kernels import rows as rows_kernels
from mega.core.ops.matmuls import WideMatmuls
from mega.core.ops.rows import add_rows

RECORDED = Path(__file__).parent / "recorded"

WORKSPACES = 80 << 20
"""Bytes that libraries keep from row to row at the most, and that are each row's own. What was allocated besides when a
row began belongs to another row and is not in its peak."""


def as_recorded(run: RunConfig, world: int) -> dict[str, Any]:
    """A resolved run as a row stores it."""
    values = {
        name: list(value) if isinstance(value := value_of(run, name), tuple) else value
        for name, entry in entries().items()
        if value_of(run, name) != entry.default
    }
    return values | {"cuda_graph": records_graph(run, world), "tp_overlap": overlaps_exchanges(run)}


def recorded_run(values: Mapping[str, Any]) -> RunConfig:
    """The resolved run that a row stores. Rows without --tp-overlap are from when it was off unless it was given."""
    known, values = entries(), {"tp_overlap": False, **values}
    return resolve(updated(Options(), {name: tuple(v) if known[name].many else v for name, v in values.items()}), 1)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every line of a file of rows."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def device_of(row: Mapping[str, Any]) -> Hardware:
    """The card that a row was measured on."""
    return hardware(next(name for name in ("h100", "h200") if name.upper() in row["device"]))


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


@dataclass(frozen=True)
class Judged:
    """A measured row and what is predicted of its run. peaks, seconds: relative errors; seconds None: not measured."""

    row: Mapping[str, Any]
    prediction: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def measured_peaks(self) -> list[float]:
        left = self.row["before"] if self.row["before"] > WORKSPACES else 0
        return [peak - left for peak in self.row["peaks"]]

    @property
    def peaks(self) -> list[float]:
        if not self.row["peaks"]:
            return []
        pairs = zip(self.prediction["peaks"], self.measured_peaks, strict=True)
        return [guess / max(found, 1) - 1 for guess, found in pairs]

    @property
    def seconds(self) -> float | None:
        return self.prediction["seconds"] / self.row["seconds"] - 1 if "seconds" in self.row else None

    def __str__(self) -> str:
        pairs = zip(self.prediction["peaks"], self.measured_peaks, self.peaks, strict=False)
        peaks = " ".join(f"{a / 2**30:.2f}/{b / 2**30:.2f} ({error:+.1%})" for a, b, error in pairs)
        guess = 1e3 * self.prediction["seconds"]
        times = (
            "" if self.seconds is None else f"  ms {guess:.1f}/{1e3 * self.row['seconds']:.1f} ({self.seconds:+.1%})"
        )
        return f"{self.name:<62} GiB {peaks}{times}"


def judged(rows: Sequence[Mapping[str, Any]], on: Hardware | None = None) -> Iterator[Judged]:
    """Every row that was measured and whose code exists. on: the card of the prediction; None: the row's own."""
    for row in rows:
        if row["outcome"] == "measured":
            world = int(row.get("ranks", row["world"]))
            with kernels_of(row):
                prediction = predicted(recorded_run(row["run"]), world, on or device_of(row))
            yield Judged(row, prediction)


@cache
def _curves_before_hopper() -> Curves:
    attention_points = json.loads((RECORDED / "attention_curves_before_hopper.json").read_text(encoding="utf-8"))
    return Curves({**built_in().points, **attention_points})


@contextmanager
def kernels_of(row: Mapping[str, Any]) -> Iterator[None]:
    """The kernels that the code had when a row was measured. Rows without "slopes" are from when the slope of an
    activation was a pass of its own, and the gradients of query, key and value were always copied. Rows without
    "activations" are from when the activation was a pass of its own, and torch added the gradients of embeddings. Rows
    without "hopper" are from before hopper.cu, when dropout and documents were Triton's, and the rest cuDNN's."""
    with pytest.MonkeyPatch.context() as patch:
        if not row.get("hopper"):
            patch.setattr(cost, "built_in", _curves_before_hopper)
        if not row.get("activations"):
            patch.setattr(WideMatmuls, "activated", lambda *_: None)
            patch.setattr(rows_kernels, "add_rows", add_rows)
        if not row.get("slopes"):
            patch.setattr(WideMatmuls, "applies_slope", lambda *_: False)
            for module in (attention, heads):
                patch.setattr(module, "joined", lambda *_: None)
        _use(row.get("slopes"), row.get("activations"), row.get("hopper"))
        yield
    _use(True, True, True)


_used = [(True, True, True)]
"""The kernels of which the estimator keeps results."""


def _use(*kernels: object) -> None:
    """Forget the results of other kernels."""
    if kernels != _used[0]:
        _used[0] = kernels
        trace._TRACES.clear()
        for name, module in list(sys.modules.items()):
            if name.startswith("mega.core.estimate."):
                for value in vars(module).values():
                    getattr(value, "cache_clear", int)()


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of some predictions."""

    median: float
    ninth: float
    """The 90th percentile: nine of ten errors are at most so large."""
    worst: float
    count: int

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """
        >>> Errors.of([-0.1, 0.2, 0.0])
        Errors(median=0.1, ninth=0.2, worst=0.2, count=3)
        """
        found = sorted(map(abs, errors))
        return cls(statistics.median(found), found[min(len(found) - 1, int(0.9 * len(found)))], found[-1], len(found))

    def __str__(self) -> str:
        return f"median {self.median:.1%}, 90th percentile {self.ninth:.1%}, worst {self.worst:.1%} of {self.count}"


def peak_errors(found: Sequence[Judged]) -> Errors:
    return Errors.of([error for one in found for error in one.peaks])


def second_errors(found: Sequence[Judged]) -> Errors:
    return Errors.of([one.seconds for one in found if one.seconds is not None])
