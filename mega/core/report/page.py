"""Make one self-contained HTML page: charts, events, samples and settings of a run, or the figures of an evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import mean

from mega.core.report.chart import Scale, chart, short
from mega.core.report.corpus import corpus_body
from mega.core.report.read import CorpusRecord, EvaluationRecord, RunEvent, RunRecord, Series

STYLE = """
:root { color-scheme: light dark; --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #dc2626; --c4: #7c3aed;
  --c5: #0891b2; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1500px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 0 0 .3rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 1.2rem; }
section { border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; margin: 0 0 1.2rem; overflow: auto; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; opacity: .75; }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 1.6; }
.legend { margin: 0; } .legend span { margin-right: 1.2em; } .hit { opacity: 0; } .hit:hover { opacity: 1; }
table { border-collapse: collapse; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } pre { white-space: pre-wrap; margin: 0; }
""" + "\n".join(
    f"polyline.c{n} {{ stroke: var(--c{n}); }} circle.c{n} {{ fill: var(--c{n}); }} span.c{n} {{ color: var(--c{n}); }}"
    for n in range(6)
)

KNOWN = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second_per_device": "Throughput",
    "tflops_per_device": "TFLOP/s per device",
    "memory": "Memory",
    "loss_scale": "Loss scale",
    "seconds": "Seconds per step",
    "batch": "Global batch",
}
"""Metric -> title of the metric's chart, in order. Charts of other metrics follow, sorted by name."""
UNITS = {"tokens_per_second_per_device": "tokens/s per device", "memory": "GiB", "seconds": "s"}
PLAIN = ("consumed", "skipped", "finite")
"""Counters that are not shown in charts."""
SHARES = {"largest_share": "largest share of an expert", "dropped_share": "dropped choices of experts"}
"""Metric of MoE layers -> title. The summary shows the last and the largest value."""
OF_EXPERT = "tokens_of_expert_"
"""Prefix of the metrics for the load of each expert."""
MOST_EVENTS, MOST_SAMPLES = 500, 50


