"""What became of the documents of a step: counts by reason, samples of what was dropped, measures of what was kept.

    documents = kept + the sum of dropped; written >= kept where a step cuts documents

They add up over parts, in any order. It knows no step.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SAMPLE_CHARACTERS = 400
_MOST_VALUES = 2000
"""Of one measure, such as domains: rarer values are counted together, as "(others)"."""
OTHERS = "(others)"
_NUMBERS = ("documents", "kept", "written", "bytes")


class DroppedSample(NamedTuple):
    """order: a hash of where the document is: the least ones are a sample that does not depend on the run."""

    order: int
    where: str
    text: str


@dataclass
class StepCounts:
    """dropped: reason -> documents; other: what else was counted; samples: reason -> some dropped for it;
    measures: name -> value -> written documents, as "language" -> "en" -> 90; bytes: of written lines.
    """

    documents: int = 0
    kept: int = 0
    written: int = 0
    bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[DroppedSample]] = field(default_factory=dict)
    measures: dict[str, Counter[str]] = field(default_factory=dict)

    def sample(self, reason: str, where: str, part: str, index: int, text: str, most: int) -> None:
        """Remember a dropped document, if it is one of the `most` that are shown of its reason."""
        if most < 1:
            return
        order = zlib.crc32(f"{part}/{index}".encode())
        found = self.samples.setdefault(reason, [])
        if len(found) < most or order < found[-1].order:
            found.append(DroppedSample(order, where, text[:SAMPLE_CHARACTERS]))
            found.sort()
            del found[most:]

    def measure(self, values: Mapping[str, str]) -> None:
        """Count a written document by what was measured of it."""
        for name, value in values.items():
            self.measures.setdefault(name, Counter())[value] += 1

    def add(self, other: StepCounts, most_samples: int) -> None:
        """Add the counts of another part."""
        self.documents += other.documents
        self.kept += other.kept
        self.written += other.written
        self.bytes += other.bytes
        self.dropped += other.dropped
        self.other += other.other
        for reason, samples in other.samples.items():
            self.samples[reason] = sorted([*self.samples.get(reason, ()), *samples])[:most_samples]
        for name, values in other.measures.items():
            self.measures[name] = _most_common(self.measures.get(name, Counter()) + values)

    def as_json(self) -> dict[str, object]:
        """As JSON's kinds, sorted, so that equal counts give equal bytes."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "dropped": dict(sorted(self.dropped.items())),
            "other": dict(sorted(self.other.items())),
            "samples": {
                reason: [sample._asdict() for sample in self.samples[reason]] for reason in sorted(self.samples)
            },
            "measures": {name: dict(sorted(values.items())) for name, values in sorted(self.measures.items())},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StepCounts:
        """The inverse of `as_json`. Errors: TypeError or KeyError if the value is not one."""
        return cls(
            **{name: int(found[name]) for name in _NUMBERS},
            dropped=Counter(found["dropped"]),
            other=Counter(found["other"]),
            samples={
                reason: [DroppedSample(**sample) for sample in samples] for reason, samples in found["samples"].items()
            },
            measures={name: Counter(values) for name, values in found["measures"].items()},
        )


def _most_common(values: Counter[str]) -> Counter[str]:
    if len(values) <= _MOST_VALUES:
        return values
    ranked = sorted(values, key=lambda value: (value == OTHERS, -values[value], value))
    found = Counter({value: values[value] for value in ranked[:_MOST_VALUES]})
    found[OTHERS] += sum(values[value] for value in ranked[_MOST_VALUES:])
    return found
