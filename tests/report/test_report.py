"""The page of a run and of an evaluation: everything is in it, nothing comes from elsewhere, text stays text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mega import cli
from mega.core.files import SEAL
from mega.core.report.chart import chart, thinned
from mega.core.report.goodput import goodput
from mega.core.report.read import RunRecord, read

ROWS = [
    {"step": 1, "consumed": 8, "lr": 1e-4, "batch": 8, "skipped": 0, "loss": 5.5, "grad_norm": 2.0, "seconds": 0.5},
    {"step": 2, "consumed": 16, "lr": 2e-4, "batch": 8, "skipped": 1, "loss": None, "grad_norm": None, "seconds": 0.4},
    {"step": 3, "consumed": 32, "lr": 2e-4, "batch": 16, "skipped": 1, "loss": 4.5, "grad_norm": 1.0, "seconds": 0.4},
    {"step": 3, "tokens_per_second_per_device": 2048.0, "tflops_per_device": 0.1, "memory": 2**31},
    {"step": 3, "valid_loss": 4.6, "valid_perplexity": 99.5},
    {"step": 3, "sample": "<script>alert(1)</script> & so on"},
]

EVENTS = [
    {"step": 0, "event": "begin", "at": 100.0},
    {"step": 0, "event": "started", "at": 101.0, "seconds": 0.5},
    {"step": 1, "event": "save", "at": 101.2, "seconds": 0.2},
    {"step": 1, "event": "begin", "at": 104.0, "lost_steps": 2, "lost_seconds": 0.8, "last_at": 102.0},
    {"step": 3, "event": "spike", "at": 105.0, "policy": "skip", "samples": [8, 16]},
    {"step": 3, "event": "end", "at": 106.0},
]


class Checked(HTMLParser):
    """Elements that are open and never closed, and everything that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(path: Path) -> str:
    text = path.read_text()
    parser = Checked()
    parser.feed(text)
    assert not parser.open and not parser.fetched and "script" not in parser.tags and "url(" not in text
    for drawing in re.findall("<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    return text


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "runs" / "first"
    (run / "step-0000003").mkdir(parents=True)
    (run / "step-0000003" / "run.toml").write_text("[model]\nlayers = 2\n")
    verdicts = {"steps": {"3": {"status": "suspect", "reason": "the loss is NaN at step 9"}}}
    (run / "verdicts.json").write_text(json.dumps(verdicts))
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + '\n{"step": 4, "lo')
    (run / "metrics.events.jsonl").write_text("\n".join(map(json.dumps, EVENTS)) + '\n{"st')
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    text = checked(run / "report.html")
    for title in ("Loss", "Learning rate", "Gradient norm", "Throughput (tokens/s per device)", "Memory (GiB)"):
        assert f"<h2>{title}</h2>" in text
    for said in (
        "the loss is not finite",
        "the update was skipped",
        "the global batch goes from 8 to 16",
        "saved; suspect: the loss is NaN at step 9",
        "sample: &lt;script&gt;alert(1)&lt;/script&gt; &amp; so on",
        "layers = 2",
        "4.6, 99.48",
        "lines that are not rows",
        "<h2>Goodput</h2>",
        "productive",
        "a spike: samples 8 to 15 are left out",
        "resumed; 2 steps were done again",
    ):
        assert said in text, said


def test_a_mixture(tmp_path: Path) -> None:
    """Shares in the summary, and one chart for all experts."""
    loads = [(1, 0.5, 0.25, (8, 2)), (2, 0.25, None, (6, 4))]
    rows = [
        {"step": step, "loss": 2.0, "largest_share": most, "dropped_share": dropped}
        | {f"tokens_of_expert_{number}": tokens for number, tokens in enumerate(each)}
        for step, most, dropped, each in loads
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert cli.main(["report", str(tmp_path)]) == 0
    text = checked(tmp_path / "report.html")
    assert "largest share of an expert</th><td><pre>25.0%, at most 50.0%" in text
    assert "dropped choices of experts</th><td><pre>25.0%, at most 25.0%" in text
    assert text.count("<h2>Tokens of an expert</h2>") == 1 and "expert 1" not in text.replace("_", " ")
    assert all(f"{name}</span>" in text for name in ("most", "mean", "least"))


@pytest.mark.parametrize(
    ("back", "lost"),
    [
        ([{"step": 110, "event": "nan", "to": 100, "samples": [200, 220]}], 10.0),
        ([{"step": 110, "event": "nan", "to": 100}, {"step": 105, "event": "begin", "lost_seconds": 5.0}], 10.0),
        ([{"step": 110, "event": "spike", "samples": [218, 220]}], 1.0),
    ],
)
def test_the_steps_of_a_rollback_are_lost(back: list[Any], lost: float) -> None:
    """All of them, though the rows count one more step as skipped; those that a resume does again are lost once."""
    steps: list[Any] = [{"step": step, "skipped": int(step >= 110), "seconds": 1.0} for step in range(1, 121)]
    events: list[Any] = [{"step": 0, "event": "begin"}, *back, {"step": 120, "event": "end"}]
    if len(back) == 2:  # steps 106 to 110 are those of the process that resumed
        steps = [{**row, "skipped": int(row["step"] >= 105)} for row in steps]
    found = goodput(steps, [{"at": 300.0 if event["event"] == "end" else 0.0, **event} for event in events])
    assert found is not None and (found.lost, found.productive) == (lost, 120.0 - lost + 5.0 * (len(back) == 2))


def test_a_run_that_has_not_ended_is_counted_until_its_newest_row() -> None:
    steps: list[Any] = [{"step": step, "seconds": 1.0} for step in range(1, 51)]
    begin: Any = {"step": 0, "event": "begin", "at": 1000.0}
    found = goodput(steps, [begin, {**begin, "event": "started", "at": 1000.3, "seconds": 0.3}], written=1050.5)
    assert found is not None and (found.total, found.productive) == (50.5, 50.0)
    end: Any = {**begin, "event": "end", "step": 50, "at": 1051.0}
    found = goodput(steps, [begin, end], written=9999.0)  # copied afterwards
    assert found is not None and found.total == 51.0


def test_why_a_step_was_skipped_is_said_once(tmp_path: Path) -> None:
    skipped = [{**ROWS[0], "step": step, "skipped": step - 1} for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, skipped)))
    events = [
        {"step": 2, "event": "spike", "at": 1.0, "policy": "skip", "samples": [8, 16]},
        {"step": 4, "event": "nan", "at": 1.0, "policy": "stop", "samples": [24, 32]},
    ]
    (tmp_path / "metrics.events.jsonl").write_text("\n".join(map(json.dumps, events)))
    found = read(tmp_path)
    assert isinstance(found, RunRecord)
    assert [(event.step, event.text) for event in found.events] == [
        (2, "a spike: samples 8 to 15 are left out"),
        (3, "the update was skipped: gradients are not finite"),
        (4, "numbers are not finite: the run ends"),
    ]


