"""Tables and lists of pages that describe the code have the code's names: routes, fields, forms, metrics, signals."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

from mega.core.processes.signals import STOPPING
from tests.repository.test_pages import PAGES, text_of
from tests.repository.test_site import _script

REFERENCE = _script("reference")


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level."""
    level = heading.partition(" ")[0]
    return re.split(rf"^{level} ", text_of(page).split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]


def names(text: str) -> set[str]:
    """The names in the first column of a table; of `name{label=...}` the name."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w[\w ]*)(?:{.*?})?`", cell)}


def test_examples_of_docstrings() -> None:
    assert doctest.testmod(REFERENCE) == (0, 2)


def test_tables_are_those_of_the_code() -> None:
    """`python docs/reference.py` changes no page, and each of its tables is on a page."""
    pytest.importorskip("pydantic", reason="needs the extra serve")
    for page in PAGES:
        assert REFERENCE.filled(text_of(page)) == text_of(page), f"{page}: run PYTHONPATH=. python docs/reference.py"
    used = {name for page in PAGES for _, name, _ in REFERENCE.MARKED.findall(text_of(page))}
    assert used == set(REFERENCE.TABLES)


def test_routes_and_series_of_a_server() -> None:
    pytest.importorskip("fastapi", reason="needs the extra serve")
    from mega.core.inference.server.app import make_app
    from mega.core.inference.server.driver import Driver
    from mega.core.inference.server.options import ServerOptions
    from mega.core.inference.server.service import Service
    from tests.inference.server.conftest import ByteTokenizer
    from tests.support.fake_engine import FakeEngine

    driver = Driver(FakeEngine([1], 256), 8, lambda reason: None)
    service = Service(driver, ByteTokenizer(), ServerOptions(name="fake"))
    app = make_app(service)
    routes = {
        f"{method} {route.path.replace('{name:path}', 'NAME')}"
        for route in app._inside.routes
        for method in route.methods - {"HEAD"}
    }
    written = re.findall(r"`((?:GET|POST|PUT) \S+)`", section("docs/serving.md", "## Routes").split("```")[0])
    assert set(written) == routes - {"GET /index.html"}
    series = re.findall(r"^# TYPE (mega_\w+)", service.metrics.text().decode(), re.MULTILINE)
    exported = {name for name in series if not name.endswith("_created")}
    assert names(section("docs/metrics.md", "## /metrics of mega serve")) == exported


def test_series_of_a_run() -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra track")
    from prometheus_client import generate_latest

    from mega.core.training.metrics.exporter import FIGURES, Exporter
    from mega.core.training.metrics.meters import Meters

    exporter, meters = Exporter(0, steps=9, still_s=1), Meters.__new__(Meters)
    try:
        meters.devices, meters.flops_per_token, meters.peak = 1, 1.0, 1.0
        exporter.step(1, dict.fromkeys([*FIGURES, "seconds"], 1.0), meters._figures(1, 1.0, 1))
        exporter.slowest(0, 1.0)
        exported = re.findall(r"^# TYPE (\w+)", generate_latest(exporter._registry).decode(), re.MULTILINE)
    finally:
        exporter.close()
    assert names(section("docs/metrics.md", "## /metrics")) == set(exported)


def test_fields_of_metrics(tmp_path: Path) -> None:
    """A run of two steps writes each field of the page, and no other one."""
    from mega.cli import main

    line = (
        "pretrain --model tiny-gpt --mock-data --vocab 64 --micro-batch 1 --global-batch 2 --lr 1e-3 --steps 2"
        " --device cpu --dtype fp16 --initial-loss-scale 1 --experts 2 --log-params-norm --log-zeros"
        f" --eval-interval 1 --eval-iters 1 --log-interval 1 --save {tmp_path}"
    )
    assert main(line.split()) == 0
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    written = {re.sub(r"_\d+$", "_N", name) for row in rows for name in row}
    listed = names(section("docs/metrics.md", "## metrics.jsonl"))
    assert {name for name in listed if not name.startswith("test_")} == written - {"test_loss", "test_perplexity"}
    events = map(json.loads, (tmp_path / "metrics.events.jsonl").read_text().splitlines())
    assert {event["event"] for event in events} <= names(section("docs/metrics.md", "## metrics.events.jsonl"))


def test_signals_and_exit_codes() -> None:
    """Each signal that stops a run has a row with 128 + its number, and the pages have no other codes than the code."""
    run, server = text_of("docs/endings.md").split("\n\n")[2], section("docs/serving.md", "## How it ends")
    rows = re.findall(r"^\| (.*?) \|.*\| (.*?) \|$", run, re.MULTILINE)
    for signal in STOPPING:
        codes = [code for what, code in rows if re.search(rf"\b{signal.name}\b", what) and code.isdecimal()]
        assert codes and set(codes) == {str(128 + signal)}, signal.name
    known = {"0", "1", "2", "128 + signal", *(str(128 + signal) for signal in STOPPING)}
    codes = [code.strip() for code in re.findall(r"\|([^|\n]*)\|$", run + server, re.MULTILINE)]
    assert set(codes) - {"", "exit code", "---", "as without `--max-restarts`"} <= known


def test_defaults_that_pages_name() -> None:
    """A number in parentheses after a flag of a run is the flag's default: `--timeout-minutes` (10)."""
    rows = [line.split(" | ") for line in text_of("docs/configuration.md").splitlines() if line.startswith("| `--")]
    defaults = {row[0].strip("|` "): row[4].strip("`") for row in rows}
    found = [
        (page, flag, number)
        for page in ("docs/endings.md", "docs/guides/slurm.md")
        for flag, number in re.findall(r"`(--[a-z-]+)`\s\((\d[\d.]*)[ )]", text_of(page))
    ]
    assert len(found) >= 6
    for page, flag, number in found:
        assert float(defaults[flag]) == float(number), (page, flag)
