"""Scores by a server, a classifier, a word list and a file; `corpus annotate` and `corpus select` with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mega.cli import main
from mega.core.corpus.scorers import ScorerOptions, cleaned, make_scorer, scored
from tests.support.shared import shared


class Perspective(BaseHTTPRequestHandler):
    """Toxicity is the share of the letter x. `asked` counts requests; `codes` are answered first."""

    asked: list[dict[str, Any]] = []
    paths: list[str] = []
    times: list[float] = []
    codes: list[int] = []
    answer: bytes | None = None
    wait = 0.0

    def do_POST(self) -> None:
        kind = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind.asked.append(body)
        kind.paths.append(self.path)
        kind.times.append(time.monotonic())
        time.sleep(kind.wait)
        if kind.wait > 0.5:  # nobody listens any more
            return
        code = kind.codes.pop(0) if kind.codes else 200
        text = body["comment"]["text"]
        if "broke" in text:
            code = 400
        value = text.count("x") / max(len(text), 1)
        scores = {
            name: {"summaryScore": {"value": value, "type": "PROBABILITY"}} for name in body["requestedAttributes"]
        }
        sent = kind.answer if kind.answer is not None else json.dumps({"attributeScores": scores}).encode()
        self.send_response(code)
        self.end_headers()
        if code == 200:
            self.wfile.write(sent)

    def log_message(self, *given: Any) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    """Says nothing of a client that has gone."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Perspective.asked, Perspective.paths, Perspective.times, Perspective.codes = [], [], [], []
    Perspective.answer, Perspective.wait = None, 0.0
    found = Quiet(("127.0.0.1", 0), Perspective)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_server_is_asked_as_perspective_is(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", "secret")
    rows = [{"text": "axxb<|endoftext|>", "id": 1}, {"text": " \n"}, {"text": "broken"}, {"text": "é" * 10}]
    source = written(tmp_path / "in.jsonl", rows)
    words = ["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--scorer", server, "--max-bytes", "5"]
    assert main(["corpus", "annotate", *words]) == 0
    first, blank, refused, cut = read(tmp_path / "out.jsonl")
    assert first["text"] == "axxb" and first["id"] == 1
    assert first["score"] == dict.fromkeys(
        ("toxicity", "severe_toxicity", "sexually_explicit", "threat", "profanity", "identity_attack"), 0.5
    )
    assert blank["score"] is None and refused["score"] is None
    assert cut["text"] == "é" * 10  # what is stored is whole
    asked = {body["comment"]["text"]: body for body in Perspective.asked}
    assert set(asked) == {"axxb", "broke", "éé"}  # cut to bytes between two characters
    assert asked["axxb"]["languages"] == ["en"] and asked["axxb"]["spanAnnotations"] is False
    assert asked["axxb"]["requestedAttributes"]["TOXICITY"] == {}
    assert set(Perspective.paths) == {"/v1alpha1/comments:analyze?key=secret"}


def test_it_is_asked_again_and_no_faster_than_the_rate(server: str) -> None:
    Perspective.codes = [503, 429]
    scorer = make_scorer(ScorerOptions(scorer=server, rate=20, timeout=10, connections=4))
    found = scored(scorer, [f"text {number}" for number in range(10)])
    assert all(score is not None for score in found)
    times = sorted(Perspective.times)
    assert len(times) == 12 and times[-1] - times[0] >= 0.4  # 11 pauses of 0.05, less what delayed the first


@pytest.mark.parametrize(
    ("codes", "wait", "answer", "message"),
    [
        ([500] * 9, 0.0, None, "no answer in 2 tries (HTTP 500); what is done stays done"),
        ([403], 0.0, None, "answers HTTP 403; its key is read from $PERSPECTIVE_API_KEY"),
        ([404], 0.0, None, "answers HTTP 404"),
        ([], 1.0, None, "no answer in 2 tries (timed out)"),
        ([], 0.0, b"<html>", "answers b'<html>'; must be attributeScores.NAME.summaryScore.value"),
        ([], 0.0, b'{"attributeScores":{"T":{"summaryScore":{"value":7}}}}', "t 7: must be a number of 0 to 1"),
    ],
)
def test_a_server_that_fails_is_one_line(
    server: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    codes: list[int],
    wait: float,
    answer: bytes | None,
    message: str,
) -> None:
    Perspective.codes, Perspective.wait, Perspective.answer = codes, wait, answer
    source = written(tmp_path / "in.jsonl", [{"text": "a"}])
    words = ["--input", str(source), "--output", str(tmp_path / "out"), "--scorer", server, "--tries", "2"]
    assert main(["corpus", "annotate", *words, "--timeout", "0.2" if wait else "10"]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("mega:"))
    assert f"--scorer {server}: {message}" in line


def test_an_unreachable_server_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "in.jsonl", [{"text": "a"}])
    words = [
        "--input",
        str(source),
        "--output",
        str(tmp_path / "out"),
        "--scorer",
        "http://127.0.0.1:9",
        "--tries",
        "2",
    ]
    assert main(["corpus", "annotate", *words, "--timeout", "0.2"]) == 2
    assert "no answer in 2 tries ([Errno 111] Connection refused)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--scorer", "magic"],
            "--scorer magic: must be https://..., http://..., model:DIR, words:FILE or scores:FILE",
        ),
        (["--scorer", "words:none"], "--scorer words:none: cannot be read"),
        (["--scorer", "model:none"], "--scorer model:none: has no config.json"),
        (["--scorer", "scores:in.jsonl"], '--scorer scores:in.jsonl:1: must be an object with "text" and "score"'),
        (["--scorer", "http://x", "--workers", "2"], "--workers 2: must be 1; a server is asked by --connections"),
        (["--scorer", "http://x", "--rate", "-1"], "--rate -1.0: must be at least 0"),
    ],
)
def test_what_cannot_be_is_said_before_a_byte_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "in.jsonl", [{"text": "a"}])
    assert main(["corpus", "annotate", "--input", "in.jsonl", "--output", "out", *more]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_words_and_files_score_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.txt").write_text("bad\nworse\n")
    rows = [{"text": text} for text in ("a bad word " + "and more " * 10, "a good word", "bad worse")]
    written(tmp_path / "in.jsonl", rows)
    assert main(["corpus", "annotate", "--input", "in.jsonl", "--output", "a.jsonl", "--scorer", "words:list.txt"]) == 0
    first, *others = [row["score"]["toxicity"] for row in read(tmp_path / "a.jsonl")]
    assert first == pytest.approx(10 / 23) and others == [0.0, 1.0]
    assert main(["corpus", "annotate", "--input", "in.jsonl", "--output", "b.jsonl", "--scorer", "scores:a.jsonl"]) == 0
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "b.jsonl")
    written(tmp_path / "in.jsonl", [*rows, {"text": "new"}])
    words = ["--input", "in.jsonl", "--output", "c.jsonl", "--scorer", "scores:a.jsonl"]
    assert main(["corpus", "annotate", *words]) == 2


