"""Counts the documents of a step: the number dropped for each reason, samples of dropped documents, and measured
values of written documents.

    documents = kept + sum of dropped; written >= kept if a step cuts documents

The counts of parts can be added in any order. This module does not depend on steps.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SAMPLE_CHARACTERS = 400
_MOST_VALUES = 2000
"""Maximum number of values of a measure, such as domains, that are counted separately. Rarer values are counted as
"(others)".
"""
OTHERS = "(others)"
_NUMBERS = ("documents", "kept", "written", "bytes")


class DroppedSample(NamedTuple):
    """A dropped document in a sample. `order` is a hash of the document's location. The documents with the lowest
    hashes are sampled, so every run has the same sample."""

    order: int
    where: str
    text: str


@dataclass
class StepCounts:
    """Counts of the documents of one or more parts."""

    documents: int = 0
    """Number of documents read."""
    kept: int = 0
    """Number of documents kept."""
    written: int = 0
    """Number of documents written."""
    bytes: int = 0
    """Number of bytes in the written lines."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> number of dropped documents."""
    other: Counter[str] = field(default_factory=Counter)
    """Other event, such as a repaired text -> number of documents."""
    samples: dict[str, list[DroppedSample]] = field(default_factory=dict)
    """Reason -> sample of the documents that were dropped for this reason."""
    measures: dict[str, Counter[str]] = field(default_factory=dict)
    """Name of a measure -> value -> number of written documents, such as "language" -> "en" -> 90."""

    def sample(self, reason: str, location: str, part: str, index: int, text: str, limit: int) -> None:
        """Add a dropped document to the samples if its hash is among the `limit` lowest hashes for `reason`."""
        if limit < 1:
            return
        order = zlib.crc32(f"{part}/{index}".encode())
        samples = self.samples.setdefault(reason, [])
        if len(samples) < limit or order < samples[-1].order:
            samples.append(DroppedSample(order, location, text[:SAMPLE_CHARACTERS]))
            samples.sort()
            del samples[limit:]

    def measure(self, values: Mapping[str, str]) -> None:
        """Count the measured values of a written document."""
        for name, value in values.items():
            self.measures.setdefault(name, Counter())[value] += 1

    def add(self, other: StepCounts, most_samples: int) -> None:
        """Add the counts of another input part."""
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
        """Return the counts as JSON-compatible values, sorted so that equal counts produce identical bytes."""
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
    def from_json(cls, content: Mapping[str, Any]) -> StepCounts:
        """Convert the result of `as_json` back to counts. Errors: TypeError or KeyError if `content` has a different
        structure."""
        return cls(
            **{name: int(content[name]) for name in _NUMBERS},
            dropped=Counter(content["dropped"]),
            other=Counter(content["other"]),
            samples={
                reason: [DroppedSample(**sample) for sample in samples]
                for reason, samples in content["samples"].items()
            },
            measures={name: Counter(values) for name, values in content["measures"].items()},
        )


def _most_common(values: Counter[str]) -> Counter[str]:
    if len(values) <= _MOST_VALUES:
        return values
    ranked = sorted(values, key=lambda value: (value == OTHERS, -values[value], value))
    common = Counter({value: values[value] for value in ranked[:_MOST_VALUES]})
    common[OTHERS] += sum(values[value] for value in ranked[_MOST_VALUES:])
    return common
