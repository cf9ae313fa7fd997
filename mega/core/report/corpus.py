"""Make the page that shows how a corpus was prepared: for each step, kept and dropped documents with reasons, lengths,
languages, domains and examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from mega.core.report.read import CorpusRecord

MOST_ROWS, MOST_SAMPLES = 30, 20
_TITLES = {"characters": "Length in characters, up to", "language": "Languages", "domain": "Domains"}


def corpus_body(record: CorpusRecord) -> str:
    """Return the body of the page."""
    parts = [_section("Steps", _steps(record))]
    for step in record.steps:
        counts = step["counts"]
        if counts["dropped"] or counts["other"]:
            reasons = _bars(counts["dropped"] | counts["other"], counts["documents"])
            parts.append(_section(f"{step['name']}: why", reasons))
    for name, title in _TITLES.items():
        with_it = [step for step in record.steps if step["counts"]["measures"].get(name)]
        if with_it:
            parts.append(_section(f"{title} ({with_it[-1]['name']})", _measure(name, with_it[-1]["counts"])))
    parts += [_section(f"{step['name']}: dropped, for example", _samples(step["counts"])) for step in record.steps]
    return "\n".join(part for part in parts if part)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _steps(record: CorpusRecord) -> str:
    head = "<tr><th>step</th><th>documents</th><th>kept</th><th>dropped</th><th>written</th><th>bytes</th></tr>"
    rows = []
    for step in record.steps:
        counts = step["counts"]
        numbers = [
            counts["documents"],
            counts["kept"],
            sum(counts["dropped"].values()),
            counts["written"],
            counts["bytes"],
        ]
        cells = "".join(f'<td class="n">{number:,}</td>' for number in numbers)
        rows.append(f"<tr><td>{escape(step['name'])}</td>{cells}</tr>")
    return f"<table>{head}{''.join(rows)}</table>"


def _bars(values: Mapping[str, int], whole: int, *, by_name: bool = False) -> str:
    """Return a table of shares, with the largest share first."""
    ranked = sorted(values.items(), key=lambda item: (int(item[0]) if by_name else -item[1], item[0]))
    rows = []
    for name, count in ranked[:MOST_ROWS]:
        share = count / max(whole, 1)
        bar = f'<div style="background:var(--c0);height:.7em;width:{max(share * 20, 0.05):.2f}em"></div>'
        rows.append(
            f'<tr><td>{escape(name)}</td><td class="n">{count:,}</td><td class="n">{share:.2%}</td><td>{bar}</td></tr>'
        )
    if len(ranked) > MOST_ROWS:
        other_count = sum(count for _, count in ranked[MOST_ROWS:])
        rows.append(f'<tr><td>{len(ranked) - MOST_ROWS:,} others</td><td class="n">{other_count:,}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def _measure(name: str, counts: Mapping[str, Any]) -> str:
    values: dict[str, int] = counts["measures"][name]
    return _bars(values, sum(values.values()), by_name=name == "characters")


def _samples(counts: Mapping[str, Any]) -> str:
    return "".join(_rows(counts))


def _rows(counts: Mapping[str, Any]) -> Iterator[str]:
    for reason, samples in counts["samples"].items():
        yield f"<p>{escape(reason)}</p><table>"
        for sample in samples[:MOST_SAMPLES]:
            yield f"<tr><td>{escape(sample['where'])}</td><td><pre>{escape(sample['text'])}</pre></td></tr>"
        yield "</table>"
