"""Counters and histograms, and their text for Prometheus (exposition format 0.0.4). It knows no route and no engine."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of a histogram's buckets."""


@dataclass
class Counter:
    """A number for each value of its labels."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    values: dict[tuple[str, ...], float] = field(default_factory=dict)

    def add(self, *labels: str, by: float = 1) -> None:
        self.values[labels] = self.values.get(labels, 0) + by

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help, "counter")
        for labels, value in sorted(self.values.items()) or ([] if self.labels else [((), 0)]):
            pairs = ",".join(f'{name}="{_escaped(label)}"' for name, label in zip(self.labels, labels, strict=True))
            yield f"{self.name}{{{pairs}}} {value:g}" if pairs else f"{self.name} {value:g}"


@dataclass
class Histogram:
    """How often a duration was at most each of SECONDS."""

    name: str
    help: str
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help, "histogram")
        below = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{self.name}_bucket{{le="{bound}"}} {below}'
        yield f"{self.name}_sum {self.total:.6f}"
        yield f"{self.name}_count {below}"


@dataclass
class Metrics:
    """All that is counted. gauges: name, help -> what reads its value now."""

    requests: Counter = field(
        default_factory=lambda: Counter("mega_requests_total", "Requests by route and status", ("route", "status"))
    )
    prompt_tokens: Counter = field(
        default_factory=lambda: Counter("mega_prompt_tokens_total", "Tokens of accepted prompts")
    )
    new_tokens: Counter = field(default_factory=lambda: Counter("mega_generated_tokens_total", "Tokens generated"))
    cancelled: Counter = field(
        default_factory=lambda: Counter("mega_cancelled_total", "Requests whose client left or that took too long")
    )
    first: Histogram = field(
        default_factory=lambda: Histogram("mega_time_to_first_token_seconds", "From a whole request to its first token")
    )
    between: Histogram = field(
        default_factory=lambda: Histogram("mega_time_between_tokens_seconds", "Between two tokens of a sequence")
    )
    whole: Histogram = field(
        default_factory=lambda: Histogram("mega_request_seconds", "From a whole request to its whole answer")
    )
    gauges: dict[tuple[str, str], Callable[[], float]] = field(default_factory=dict)

    def text(self) -> str:
        """All metrics as Prometheus reads them."""
        lines: list[str] = []
        for one in (self.requests, self.prompt_tokens, self.new_tokens, self.cancelled):
            lines += one.lines()
        for histogram in (self.first, self.between, self.whole):
            lines += histogram.lines()
        for (name, about), value in self.gauges.items():
            lines += [*_head(name, about, "gauge"), f"{name} {value():g}"]
        return "\n".join(lines) + "\n"


def _head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