def test_a_classifier_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    labels = {0: "toxicity", 1: "neutral"}
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, id2label=labels
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nbad\ngood\nword\n")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    scorer = make_scorer(ScorerOptions(scorer=f"model:{tmp_path}"))
    found = scored(scorer, ["bad word", "", "good"])
    assert found[1] is None
    assert found[0] is not None and set(found[0]) == {"toxicity", "neutral"}
    assert sum(found[0].values()) == pytest.approx(1)


def test_killed_it_asks_only_for_what_is_missing(server: str, tmp_path: Path) -> None:
    """Text in eight parts; after kill -9 at most the part that was asked for is asked for again."""
    Perspective.wait = 0.005
    rows = [{"text": f"{number} {'ax' * 500}"} for number in range(1000)]
    source = written(tmp_path / "in.jsonl", rows)
    words = ["corpus", "annotate", "--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--scorer", server]
    process = subprocess.Popen([sys.executable, "-m", "mega", *words], stdout=subprocess.DEVNULL)
    while len(Perspective.asked) < 500:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.3)
    before = len(Perspective.asked)
    assert main(words) == 0
    found = read(tmp_path / "out.jsonl")
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    assert all(row["score"]["toxicity"] > 0.4 for row in found)
    assert len(Perspective.asked) - before < 1000 - 500 + 300


def test_the_least_toxic_half_is_megatrons(tmp_path: Path) -> None:
    golden = json.loads(shared("golden/misc.json").read_text())["detox_filter"]
    source = written(tmp_path / "in.jsonl", golden["lines"])
    words = ["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--report", str(tmp_path / "report.json")]
    assert main(["corpus", "select", *words]) == 0
    assert sorted(row["text"] for row in read(tmp_path / "out.jsonl")) == golden["kept_set"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [report["all"]["mean"], report["all"]["deviation"]] == pytest.approx(golden["mean_std_all"], abs=1e-15)
    assert report["share above"] == pytest.approx(golden["toxic_share"])
    assert [report["kept from"], report["kept to"]] == golden["kept_range"]
    assert report["without a value"] == 3 and report["kept"] == 7


def test_the_choice_does_not_depend_on_parts_or_processes(tmp_path: Path) -> None:
    rows = [{"text": "t" * 50, "n": number, "score": {"toxicity": number * 7 % 10 / 10}} for number in range(1000)]
    source = written(tmp_path / "in.jsonl", rows)
    for name, more in (("a", []), ("b", ["--workers", "2"])):
        words = ["--input", str(source), "--output", str(tmp_path / name), "--share", "0.25", *more]
        assert main(["corpus", "select", *words]) == 0
    found = read(next((tmp_path / "a").glob("*.jsonl")))
    assert found == read(next((tmp_path / "b").glob("*.jsonl")))
    values = [row["score"]["toxicity"] for row in found]
    assert len(found) == 250 and max(values) == 0.2 and values.count(0.2) == 50
    assert [row["n"] for row in found] == sorted(row["n"] for row in found)
    assert [row["n"] for row in found if row["score"]["toxicity"] == 0.2] == list(range(6, 500, 10))  # of equal ones
    # the first stay


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"score": {"toxicity": "high"}}, [], "in.jsonl:1: score.toxicity 'high': must be a number, or null"),
        ({"score": None}, [], "--by score.toxicity: no document has it"),
        ({"score": {"toxicity": 1}}, ["--share", "0"], "--share 0.0: must be greater than 0 and at most 1"),
    ],
)
def test_mistakes_of_select(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, more: list[str], message: str
) -> None:
    source = written(tmp_path / "in.jsonl", [{"text": "a", **row}])
    assert main(["corpus", "select", "--input", str(source), "--output", str(tmp_path / "out"), *more]) == 2
    assert message in capsys.readouterr().err


def test_cleaned() -> None:
    assert cleaned("a<|endoftext|>b") == "ab"
    assert cleaned("aüü", 4) == "aü"
