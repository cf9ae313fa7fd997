"""`mega bench serve`: what is timed and reported, of an engine, of a server, and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mega import cli
from mega.core.bench.load import Load, Timing, plot, run_on_engine, run_on_server, summary, table, vocabulary
from mega.core.inference.request import Event, Limits, Request
from tests.inference.server.conftest import Running


class ClockedEngine:
    """One token a request and step, each step one second of `clock`."""

    limits = Limits(longest=64, cache=640, requests=10, vocab=50)

    def __init__(self) -> None:
        self.now, self.left = 0.0, dict[int, int]()

    @property
    def idle(self) -> bool:
        return not self.left

    def add(self, request: Request) -> int:
        assert all(0 <= token < 50 for token in request.prompt)
        self.left[number := len(self.left)] = request.tokens
        return number

    def step(self) -> list[Event]:
        self.now += 1.0
        events = [Event(request=number, token=7) for number in self.left]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        return events


def test_an_engine_is_timed_by_tokens() -> None:
    engine: Any = ClockedEngine()
    load = Load(0, 3, 5, 4)
    timings = run_on_engine(engine, load, clock=lambda: engine.now)
    assert timings == [Timing(0.0, (1.0, 2.0, 3.0, 4.0))] * 3
    row = summary(load, [*timings, Timing(0.0, (), "full")])
    assert (row.requests, row.failed, row.seconds, row.tokens_per_second) == (4, 1, 4.0, 3.0)
    assert row.first == row.between == (1.0, 1.0) and row.whole == 4.0
    assert table([row]).splitlines()[-1].split()[:5] == ["at", "once", "4", "1", "3.0"]
    picture = ElementTree.fromstring(plot([row, row], "a < b"))
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}polyline")) == 5
    with pytest.raises(ValueError, match="--rate 2: no request was answered: full"):
        summary(Load(2, 1, 5, 4), [Timing(0.0, (), "full")])


def test_arrivals_have_their_rate() -> None:
    arrivals = Load(4.0, 4001, 1, 1).arrivals()
    assert arrivals[0] == 0 and arrivals == sorted(arrivals) and arrivals[-1] == pytest.approx(1000, rel=0.05)


def test_a_server_is_timed_through_http(server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = server.url.removeprefix("http://")
    assert vocabulary(url) == 257
    timings = run_on_server(url, Load(0, 3, 5, 6), 257)
    assert [each.error for each in timings] == [""] * 3 and {each.count for each in timings} == {6}
    assert all(0 < len(each.tokens) <= 6 and list(each.tokens) == sorted(each.tokens) for each in timings)
    assert "maximum context length" in run_on_server(url, Load(0, 1, 300, 6), 257)[0].error
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "plot.svg"
    line = f"bench serve --url {url} --requests 3 --prompt-tokens 5 --new-tokens 6 --rate 0 --rate 500"
    assert cli.main([*line.split(), "--json", str(rows), "--draw", str(picture)]) == 0
    assert [json.loads(row)["rate"] for row in rows.read_text().splitlines()] == [0, 500]
    assert "tokens/s" in capsys.readouterr().out and picture.read_text().startswith("<svg")


def test_random_weights_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    model = "bench serve --model tiny-llama --vocab 64 --layers 1 --device cpu --lr 1 --fp8-weights --no-cuda-graph"
    assert cli.main([*model.split(), *"--requests 2 --prompt-tokens 5 --new-tokens 3".split()]) == 0
    shown = capsys.readouterr()
    assert "random weights, float32 on 1 x CPU: 5 tokens in, 3 out" in shown.out
    assert "not used, nothing is trained: --lr\n" in shown.err and "median s" in shown.out


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("bench w1 --rate 4", "--rate: is of the row serve"),
        ("bench serve --rate -1 --model tiny-llama", "--rate -1: must be from 0"),
        ("bench serve --url 127.0.0.1", "--url 127.0.0.1: must be HOST:PORT"),
        ("bench serve --url 127.0.0.1:1 --model tiny-llama", "--model: excludes --url 127.0.0.1:1"),
        ("bench serve --load x --layers 3", "--layers: excludes --load"),
        ("bench serve --model tiny-llama --trace x", "--trace x: excludes the row serve"),
        ("bench serve --model tiny-llama --fp8", "--fp8: trains in 8 bits; row serve: --fp8-weights"),
        ("bench serve --model tiny-llama --draw x.png", "--draw x.png: must end in .svg"),
        ("bench serve --model tiny-llama", "--vocab is missing"),
        ("bench serve --model tiny-llama --vocab 64 --prompt-tokens 9999", "--prompt-tokens 9999, --new-tokens 128: "),
    ],
)
def test_a_mistake_is_named(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert text in capsys.readouterr().err