def test_an_evaluation(tmp_path: Path) -> None:
    figures = [{"name": "ppl", "value": 19.31, "low": 19.0, "high": 19.6}, {"name": "tokens", "value": 9, "low": None}]
    result = {
        "task": "wikitext103",
        "figures": figures,
        "settings": {"model": {"path": "a<b"}},
        "tokens_per_second": 1e5,
    }
    (tmp_path / "eval.json").write_text(json.dumps(result))
    assert cli.main(["report", str(tmp_path / "eval.json"), "--out", str(tmp_path / "page.html")]) == 0
    text = checked(tmp_path / "page.html")
    assert "19.31" in text and "a&lt;b" in text and "100k" in text
    samples = {"local": [{"doc": {"text": "x"}, "resps": [[-1.0, True]]}]}
    harness = {"results": {"local": {"alias": "local", "acc,none": 0.5, "acc_stderr,none": 0.1}}, "samples": samples}
    (tmp_path / "eval.json").write_text(json.dumps(harness))
    assert cli.main(["report", str(tmp_path / "eval.json")]) == 0
    assert "local: acc,none" in checked(tmp_path / "eval.html")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent", None, "no such file or directory"),
        ("empty.jsonl", "", "holds no row of metrics"),
        ("other.json", "[1, 2]", "is neither a run's metrics nor an evaluation's JSON"),
        ("torn.jsonl", '{"step": 1, "lo', "holds no row of metrics"),
        ("broken.jsonl", "{\n[", "is neither a run's metrics nor an evaluation's JSON"),
        ("table.tsv", "a\tb\n1\t2\n", "is neither a run's metrics nor an evaluation's JSON"),
        (".", None, "holds no metrics.jsonl"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert cli.main(["report", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_spike_is_never_thinned_out() -> None:
    curve = [(float(step), 1.0) for step in range(100_000)]
    curve[54_321] = (54_321.0, 9.0)
    found = thinned(curve)
    assert len(found) < 3000 and (54_321.0, 9.0) in found
    assert chart({"a": [(1.0, float("nan"))]}) == '<p class="none">no finite value</p>'
    assert chart({"a": [(1.0, 3.0)]}).count("<circle") == 1


def test_no_page_goes_into_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (step := tmp_path / "step-0000001").mkdir()
    (step / SEAL).touch()
    assert cli.main(["report", str(tmp_path), "--out", str(step / "page.html")]) == 2
    assert f"{step} is a checkpoint, which holds nothing else" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["x", None, [], {}, True, 1e400, 10**400, 10**12, -1], ids=repr)
def test_values_of_damaged_files_end_no_report(
    tmp_path: Path, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row or an event with such a value loses the value, or is left out, in every field."""
    (tmp_path / "step-0000001").mkdir()
    verdict = {"manifest": "", "status": "good", "sound_steps": 1, "reason": ""}
    for name, rows in (("metrics.jsonl", ROWS), ("metrics.events.jsonl", EVENTS)):
        fields = sorted({field for row in rows for field in row})
        damaged = [{**row, field: value} for field in fields for row in rows if field in row]
        for path, content in (("metrics.jsonl", ROWS), ("metrics.events.jsonl", EVENTS), (name, [*rows, *damaged])):
            (tmp_path / path).write_text("".join(json.dumps(row) + "\n" for row in content))
        for steps in ({"1": value}, {"1": {**verdict, "reason": value}}, value):
            (tmp_path / "verdicts.json").write_text(json.dumps({"steps": steps}))
            assert isinstance(read(tmp_path), RunRecord)
        assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
        assert cli.main(["plot", str(tmp_path), "--out", str(tmp_path / "plot.svg")]) == 0
