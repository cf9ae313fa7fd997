"""A run's figures and its state over HTTP: from meters, and of a run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega.cli import main
from mega.core.activity import ACTIVITY

exporters = pytest.importorskip("mega.core.training.metrics.exporter", reason="needs the extra track")


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def figures(port: int) -> dict[str, float]:
    status, text = ask(port, "/metrics")
    assert status == 200
    return {name: float(value) for name, value in re.findall(r"^(mega\S+) (\S+)$", text, re.M)}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    for name, value in {"phase": "training", "step": 0, "moves": 0, "saved": None}.items():
        monkeypatch.setattr(ACTIVITY, name, value)
    one = exporters.Exporter(0, steps=9, still_s=0.2)
    yield one
    one.close()


def test_figures_are_those_of_the_last_step(exporter: exporters.Exporter) -> None:
    for step in (1, 2):
        row = {"loss": 3.0 - step, "lr": 0.1, "grad_norm": None, "consumed": 8 * step, "seconds": 0.001}
        exporter.step(step, row, {"mfu_ratio": None, "memory_bytes": 5.0})
    exporter.evaluation("valid-a.b", {"loss": 1.5})
    exporter.slowest(3, 1.4)
    time.sleep(0.6)  # the server looks twice a second
    found = figures(exporter.port)
    assert (found["mega_slowest_rank"], found["mega_slowest_rank_ratio"]) == (3, 1.4)
    assert 0.4 < found['mega_phase_seconds{phase="training"}'] < 60 and not found['mega_phase_seconds{phase="saving"}']
    expected = {"step": 2, "steps": 9, "loss": 1, "lr": 0.1, "consumed": 16, "memory_bytes": 5}
    assert {name: found[f"mega_{name}"] for name in expected} == expected
    assert found['mega_evaluation{figure="loss",set="valid-a.b"}'] == 1.5
    assert "mega_grad_norm" not in found and "mega_mfu_ratio" not in found
    assert 0 < found["mega_goodput_ratio"] < 1 and found['mega_phase{phase="training"}'] == 1
    assert found["mega_save_age_seconds"] != found["mega_save_age_seconds"], "nothing is saved"
    ACTIVITY.saved = 2, 0.5, time.monotonic()
    found = figures(exporter.port)
    assert found["mega_save_step"] == 2 and found["mega_save_seconds"] == 0.5 and found["mega_save_age_seconds"] < 5


def test_health_is_that_of_the_phase(exporter: exporters.Exporter) -> None:
    time.sleep(1.0)
    status, text = ask(exporter.port, "/health")
    assert status == 503 and json.loads(text)["status"] == "stands still"
    ACTIVITY.moves += 1
    assert ask(exporter.port, "/health")[0] == 200
    ACTIVITY.phase = "saving"
    time.sleep(1.0)
    assert ask(exporter.port, "/health")[0] == 200, "a save takes its time"
    assert ask(exporter.port, "/")[0] == 404


def test_a_port_that_is_taken(exporter: exporters.Exporter) -> None:
    with pytest.raises(ValueError, match=f"--metrics-port {exporter.port}: .*; valid: a free port"):
        exporters.Exporter(exporter.port, steps=1, still_s=1)


def test_a_port_that_is_taken_starts_nothing(exporter: exporters.Exporter, capsys: pytest.CaptureFixture[str]) -> None:
    line = "pretrain --model tiny-gpt --mock-data --vocab 64 --micro-batch 1 --lr 1e-3 --steps 1 --device cpu"
    assert main([*line.split(), "--metrics-port", str(exporter.port)]) == 2
    assert f"--metrics-port {exporter.port}: Address already in use; valid: a free port" in capsys.readouterr().err


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    absent = "prometheus_client"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == absent else find(name, *more))
    assert main("pretrain --steps 1 --metrics-port 9400".split()) == 2
    assert "--metrics-port 9400: needs prometheus_client; pip install '.[track]' in a clone" in capsys.readouterr().err


def test_a_run_answers_while_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with exporters.ThreadingHTTPServer(("", 0), None) as free:
        port = free.server_port
    line = (
        "pretrain --model tiny-gpt --mock-data --vocab 64 --micro-batch 1 --lr 1e-3 --steps 100000 --device cpu "
        f"--metrics-port {port}"
    )
    metrics, answers = tmp_path / "m.jsonl", list[tuple[int, str]]()
    read = list[dict[str, float]]()

    def watch() -> None:
        while not metrics.exists() or '"step": 2,' not in metrics.read_text():
            time.sleep(0.05)
        try:
            read.append(figures(port))
            answers.append(ask(port, "/health"))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    assert main([*line.split(), "--metrics", str(metrics), "--log-interval", "1"]) == 128 + signal.SIGTERM
    watching.join(60)
    (found,), ((status, text),) = read, answers
    assert found["mega_step"] >= 2 and found["mega_loss"] > 0 and found["mega_tokens_per_second_per_device"] > 0
    assert status == 200 and json.loads(text)["phase"] == "training"
    assert f"at port {port} (/metrics, /health)" in capsys.readouterr().out