def page(record: RunRecord | EvaluationRecord | CorpusRecord) -> str:
    """Return the whole page as HTML."""
    if isinstance(record, CorpusRecord):
        body = corpus_body(record)
    else:
        body = _run(record) if isinstance(record, RunRecord) else _evaluation(record)
    title = escape(record.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _run(run: RunRecord) -> str:
    return "\n".join(
        part
        for part in (
            _section("Summary", _table(_summary(run))),
            _section("Goodput", _table(run.goodput.rows())) if run.goodput is not None else "",
            f'<div class="charts">{"".join(_charts(run))}</div>',
            _events("Events", run.events, MOST_EVENTS),
            _events("Samples", run.samples, MOST_SAMPLES),
            _section("Settings", f"<pre>{escape(run.config)}</pre>") if run.config else "",
        )
        if part
    )


def _summary(run: RunRecord) -> Iterable[tuple[str, str]]:
    def last(name: str) -> float:
        return next((y for _, y in reversed(run.series.get(name, [])) if math.isfinite(y)), math.nan)

    steps = max(int(x) for curve in run.series.values() for x, _ in curve)
    yield "last step", f"{steps:,}"
    if "loss" in run.series:
        yield "training loss", short(last("loss"))
    for name in run.sets:
        curve = [point for point in run.series[f"{name}_loss"] if math.isfinite(point[1])]
        if curve:
            step, best = min(curve, key=lambda point: point[1])
            yield f"{name}: loss, perplexity", f"{short(curve[-1][1])}, {short(math.exp(min(curve[-1][1], 700)))}"
            yield f"{name}: best loss", f"{short(best)} at step {step:,.0f}"
    if "consumed" in run.series:
        yield "samples", f"{last('consumed'):,.0f}"
    if "seconds" in run.series:
        seconds = sum(y for _, y in run.series["seconds"] if math.isfinite(y))
        yield "time in steps", f"{seconds / 3600:.2f} h" if seconds > 5400 else f"{seconds:,.1f} s"
    if "tokens_per_second_per_device" in run.series:
        yield "tokens/s per device", f"{last('tokens_per_second_per_device'):,.0f}"
    if "memory" in run.series:
        yield "peak memory", f"{max(y for _, y in run.series['memory']) / 2**30:.2f} GiB"
    for name, title in SHARES.items():
        if name in run.series:
            most = max((y for _, y in run.series[name] if math.isfinite(y)), default=math.nan)
            yield title, f"{last(name):.1%}, at most {most:.1%}"
    if "skipped" in run.series:
        yield "skipped updates", f"{last('skipped'):,.0f}"
    if run.broken:
        yield "lines that are not rows", f"{run.broken}"


def _charts(run: RunRecord) -> Iterable[str]:
    held_out = {name: run.series[f"{name}_loss"] for name in run.sets}
    excluded = {"loss", *(f"{name}_loss" for name in held_out), *(f"{name}_perplexity" for name in held_out), *PLAIN}
    losses = {**({"training": run.series["loss"]} if "loss" in run.series else {}), **held_out}
    if losses:
        yield _section("Loss", chart(losses, "nats"))
    experts = [name for name in run.series if name.startswith(OF_EXPERT)]
    if experts:
        yield _section("Tokens of an expert", chart(_spread([run.series[name] for name in experts]), "tokens"))
    other_metrics = sorted(name for name in run.series if name not in KNOWN and name not in experts)
    for name in [*KNOWN, *other_metrics]:
        if name in excluded or name not in run.series:
            continue
        curve = _scaled(run.series[name], 2.0**-30) if name == "memory" else run.series[name]
        unit = UNITS.get(name, "")
        title = KNOWN.get(name, name.replace("_", " ")) + (f" ({unit})" if unit else "")
        yield _section(title, chart({name: curve}, unit, Scale(name in ("grad_norm", "loss_scale"))))


def _spread(curves: Sequence[Series]) -> dict[str, Series]:
    """Return curves of the largest, mean and smallest value over all experts at each step."""
    steps = [(points[0][0], [y for _, y in points]) for points in zip(*curves, strict=False)]
    folds: dict[str, Callable[[list[float]], float]] = {"most": max, "mean": mean, "least": min}
    return {name: [(step, fold(values)) for step, values in steps] for name, fold in folds.items()}


def _scaled(curve: Series, factor: float) -> Series:
    return [(x, y * factor) for x, y in curve]


def _events(title: str, events: Sequence[RunEvent], most: int) -> str:
    if not events:
        return ""
    rows = [(f"step {event.step:,}", event.text) for event in events[:most]]
    if len(events) > most:
        rows.append(("", f"and {len(events) - most} more"))
    return _section(title, _table(rows))


def _evaluation(record: EvaluationRecord) -> str:
    content = record.content
    parts = []
    if "figures" in content:
        rows = [(each["name"], each["value"], each.get("low"), each.get("high")) for each in content["figures"]]
        parts.append(_section(str(content.get("task")), _numbers(("", "value", "95 % interval", ""), rows)))
    if "results" in content:
        rows = [
            (f"{task}: {metric}", value, content["results"][task].get(f"{metric.partition(',')[0]}_stderr,none"), None)
            for task, metrics in content["results"].items()
            for metric, value in metrics.items()
            if isinstance(value, int | float) and "_stderr" not in metric
        ]
        parts.append(_section("lm-eval", _numbers(("", "value", "standard error", ""), rows)))
    speed = {
        name: content.get(name) for name in ("tokens", "seconds", "tokens_per_second", "ranks", "device", "memory")
    }
    parts.append(
        _section(
            "Speed",
            _table((name, short(v) if isinstance(v, float) else str(v)) for name, v in speed.items() if v is not None),
        )
    )
    settings = _flat(
        {name: content[name] for name in ("settings", "version", "torch", "fingerprint") if name in content}
    )
    parts.append(_section("Settings", _table(settings)))
    for task, samples in (content.get("samples") or {}).items():
        samples_shown = [
            (str(number), json.dumps(each, default=str)[:4000]) for number, each in enumerate(samples[:MOST_SAMPLES])
        ]
        parts.append(_section(f"Samples of {task}", _table(samples_shown)))
    return "\n".join(parts)


def _flat(value: object, name: str = "") -> Iterable[tuple[str, str]]:
    """Yield nested settings as rows with names such as `a.b`."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name.removeprefix("settings."), str(value)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    table_rows = (f"<tr><th>{escape(name)}</th><td><pre>{escape(text)}</pre></td></tr>" for name, text in rows)
    return f"<table>{''.join(table_rows)}</table>"


def _numbers(heads: Sequence[str], rows: Iterable[Sequence[float | str | None]]) -> str:
    table_rows = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for name, *values in rows:
        cells = "".join(f'<td class="n">{"" if v is None or isinstance(v, str) else short(v)}</td>' for v in values)
        table_rows.append(f"<td>{escape(str(name))}</td>{cells}")
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in table_rows)}</table>"
